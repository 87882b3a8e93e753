"""Masks and valid rates of rewards, and the rewards of a call from those of its requests."""

from __future__ import annotations

import pytest

from starling.common.errors import ConfigError
from starling.rewardclient.errors import TooFewRewardsError
from starling.rewardclient.rewards import Rewards, concatenate, failed_rewards, merge


def rewards(
    *values: float | None, groups: tuple[int, ...] | None = None, **scores: tuple[float | None, ...]
) -> Rewards:
    return Rewards(
        rewards=values,
        statuses=tuple("ok" if value is not None else "reward_error" for value in values),
        problems=tuple(
            () if value is not None else (f"sample {index} crashed.",) for index, value in enumerate(values)
        ),
        scores=scores,
        groups=groups or (0,) * len(values),
    )


def test_mask_and_valid_rate_of_all_and_of_each_group() -> None:
    found = rewards(1.0, None, 0.0, None, None, groups=(0, 1, 0, 1, 0))
    assert found.mask == (True, False, True, False, False)
    assert found.valid_rate == 0.4
    assert [(one.indices, one.rewards, one.mask, one.valid_rate) for one in found.by_group()] == [
        ((0, 2, 4), (1.0, 0.0, None), (True, True, False), 2 / 3),
        ((1, 3), (None, None), (False, False), 0.0),
    ]


def test_demanded_rate_counts_zero_as_valid() -> None:
    found = rewards(0.0, None, groups=(0, 0))
    assert found.require(0.5) is found
    assert found.require(0.0, in_each_group=True) is found
    with pytest.raises(TooFewRewardsError, match=r"of 2 samples is below 0.6 \(at the lowest 0.5\): sample 1 crashed"):
        found.require(0.6)


def test_demanded_rate_of_each_group_names_how_many_are_below() -> None:
    found = rewards(1.0, 1.0, None, 1.0, groups=(0, 0, 1, 1))
    assert found.require(0.75) is found
    with pytest.raises(TooFewRewardsError, match=r"in 1 of 2 groups is below 0.75 \(at the lowest 0.5\)"):
        found.require(0.75, in_each_group=True)
    with pytest.raises(ConfigError, match="give a share from 0 to 1"):
        found.require(75)


def test_no_samples_are_all_valid() -> None:
    empty = merge([], ())
    assert (empty.valid_rate, empty.by_group(), empty.require(1.0)) == (1.0, (), empty)


def test_merge_puts_each_sample_in_its_place() -> None:
    first, second = rewards(1.0, 3.0, a=(1.0, 2.0)), rewards(2.0, None, b=(3.0, None))
    found = merge([((0, 2), first), ((3, 1), second)], (0, 1, 0, 1))
    assert found.rewards == (1.0, None, 3.0, 2.0)
    assert found.statuses == ("ok", "reward_error", "ok", "ok")
    assert found.problems == ((), ("sample 1 crashed.",), (), ())
    assert found.scores == {"a": (1.0, None, 2.0, None), "b": (None, None, None, 3.0)}
    assert found.groups == (0, 1, 0, 1)


def test_merge_leaves_samples_of_no_part_invalid() -> None:
    assert merge([((1,), rewards(1.0))], (0, 0)).mask == (False, True)


def test_concatenate_keeps_groups_apart() -> None:
    found = concatenate([rewards(1.0, 2.0, groups=(0, 1)), failed_rewards((0, 0), "reward_timeout", "late.")])
    assert found.groups == (0, 1, 2, 2)
    assert found.rewards == (1.0, 2.0, None, None)
    assert found.statuses == ("ok", "ok", "reward_timeout", "reward_timeout")
    assert found.problems[3] == ("late.",)
