"""Rotary embeddings of every type: packed sequences of mixed lengths against one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from starling.algo.architecture import context_length
from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.model.load import longest_sequence
from starling.policy.train.sft import SftTrainer

ORIGINAL, CONTEXT = 16, 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}
LONGEST = {"longrope": ORIGINAL}
"""Where it is not the context."""


def model_with(tiny: Callable[..., Any], kind: str) -> Any:
    rope = {"rope_theta": 10_000.0, **ROPES[kind]}
    return tiny("llama", max_position_embeddings=CONTEXT, rope_parameters=rope)


def examples(longest: int) -> list[SftExample]:
    generator = np.random.default_rng(0)

    def ids(num: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return generator.integers(31, size=num).astype(np.int32)

    return [SftExample(ids(prompt), ids(response)) for prompt, response in [(5, 4), (3, longest - 3), (2, 9), (7, 1)]]


def step(model: Any, batch: Sequence[SftExample], **changes: Any) -> dict[str, float]:
    optimizer = OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.0)
    settings = PolicySettings(sft=SftStepSettings(optimizer=optimizer), **changes)
    return SftTrainer(model, settings, total_steps=1).step(batch)


def test_every_rope_type_of_transformers_is_tested() -> None:
    assert {*ROPE_INIT_FUNCTIONS, "default"} == set(ROPES)


@pytest.mark.parametrize("kind", ROPES)
def test_packed_gradient_equals_that_of_one_sequence_at_a_time(tiny: Callable[..., Any], kind: str) -> None:
    plain, model = model_with(tiny, kind), model_with(tiny, kind)
    longest = longest_sequence(model)
    assert longest == LONGEST.get(kind, CONTEXT)
    batch, losses = examples(longest), []
    for example in batch:
        ids = torch.from_numpy(np.concatenate([example.prompt_ids, example.response_ids]).astype(np.int64))[None]
        labels = ids.clone()
        labels[0, : len(example.prompt_ids)] = -100
        logits = plain(ids).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:], ignore_index=-100, reduction="sum"))
    expected = torch.stack(losses).sum() / sum(len(example.response_ids) for example in batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert step(model, batch, tokens_per_microbatch=1000)["loss"] == pytest.approx(expected.item(), abs=1e-6)
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_longer_sequence_of_longrope_is_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=f"{ORIGINAL + 1} tokens.*{ORIGINAL}"):
        step(model_with(tiny, "longrope"), examples(ORIGINAL + 1))


def test_context_of_longrope_is_the_original_one() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_type": "longrope"}
    phi = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={**factors, "rope_theta": 10_000.0},
        pad_token_id=0,
    )
    assert context_length(phi) == ORIGINAL
    by_layer = Gemma3TextConfig(hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=CONTEXT)
    assert context_length(by_layer) == CONTEXT


def test_router_logits_of_a_configuration_are_turned_off(tiny: Callable[..., Any]) -> None:
    plain, model = tiny("qwen3_moe"), tiny("qwen3_moe", output_router_logits=True)
    batch = examples(20)
    assert step(model, batch)["loss"] == step(plain, batch)["loss"]


def test_dropout_is_off_in_training(tiny: Callable[..., Any]) -> None:
    plain, model = tiny("llama"), tiny("llama", attention_dropout=0.5).train()
    batch = examples(20)
    assert step(model, batch)["loss"] == step(plain, batch)["loss"]
