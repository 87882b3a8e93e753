"""Steps with tensor parallelism, and log-probabilities over a divided vocabulary: those of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from small_steps import Array, check_mesh, make_examples, make_model, make_settings

from starling.algo.truncation import KeptTokens
from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.loss.logprobs import KeptSets, head_logprobs
from starling.policy.train.model.lm_head import LmHead, LogitTransform, VocabularyShard
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.tensor.styles import check_tensors

MESHES = {
    "tp": {"tp": 2},
    "two key heads on four ranks": {"tp": 4},
    "fsdp and tp": {"dp_shard": 2, "tp": 2},
    "ddp and tp": {"dp_replicate": 2, "tp": 2},
}
TOLERANCE = 4e-6
"""Twice that of other meshes: sums of matrix products are divided otherwise, and the gradients of query and key norms
and biases are small differences of large numbers. A single process in single precision is itself 2.5e-6 from one in
double precision."""
PLAN_TOLERANCE = 6e-6
"""Those of biases of routers are, too (gpt-oss)."""
DOUBLE_TOLERANCE = 1e-6
"""In double precision; log-probabilities are normalised in single precision even there."""
STEPS = [
    ("qwen2", "rl"),
    ("qwen3", "rl"),
    ("qwen3-tied", "rl"),
    ("qwen3_moe", "rl"),
    ("llama", "sft"),
    ("qwen3", "dpo"),
    ("llama", "reward_model"),
]
BY_PLAN = [
    (name, "rl")
    for name in (
        "gemma3",
        "phi3",
        "olmo2",
        "gpt_oss",
        "deepseek_v3",
        "mistral",
        "gemma2",
        "granite",
        "cohere",
        "glm4",
        "starcoder2",
    )
]
"""Other architectures: norms after matrices and over all heads, matrices of several in one, biases, sinks, scaled
embeddings, rotary embeddings by kind of layer, latent attention, and shared experts."""


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ("tp", STEPS),
        ("tp", BY_PLAN[:2]),
        ("two key heads on four ranks", STEPS[:1]),
        ("fsdp and tp", STEPS[2:3]),
        *(
            pytest.param(mesh, steps, marks=pytest.mark.campaign)
            for mesh, steps in (
                ("two key heads on four ranks", STEPS[1:]),
                ("fsdp and tp", [*STEPS[:2], *STEPS[3:]]),
                ("ddp and tp", STEPS),
                ("tp", BY_PLAN[2:]),
                ("two key heads on four ranks", BY_PLAN),
                ("fsdp and tp", BY_PLAN),
            )
        ),
    ],
)
def test_every_gradient_is_that_of_a_single_process(mesh: str, steps: list[tuple[str, str]]) -> None:
    """Those of query and key norms too, which are sums over ranks, with several passes before an update."""
    check_mesh(MESHES[mesh], steps, PLAN_TOLERANCE if steps[0] in BY_PLAN else TOLERANCE)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ("tp", [("qwen2", "rl")]),
        pytest.param("tp", [("qwen3", "rl")], marks=pytest.mark.campaign),
        pytest.param("two key heads on four ranks", BY_PLAN, marks=pytest.mark.campaign),
    ],
)
def test_every_gradient_in_double_precision_is_that_of_a_single_process(
    mesh: str, steps: list[tuple[str, str]]
) -> None:
    """So what differs in single precision is rounding."""
    check_mesh(MESHES[mesh], steps, DOUBLE_TOLERANCE, torch.float64)


def head_outcome(rank: int, num_ranks: int) -> list[Array]:
    """Return log-probabilities, entropy and gradients of an output layer whose rows are divided over ranks."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, num_tokens = 61, 16, 10
    hidden = torch.randn(num_tokens, width, generator=generator).requires_grad_()
    whole, bias = torch.randn(vocabulary, width, generator=generator), torch.randn(vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (num_tokens, 2), generator=generator)
    temperature = 0.5 + torch.rand(num_tokens, generator=generator)
    counts = np.array([0, 5] * (num_tokens // 2), dtype=np.int32)
    ids = [np.unique([*row, 1, 2, 3])[:5] for row in targets[1::2].tolist()]
    counts[1::2] = [len(one) for one in ids]
    kept = KeptSets(KeptTokens(counts, np.concatenate(ids).astype(np.int32)))
    own = slice(0, vocabulary)
    if num_ranks > 1:
        rows = -(-vocabulary // num_ranks)
        own = slice(rows * rank, min(vocabulary, rows * (rank + 1)))
    weight, own_bias = whole[own].clone().requires_grad_(), bias[own].clone().requires_grad_()
    shard = VocabularyShard(own.start, dist.group.WORLD) if num_ranks > 1 else None
    head = LmHead(weight, own_bias, LogitTransform("cap", 3.0), shard)
    logprobs, entropy = head_logprobs(
        hidden, head, targets, temperature, with_entropy_gradient=True, kept=kept, chunk_tokens=4
    )
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().add(entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert own_bias.grad is not None
    return [one.detach().numpy() for one in (logprobs, entropy, hidden.grad, weight.grad, own_bias.grad)]


def test_logprobs_over_a_divided_vocabulary() -> None:
    """With truncated sampling, temperatures, a cap, several targets and the gradient of the entropy."""
    expected = head_outcome(0, 1)
    ranks = run_ranks(2, head_outcome, 2)
    for logprobs, entropy, *_ in ranks:
        np.testing.assert_allclose(logprobs, expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ranks[0][2] + ranks[1][2], expected[2], rtol=1e-4, atol=1e-5)
    for part in (3, 4):
        together = np.concatenate([ranks[0][part], ranks[1][part]])
        np.testing.assert_allclose(together, expected[part], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "size", "text"),
    [
        ("qwen3", 3, "tp = 3 does not divide the 4 attention heads"),
        ("llama", 8, "tp = 8 does not divide the 4 attention heads"),
        ("gpt2", 2, "has no plan for GPT2LMHeadModel, only for language and reward models for which"),
    ],
)
def test_models_that_ranks_cannot_divide_are_refused(kind: str, size: int, text: str) -> None:
    """With the number that they cannot divide."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)) if kind == "gpt2" else make_model(kind, False)
    with pytest.raises(ConfigError, match=text):
        check_tensors(model, size)


def test_entry_of_a_plan_without_a_counterpart_is_refused() -> None:
    """By its name."""
    model = make_model("qwen3", False)
    model.config.base_model_tp_plan = model.config.base_model_tp_plan | {"layers.*.mlp.down_proj": "diagonal"}
    with pytest.raises(
        ConfigError, match=r'layers\.\*\.mlp\.down_proj of its plan .* its style "diagonal" is not known'
    ):
        check_tensors(model, 2)


def wrong_plan_refusal(_: int) -> str:
    """Return what a rank says of a plan that lacks a matrix."""

    def load() -> Any:
        model = make_model("qwen3", False)
        plan = dict(model.config.base_model_tp_plan)
        del plan["layers.*.mlp.down_proj"]
        model.config.base_model_tp_plan = plan
        return model

    with pytest.raises(ConfigError) as caught:
        Learner(load, make_settings(tp=2), mesh=Mesh(ParallelSettings(tp=2)))
    return str(caught.value)


def test_plan_that_computes_something_else_is_refused() -> None:
    """Found by a few tokens before the first step."""
    for found in run_ranks(2, wrong_plan_refusal):
        assert "tp = 2 is not available for Qwen3ForCausalLM: divided by the plan of transformers" in found


def load_in_turns(_: int, turns: Path) -> float:
    """Load a model on a rank while no other rank loads one, and make a step. Returns its loss."""
    mesh = Mesh(ParallelSettings(tp=2), turns=turns)
    learner = Learner(lambda: make_model("qwen3", False), make_settings(tp=2), mesh=mesh)
    return learner.supervise(make_examples(), num_steps=1)["loss"]


def test_ranks_load_the_model_one_after_the_other(tmp_path: Path) -> None:
    """None waits, in its turn, for a rank that waits for its own."""
    turns = tmp_path / "turns"
    turns.touch()
    first, second = run_ranks(2, load_in_turns, turns)
    assert first == second
