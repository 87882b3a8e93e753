"""Advantages, compared with the standard library's statistics, and for groups without a learning signal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.advantage import batch_normalised, group_normalised, group_relative, leave_one_out

REWARDS = st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16)


@given(REWARDS)
def test_std_scale_equals_grpo_with_the_sample_deviation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-4) for reward in rewards]
    assert group_relative(rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS)
def test_none_scale_equals_the_difference_from_the_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    expected = [reward - mean for reward in rewards]
    assert group_relative(rewards, scale="none") == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = group_relative(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-8)
    ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(advantages)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_and_groups_of_one_have_zero_advantages(reward: float, size: int) -> None:
    assert group_relative([reward] * size) == [0.0] * size
    assert group_relative([reward] * size, scale="none") == [0.0] * size


def test_advantages_of_known_values() -> None:
    # Mean 0.5, sample deviation sqrt(1/3).
    expected = [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    assert group_relative([1.0, 0.0, 0.0, 1.0], epsilon=0.0) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_rejected_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=f"reward 1 of the group is {bad}"):
        group_relative([1.0, bad])


def test_empty_group_and_negative_epsilon_are_rejected() -> None:
    with pytest.raises(ValueError, match="one reward per completion"):
        group_relative([])
    with pytest.raises(ValueError, match="epsilon is -1"):
        group_relative([1.0], epsilon=-1.0)


GROUPS = st.lists(st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=6), max_size=6)
Advantage = Callable[[Sequence[Sequence[float]]], list[list[float]]]
EACH: dict[str, Advantage] = {
    "group_normalised": group_normalised,
    "group_normalised, batch": lambda groups: group_normalised(groups, scale="batch"),
    "leave_one_out": leave_one_out,
    "batch_normalised": batch_normalised,
    "batch_normalised, group": lambda groups: batch_normalised(groups, baseline="group"),
}


@given(GROUPS)
def test_groups_are_normalised_separately(groups: list[list[float]]) -> None:
    assert group_normalised(groups) == [group_relative(group) for group in groups]
    assert group_normalised(groups, scale="none") == [group_relative(group, scale="none") for group in groups]


@given(GROUPS)
def test_leave_one_out_equals_the_difference_from_the_mean_of_the_others(groups: list[list[float]]) -> None:
    for group, advantages in zip(groups, leave_one_out(groups), strict=True):
        for index, advantage in enumerate(advantages):
            others = group[:index] + group[index + 1 :]
            expected = group[index] - statistics.fmean(others) if others else 0.0
            assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(GROUPS.filter(lambda groups: len({reward for group in groups for reward in group}) > 1))
def test_batch_normalisation_spans_all_groups(groups: list[list[float]]) -> None:
    rewards = [reward for group in groups for reward in group]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [[(reward - mean) / (std + 1e-4) for reward in group] for group in groups]
    for actual, wanted in zip(batch_normalised(groups), expected, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(GROUPS)
def test_group_baseline_makes_each_group_sum_to_zero(groups: list[list[float]]) -> None:
    for group, advantages in zip(groups, batch_normalised(groups, baseline="group"), strict=True):
        assert len(group) == len(advantages)
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_equal_rewards_have_zero_advantages(name: str) -> None:
    assert EACH[name]([[0.1, 0.1, 0.1], [0.1], [0.1, 0.1]]) == [[0.0] * 3, [0.0], [0.0] * 2]
    assert EACH[name]([[3.0]]) == [[0.0]]
    assert EACH[name]([]) == []


def test_group_of_one_has_advantages_only_without_a_group_baseline() -> None:
    assert batch_normalised([[1.0], [0.0, 0.0]], epsilon=0.0)[0][0] == pytest.approx(1.1547005)
    assert batch_normalised([[1.0], [0.0, 0.5]], baseline="group")[0] == [0.0]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_rewards_are_rejected_with_their_group(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"reward 1 of group 1 is {bad}: drop a completion whose scoring failed"):
        EACH[name]([[1.0], [0.0, bad]])
    with pytest.raises(ValueError, match="group 1 has no rewards"):
        EACH[name]([[1.0], []])


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(ValueError, match="scale is 'mad': give std, batch or none"):
        group_normalised([[1.0]], scale="mad")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="baseline is 'critic': give none or group"):
        batch_normalised([[1.0]], baseline="critic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon is -1"):
        batch_normalised([[1.0]], epsilon=-1.0)


def test_batch_scale_equals_that_of_trl() -> None:
    """The numbers were computed once by the code of TRL 1.16: `GRPOTrainer` with `scale_rewards = "batch"`."""
    found = group_normalised([[1.0, 0.0, 0.25], [2.0, 2.0, 1.5], [0.5, -1.0, 0.0]], scale="batch")
    assert [value for group in found for value in group] == pytest.approx(
        [0.5753397, -0.4109569, -0.1643828, 0.1643827, 0.1643827, -0.3287656, 0.6575311, -0.8219139, 0.1643828],
        rel=1e-5,
    )


@given(GROUPS.filter(lambda groups: len({reward for group in groups for reward in group}) > 1))
def test_batch_scale_divides_by_the_deviation_of_all_rewards(groups: list[list[float]]) -> None:
    std = statistics.stdev([reward for group in groups for reward in group])
    for group, advantages in zip(groups, group_normalised(groups, scale="batch"), strict=True):
        mean = statistics.fmean(group)
        assert advantages == pytest.approx([(reward - mean) / (std + 1e-4) for reward in group], rel=1e-9, abs=1e-9)


def test_batch_scale_of_equal_rewards_needs_no_epsilon() -> None:
    assert group_normalised([[1.0, 1.0], [1.0]], scale="batch", epsilon=0.0) == [[0.0, 0.0], [0.0]]


# The numbers were computed once by the advantage estimators of verl 0.9.1 (`core_algos`), one token per completion.
REWARDS = [[1.0, 0.0, 0.25], [2.0, 2.0], [0.5, -1.0]]


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        pytest.param(
            group_normalised(REWARDS),
            [1.120681733, -0.800486952, -0.320194781, 0.0, 0.0, 0.707040121, -0.707040121],
            id="verl grpo, epsilon 1e-4",
        ),
        pytest.param(
            group_normalised(REWARDS, scale="none"),
            [0.583333333, -0.416666667, -0.166666667, 0.0, 0.0, 0.75, -0.75],
            id="verl grpo without the deviation",
        ),
        pytest.param(leave_one_out(REWARDS), [0.875, -0.625, -0.25, 0.0, 0.0, 1.5, -1.5], id="verl rloo"),
        pytest.param(
            batch_normalised(REWARDS, epsilon=0.0),
            [0.295705133, -0.624266389, -0.394273508, 1.215676655, 1.215676655, -0.164280628, -1.544237910],
            id="verl reinforce_plus_plus",
        ),
        pytest.param(
            batch_normalised(REWARDS, baseline="group", epsilon=0.0),
            [1.106797162, -0.790569401, -0.316227761, 0.0, 0.0, 1.423024922, -1.423024922],
            id="verl reinforce_plus_plus_baseline",
        ),
    ],
)
def test_advantages_equal_a_published_implementation(advantages: list[list[float]], expected: list[float]) -> None:
    assert [value for group in advantages for value in group] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("rewards", [[0.0, 5e-324], [1e-170, -1e-170, 0.0], [1e15, -1e15], [-0.0, 0.0, 5e-324]])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_advantages_of_any_finite_rewards_are_finite(rewards: list[float], epsilon: float) -> None:
    """A reward replica may give any: a step that cannot be computed would end the run."""
    groups = [rewards, [0.0] * len(rewards)]
    advantages = [
        *group_normalised(groups, epsilon=epsilon),
        *group_normalised(groups, scale="batch", epsilon=epsilon),
        *batch_normalised(groups, epsilon=epsilon),
        *batch_normalised(groups, baseline="group", epsilon=epsilon),
        *leave_one_out(groups),
    ]
    assert all(math.isfinite(value) for row in advantages for value in row)
