"""Advantages, compared with the standard library's statistics, and for groups without a learning signal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.advantage import (
    batch_normalised,
    decoupled_normalised,
    group_normalised,
    group_relative,
    leave_one_out,
)
from starling.common.wire.messages import ScorerScores

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


# --- each scorer by itself: GDPO --------------------------------------------------------------------------------------


def scorer(*values: float | None, weight: float = 1.0, label: str = "judge") -> ScorerScores:
    return ScorerScores(label=label, weight=weight, values=values)


def decoupled(*groups: list[ScorerScores], epsilon: float = 0.0) -> list[list[float]]:
    return decoupled_normalised([[0.0] * len(own[0].values) for own in groups], groups, epsilon=epsilon)


def test_decoupled_advantages_of_known_values() -> None:
    """Deviations: sqrt(1/3) and 10 sqrt(1/3) in the first group, sqrt(8/3) in the second, sqrt(1.5/7) of all sums."""
    first = [scorer(1.0, 0.0, 0.0, 1.0), scorer(0.0, 10.0, 10.0, 0.0, weight=0.5)]
    second = [scorer(7.0, 7.0, 7.0, 7.0), scorer(4.0, 2.0, 2.0, 0.0, weight=0.5)]
    a, b = math.sqrt(0.875), math.sqrt(1.75)
    found = decoupled(first, second)
    assert found[0] == pytest.approx([a, -a, -a, a])
    assert found[1] == pytest.approx([b, 0.0, 0.0, -b])


def test_decoupled_advantages_distinguish_what_the_sum_of_scores_does_not() -> None:
    """The paper's example: one of two completions is better by one of two binary scorers, or by both."""
    by_one = [scorer(0.0, 0.0), scorer(0.0, 1.0)]
    by_both = [scorer(0.0, 1.0), scorer(0.0, 1.0)]
    half = math.sqrt(0.5)
    assert group_normalised([[0.0, 1.0], [0.0, 2.0]], epsilon=0.0) == [pytest.approx([-half, half])] * 2
    one, both = decoupled(by_one, by_both)
    assert both == pytest.approx([2 * value for value in one])
    # The sum of the squares before the last division is 2 (1/2) + 2 (2), of 4 completions.
    assert one == pytest.approx([-half / math.sqrt(5 / 3), half / math.sqrt(5 / 3)])


SCORED = st.lists(
    st.integers(2, 6).flatmap(
        lambda num: st.lists(
            st.lists(st.integers(-1600, 1600).map(lambda n: n / 16), min_size=num, max_size=num), min_size=2, max_size=2
        )
    ),
    min_size=1,
    max_size=5,
)
"""Of each group the scores by two scorers."""
WEIGHTS = st.sampled_from([-2.0, 0.25, 1.0, 3.0])


def of(groups: list[list[list[float]]], *weights: float) -> list[list[ScorerScores]]:
    labels = [f"scorer {index}" for index in range(len(weights))]
    return [
        [scorer(*row, weight=w, label=label) for row, w, label in zip(rows, weights, labels, strict=True)]
        for rows in groups
    ]


@given(SCORED, WEIGHTS, WEIGHTS)
def test_decoupled_advantages_equal_the_equations_of_the_paper(
    groups: list[list[list[float]]], first: float, second: float
) -> None:
    sums = []
    for rows in groups:
        a, b = ([(x - statistics.fmean(row)) / (statistics.stdev(row) + 1e-4) for x in row] for row in rows)
        sums.append([first * x + second * y for x, y in zip(a, b, strict=True)])
    flat = [value for row in sums for value in row]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    found = decoupled(*of(groups, first, second), epsilon=1e-4)
    for row, expected in zip(found, sums, strict=True):
        assert row == pytest.approx([(value - mean) / (std + 1e-4) for value in expected], rel=1e-6, abs=1e-5)


@given(SCORED, WEIGHTS)
def test_decoupled_advantages_of_one_scorer_are_those_of_grpo_over_their_deviation(
    groups: list[list[list[float]]], weight: float
) -> None:
    scores = [rows[0] for rows in groups]
    expected = [[weight * value for value in row] for row in group_normalised(scores)]
    flat = [value for row in expected for value in row]
    std = statistics.stdev(flat, xbar=0.0)
    found = decoupled(*[[scorer(*row, weight=weight)] for row in scores], epsilon=1e-4)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx([value / (std + 1e-4) for value in wanted], rel=1e-9, abs=1e-9)


