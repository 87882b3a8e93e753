"""Estimated memory of a rank, beside what the model's own code was observed to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from starling.policy.plan.memory import _of_place, memory_of
from starling.policy.plan.sizes import model_sizes
from starling.policy.plan.traffic import Update
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.budget import estimate_memory
from starling.weightsync.layouts.presets import PRESETS

CHUNK_TOKENS = 1024


def _outline(name: str) -> Any:
    """Return the model of a preset, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = dict(PRESETS[name])
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b", "qwen2.5-7b"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_estimate_is_near_what_is_observed(name: str, checkpointing: str) -> None:
    model, num_tokens = _outline(name), 16384
    settings = PolicySettings.model_validate({"memory": {"checkpointing": checkpointing}})
    observed = estimate_memory(model, settings, "rl", torch.device("cpu"), num_tokens)
    sizes = model_sizes(PRESETS[name])
    assert sizes.num_parameters == model.num_parameters()
    update = Update(1, num_tokens, 2, recomputes=checkpointing == "full")
    estimated = memory_of(sizes, ParallelSettings(), update, chunk_tokens=CHUNK_TOKENS)
    assert estimated.states == pytest.approx(observed.lasting, rel=0.01)
    assert estimated.total == pytest.approx(observed.peak, rel=0.15)


@pytest.mark.parametrize(
    ("num_tokens", "item_bytes", "pp", "numbers"),
    [
        (256, 4, 1, 256),  # all probabilities are kept
        (600, 4, 1, 3 * 64),  # more than 8 chunks are not
        (256, 2, 1, 3 * 64),
        (256, 4, 2, 3 * 64),  # other microbatches come before the backward pass
    ],
)
def test_kept_probabilities_are_counted(num_tokens: int, item_bytes: int, pp: int, numbers: int) -> None:
    sizes = model_sizes(PRESETS["qwen3-8b"])
    update = Update(2, num_tokens, item_bytes, recomputes=True)
    found = memory_of(sizes, ParallelSettings(pp=pp), update, chunk_tokens=64)
    last = found.logits if pp == 1 else _of_place(sizes, ParallelSettings(pp=pp), update, 1, 64, 8).logits
    assert last == 4 * numbers * sizes.vocabulary


def test_axes_divide_what_they_should() -> None:
    sizes, update = model_sizes(PRESETS["qwen3-8b"]), Update(1, 8192, 2, recomputes=True)

    def memory(*, offloads: bool = False, **parallel: int) -> Any:
        return memory_of(sizes, ParallelSettings(**parallel), update, chunk_tokens=CHUNK_TOKENS, offloads=offloads)

    alone, sharded, copied, divided = memory(), memory(dp_shard=8), memory(dp_replicate=8), memory(tp=4)
    # A shard has float32 weights only, one device bfloat16 ones as well.
    assert sharded.states == pytest.approx(alone.states * 16 / 18 / 8, rel=0.001)
    assert copied == alone
    assert divided.states == pytest.approx(alone.states / 4, rel=0.001)
    assert divided.activations == pytest.approx(alone.activations / 4)
    assert sharded.activations == alone.activations
    assert memory(offloads=True, dp_shard=8).states == pytest.approx(sharded.states / 2), "without two moments of four"
    assert divided.gathered == 0.0 < sharded.gathered
