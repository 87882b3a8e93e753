"""Supervised steps against the cross-entropy of their responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.sft import SftTrainer

torch.set_num_threads(1)


def examples() -> list[SftExample]:
    generator = np.random.default_rng(0)
    return [
        SftExample(generator.integers(31, size=p).astype(np.int32), generator.integers(31, size=r).astype(np.int32))
        for p, r in [(5, 4), (2, 9), (7, 1), (1, 6)]
    ]


def settings(learning_rate: float, **changes: Any) -> PolicySettings:
    optimizer = OptimizerSettings(learning_rate=learning_rate, max_grad_norm=0.0)
    return PolicySettings(sft=SftStepSettings(optimizer=optimizer), **changes)


@pytest.mark.parametrize("budget", [12, 1000])
def test_sft_step_equals_cross_entropy_of_responses(tiny: Callable[..., Any], budget: int) -> None:
    plain, model = tiny(), tiny()
    losses = []
    for example in examples():
        ids = torch.from_numpy(np.concatenate([example.prompt_ids, example.response_ids]).astype(np.int64))[None]
        labels = ids.clone()
        labels[0, : len(example.prompt_ids)] = -100
        logits = plain(ids).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:], ignore_index=-100, reduction="sum"))
    expected = torch.stack(losses).sum() / 20
    expected.backward()  # type: ignore[no-untyped-call]
    trainer = SftTrainer(model, settings(1e-3, tokens_per_microbatch=budget), total_steps=1)
    metrics = trainer.step(examples())
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["num_tokens"] == 20.0
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-5, atol=1e-6)


def test_sft_memorises_a_fixed_batch(tiny: Callable[..., Any]) -> None:
    model = tiny()
    trainer = SftTrainer(model, settings(1e-2), total_steps=60)
    losses = [trainer.step(examples())["loss"] for _ in range(60)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.05
    for example in examples():
        ids = np.concatenate([example.prompt_ids, example.response_ids]).astype(np.int64)
        with torch.no_grad():
            best = model(torch.from_numpy(ids)[None]).logits[0].argmax(-1)
        assert best[len(example.prompt_ids) - 1 : -1].tolist() == example.response_ids.tolist()


def test_sft_invalid_examples_are_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no examples"):
        SftTrainer(tiny(), settings(1e-3), total_steps=1).step([])
    one = np.ones(1, dtype=np.int32)
    with pytest.raises(ConfigError, match="'row 3' has an empty response"):
        SftExample(one, one[:0], "row 3")
    with pytest.raises(ConfigError, match="'row 4' has no tokens"):
        SftExample(one[:0], one, "row 4")