@given(SCORED, WEIGHTS, st.floats(-1e3, 1e3))
def test_scorer_with_constant_scores_adds_nothing(
    groups: list[list[list[float]]], weight: float, constant: float
) -> None:
    without = of([[rows[0]] for rows in groups], 1.0)
    constants = [[rows[0], [constant] * len(rows[0])] for rows in groups]
    assert decoupled(*of(constants, 1.0, weight), epsilon=1e-4) == decoupled(*without, epsilon=1e-4)


@given(SCORED, st.sampled_from([2.0**-20, 0.5, 64.0, 2.0**20]))
def test_scale_of_a_scorer_changes_nothing(groups: list[list[list[float]]], factor: float) -> None:
    """Powers of two, so that the scores are scaled exactly."""
    scaled = [[[factor * value for value in rows[0]], rows[1]] for rows in groups]
    for found, expected in zip(decoupled(*of(scaled, 1.0, 0.5)), decoupled(*of(groups, 1.0, 0.5)), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_groups_of_equal_scores_have_advantages_of_exactly_zero() -> None:
    equal = [scorer(0.1, 0.1, 0.1), scorer(0.3, 0.3, 0.3, weight=0.7)]
    other = [scorer(0.1, 0.7, 0.4), scorer(0.3, 0.1, 0.9, weight=0.7)]
    assert decoupled(equal, other, epsilon=1e-4)[0] == [0.0] * 3
    assert decoupled(equal, equal) == [[0.0] * 3] * 2
    assert decoupled_normalised([], []) == []
    assert decoupled([scorer(1.0)], [scorer(2.0)]) == [[0.0], [0.0]]


def test_scores_that_are_none_are_left_out() -> None:
    whole = [scorer(1.0, 0.0, 0.5), scorer(None, None, None)]
    assert decoupled(whole, [scorer(0.0, 2.0)]) == decoupled([scorer(1.0, 0.0, 0.5)], [scorer(0.0, 2.0)])
    assert decoupled([scorer(None, None)]) == [[0.0, 0.0]]
    half = math.sqrt(0.5)  # of the two scores that there are; the third completion has none
    assert decoupled([scorer(0.0, 1.0, None), scorer(0.0, 0.0, 0.0)]) == [
        pytest.approx([-half / math.sqrt(0.5), half / math.sqrt(0.5), 0.0])
    ]


def test_weight_zero_adds_nothing() -> None:
    assert decoupled([scorer(1.0, 0.0), scorer(0.0, 9.0, weight=0.0)]) == decoupled([scorer(1.0, 0.0)])


def test_invalid_scores_are_rejected_with_their_scorer_and_group() -> None:
    with pytest.raises(ValueError, match="2 scores of scorer 'judge' in group 1 came for 3 completions"):
        decoupled_normalised([[1.0], [0.0] * 3], [[scorer(1.0)], [scorer(1.0, 2.0)]])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="a score of scorer 'judge' in group 0, or its weight, is not finite"):
            decoupled([scorer(1.0, bad)])
        with pytest.raises(ValueError, match="or its weight, is not finite"):
            decoupled([scorer(1.0, 0.0, weight=bad)])
    with pytest.raises(ValueError, match="2 groups have scores of 1: give those of each group"):
        decoupled_normalised([[1.0], [2.0]], [[scorer(1.0)]])
    with pytest.raises(ValueError, match="group 0 has no rewards"):
        decoupled_normalised([[]], [[scorer()]])
    with pytest.raises(ValueError, match="epsilon is -1"):
        decoupled([scorer(1.0)], epsilon=-1.0)


@pytest.mark.parametrize("values", [(0.0, 5e-324), (1e-170, -1e-170), (1e15, -1e15), (-0.0, 0.0)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_decoupled_advantages_of_any_finite_scores_are_finite(values: tuple[float, float], epsilon: float) -> None:
    found = decoupled([scorer(*values), scorer(0.0, 0.0)], [scorer(0.0, 1.0), scorer(*values)], epsilon=epsilon)
    assert all(math.isfinite(value) for row in found for value in row)
