"""Model FLOPs against PyTorch's own counter, and MFU against a device's peak."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from starling.algo.attention.forest import Forest
from starling.policy.train.metrics.flops import ModelCost, model_cost, peak_of, peak_tflops, step_flops, utilisation

torch.set_num_threads(1)


def make(kind: str, **changes: Any) -> Any:
    """Make a tiny model whose products are all visible to the counter: eager attention, eager experts."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
    settings: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    if kind == "qwen3_moe":
        settings |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = configs[kind](**settings | changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


def counted(model: Any, lengths: list[int]) -> float:
    """Return PyTorch's count for a forward and backward pass of each document."""
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            embedded = model.get_input_embeddings()(torch.arange(length)[None] % 50)
            # Gradients with respect to embeddings are computed if they are trained, and not if they are frozen.
            model(inputs_embeds=embedded.detach().requires_grad_(), use_cache=False).logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_step_flops_equal_pytorch_counter(kind: str, *, tied: bool) -> None:
    """Ragged documents, grouped-query attention with heads wider than the model, active experts only."""
    model, lengths = make(kind, tie_word_embeddings=tied), [3, 17, 8]
    assert step_flops(model_cost(model), lengths, lengths, sum(lengths)) == counted(model, lengths)


def test_step_flops_frozen_weights_count_4() -> None:
    """As with adapters, where most of the model is frozen."""
    model, lengths = make("qwen3"), [5, 12]
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    cost = model_cost(model)
    assert 0 < cost.trained_body < cost.body
    assert cost.trained_head == 0
    assert step_flops(cost, lengths, lengths, sum(lengths)) == counted(model, lengths)


def test_step_flops_head_counts_predicted_tokens() -> None:
    """A prompt's tokens never reach the output layer."""
    cost = model_cost(make("llama"))
    assert step_flops(cost, [10], [10], 10) - step_flops(cost, [10], [10], 4) == 6 * 6 * 50 * 32


def test_step_flops_segments_of_a_sequence_add_up_to_its_square() -> None:
    """A prompt with a completion costs as one document does; a second completion costs its own tokens only."""
    cost = model_cost(make("llama"))
    whole, shared = Forest((10,), (-1,)), Forest((6, 4), (-1, 0))
    assert step_flops(cost, shared.lengths, shared.reach, 4) == step_flops(cost, whole.lengths, whole.reach, 4)
    two = Forest((6, 4, 4), (-1, 0, 0))
    more = step_flops(cost, two.lengths, two.reach, 4) - step_flops(cost, whole.lengths, whole.reach, 4)
    assert more == 6 * cost.body * 4 + 12 * cost.attention * 4 * (4 + 2 * 6)


def test_step_flops_window_bounds_attention() -> None:
    """One of two layers has a window of 4 tokens; shorter documents cost the same as without."""
    windowed = model_cost(make("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1))
    full = model_cost(make("qwen3"))
    assert windowed.window == 4
    assert step_flops(windowed, [4, 2], [4, 2], 6) == step_flops(full, [4, 2], [4, 2], 6)
    assert step_flops(full, [10], [10], 1) - step_flops(windowed, [10], [10], 1) == 12 * (4 * 16) * (10 * 10 - 10 * 4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Intel(R) Xeon(R)", None),
    ],
)
def test_peak_tflops_of_known_devices(name: str, peak: float | None) -> None:
    """By whole words: an L40S is not an L4."""
    assert peak_tflops(name) == peak


def test_utilisation_without_peak_has_no_mfu() -> None:
    """A CPU has no known peak, unless the recipe sets one."""
    cpu = torch.device("cpu")
    assert peak_of(cpu) is None
    assert utilisation(3e12, 2.0, peak_of(cpu)) == {"tflops": 1.5}
    known = utilisation(3e12, 2.0, peak_of(cpu, 6.0))
    assert math.isclose(known["mfu"], 0.25)
    assert utilisation(1.0, 0.0, 6.0) == {}


def test_step_flops_equal_palm_formula() -> None:
    """One document: 6 N T + 12 L H Q T^2, as in PaLM's appendix B."""
    cost = ModelCost(body=1000, trained_body=1000, head=200, trained_head=200, attention=2 * 4 * 16)
    assert step_flops(cost, [64], [64], 64) == 6 * 1200 * 64 + 12 * 2 * 4 * 16 * 64**2
