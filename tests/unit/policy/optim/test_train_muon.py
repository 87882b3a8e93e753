"""Muon against its definition in float64, and against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.optim.muon import Muon, hidden_matrices, orthogonalised
from starling.policy.train.optim.optimizer import ModelOptimizer

torch.set_num_threads(1)


def by_singular_values(matrix: Tensor) -> Tensor:
    """Newton-Schulz does not change singular vectors, so the polynomial can be applied to the singular values."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / max(float(values.norm()), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@examples(30)
@given(rows=st.integers(1, 24), columns=st.integers(1, 24), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_orthogonalised_changes_only_singular_values(rows: int, columns: int, scale: float, seed: int) -> None:
    matrix = scale * draw(rows, columns, seed=seed)
    torch.testing.assert_close(orthogonalised(matrix).double(), by_singular_values(matrix), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 12, 8), (3, 5, 9), (2, 6, 6)])
def test_orthogonalised_treats_stacked_matrices_separately(shape: tuple[int, ...]) -> None:
    stack = draw(*shape)
    stack[1] = 0.0
    found = orthogonalised(stack)
    for matrix, alone in zip(found, stack, strict=True):
        torch.testing.assert_close(matrix.double(), by_singular_values(alone), rtol=1e-3, atol=1e-4)
    assert not found[1].any(), "an expert that no token reached does not move"


class Mixture(torch.nn.Module):
    """A matrix, nine stacked experts, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(6, 10)
        self.experts = torch.nn.ParameterDict({"up": torch.nn.Parameter(draw(9, 8, 6, seed=1))})


def test_muon_equals_definition_in_float64() -> None:
    model = Mixture()
    options = OptimizerSettings(
        kind="muon", learning_rate=0.05, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.9), max_grad_norm=0.0
    )
    optimizer = ModelOptimizer(model, options, total_steps=3)
    values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(3):
        optimizer.clear()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.grad = draw(*parameter.shape, seed=10 * step + number)
            if name == "gate.bias":
                continue
            gradient = parameter.grad.double()
            sums[name] = 0.9 * sums[name] + gradient
            stack = torch.atleast_3d(gradient + 0.9 * sums[name]).reshape(-1, *gradient.shape[-2:])
            change = torch.stack([by_singular_values(matrix) for matrix in stack]).reshape(gradient.shape)
            change = change * 0.2 * math.sqrt(max(gradient.shape[-2:]))
            values[name] = values[name] * (1.0 - 0.05 * 0.2) - 0.05 * change
        optimizer.apply(1.0)
    for name in ("gate.weight", "experts.up"):
        found = dict(model.named_parameters())[name]
        torch.testing.assert_close(found.double(), values[name], rtol=1e-4, atol=1e-5)


def test_muon_equals_torch_muon() -> None:
    ours, theirs = draw(12, 8), draw(12, 8)
    muon = Muon([{"params": [ours], "lr": 0.1, "weight_decay": 0.2}], momentum=0.9)
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        ours.grad, theirs.grad = draw(12, 8, seed=seed), draw(12, 8, seed=seed)
        muon.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=3e-3)  # torch's iterates in bfloat16
    assert (ours - draw(12, 8)).abs().max() > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_muon_leaves_embeddings_heads_and_vectors_to_adamw(tiny: Callable[..., Any], tied: bool) -> None:
    model = tiny(tied=tied)
    optimizer = ModelOptimizer(model, OptimizerSettings(kind="muon"), total_steps=1)
    held = optimizer.state_tensors()
    muon = {name.partition(":")[2] for name in held if name.startswith("momentum:")}
    adamw = {name.partition(":")[2] for name in held if name.startswith("exp_avg:")}
    assert {name for name in muon if ".layers.0." in name} == {
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    assert {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"}) <= adamw
    assert muon | adamw == {name for name, _ in model.named_parameters()}
    assert not muon & adamw


def test_hidden_matrices_include_only_expert_stacks_of_3_dims() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 31}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **experts))
    found = hidden_matrices(model, dict(model.named_parameters()))
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= found
    convolution = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.Linear(4, 4))
    assert hidden_matrices(convolution, dict(convolution.named_parameters())) == {"1.weight"}


class Scorer(torch.nn.Module):
    """Parameters of two dims that are not matrices of hidden layers, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.experts = torch.nn.ParameterDict({"up_bias": torch.nn.Parameter(draw(3, 4))})
        self.layer = torch.nn.Linear(4, 4)
        self.score = torch.nn.Linear(4, 1, bias=False)


def test_hidden_matrices_exclude_embeddings_biases_and_scores() -> None:
    model = Scorer()
    assert hidden_matrices(model, dict(model.named_parameters())) == {"layer.weight"}
    optimizer = ModelOptimizer(
        model, OptimizerSettings(kind="muon", learning_rate=0.5, weight_decay=0.5), total_steps=1
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.apply(0.0)
    kept = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert kept == {"experts.up_bias", "layer.bias"}, "of a gradient of 0 only the decay is left, and biases have none"


@pytest.mark.parametrize("model", [torch.nn.LayerNorm(4), torch.nn.Linear(4, 4, bias=False)])
def test_muon_model_with_one_sort_of_parameter(model: torch.nn.Module) -> None:
    optimizer = ModelOptimizer(model, OptimizerSettings(kind="muon", learning_rate=0.1), total_steps=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = draw(*parameter.shape)
    optimizer.apply(1.0)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
