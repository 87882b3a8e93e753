"""The learning rate of each step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.optim.rates import learning_rate


def rates(total: int, **changes: object) -> list[float]:
    settings = OptimizerSettings.model_validate({"learning_rate": 8.0} | changes)
    return [learning_rate(settings, step, total) for step in range(1, total + 1)]


def test_learning_rate_constant_after_linear_warmup() -> None:
    assert rates(6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_learning_rate_linear_decay() -> None:
    assert rates(6, warmup_steps=2, schedule="linear") == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_learning_rate_cosine_decay() -> None:
    expected = [4.0 * (1.0 + math.cos(math.pi * part / 4)) for part in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_after_last_step_is_not_negative(schedule: str) -> None:
    settings = OptimizerSettings.model_validate({"schedule": schedule, "warmup_steps": 3})
    assert all(learning_rate(settings, step, 3) >= 0.0 for step in range(1, 20))


def test_learning_rate_wsd_decays_over_last_steps() -> None:
    assert rates(8, warmup_steps=2, schedule="wsd", decay_steps=4) == [4.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_learning_rate_wsd_sqrt_shape() -> None:
    found = rates(6, schedule="wsd", decay_steps=4, decay_shape="sqrt")
    assert found == pytest.approx([8.0, 8.0, *(8.0 * (1.0 - math.sqrt(part / 4)) for part in range(4))])


def test_learning_rate_wsd_decay_is_limited_by_warmup() -> None:
    assert rates(6, warmup_steps=2, schedule="wsd", decay_steps=40) == rates(6, warmup_steps=2, schedule="linear")


def test_learning_rate_decay_ends_at_final_share() -> None:
    assert rates(4, schedule="linear", final_share=0.5) == [8.0, 7.0, 6.0, 5.0]
    settings = OptimizerSettings(learning_rate=8.0, schedule="cosine", final_share=0.25)
    assert [learning_rate(settings, step, 3) for step in (4, 5, 90)] == [2.0, 2.0, 2.0]


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    shape=st.sampled_from(["linear", "sqrt"]),
    total=st.integers(0, 30),
    warmup=st.integers(0, 40),
    decay=st.integers(1, 40),
    share=st.floats(0.0, 1.0),
)
def test_learning_rate_rises_once_and_falls_once(
    schedule: str, shape: str, total: int, warmup: int, decay: int, share: float
) -> None:
    changes = {"schedule": schedule, "decay_shape": shape, "warmup_steps": warmup, "final_share": share}
    wsd = {"decay_steps": decay} if schedule == "wsd" else {}
    found = rates(total + warmup + 3, **changes, **wsd)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(share * 8.0 * (1.0 - 1e-12) <= rate <= 8.0 for rate in falling)
