"""Group-relative advantages against the standard library's statistics."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.advantage import group_relative

REWARDS = st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16)


@given(REWARDS)
def test_std_scale_is_grpo_with_the_sample_deviation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-4) for reward in rewards]
    assert group_relative(rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS)
def test_none_scale_is_the_difference_from_the_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    expected = [reward - mean for reward in rewards]
    assert group_relative(rewards, scale="none") == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards: list[float]) -> None:
    advantages = group_relative(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-8)
    ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(advantages)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_and_a_group_of_one_have_advantages_of_exactly_zero(reward: float, size: int) -> None:
    assert group_relative([reward] * size) == [0.0] * size
    assert group_relative([reward] * size, scale="none") == [0.0] * size


def test_known_values() -> None:
    # Mean 0.5, sample deviation sqrt(1/3).
    expected = [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    assert group_relative([1.0, 0.0, 0.0, 1.0], epsilon=0.0) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=f"reward 1 of the group is {bad}"):
        group_relative([1.0, bad])


def test_an_empty_group_and_a_negative_epsilon_are_refused() -> None:
    with pytest.raises(ValueError, match="one reward per completion"):
        group_relative([])
    with pytest.raises(ValueError, match="epsilon is -1"):
        group_relative([1.0], epsilon=-1.0)
