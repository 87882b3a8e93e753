"""Rule of the alarm `reward_hacking`: which rewards and evaluation scores raise it, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import Alarm
from starling.controller.core.training.reward_hacking import PREFIX, EvaluatedSteps

UP, DOWN, FLAT = (0.0, 0.1, 0.5, 0.6), (0.6, 0.5, 0.1, 0.0), (0.3, 0.3, 0.3, 0.3)


def alarms_of(rewards: Sequence[float], scores: Sequence[float | None], num_steps: int = 4) -> list[list[str]]:
    """Return the names of the alarms that are on after each step."""
    steps, alarms, found = EvaluatedSteps(("judge",), num_steps), dict[str, Alarm](), []
    for number, (reward, score) in enumerate(zip(rewards, scores, strict=True), start=1):
        metrics: dict[str, Any] = {"reward_mean": reward}
        steps.note(number, metrics if score is None else metrics | {"eval_score/judge": score})
        alarms = steps.alarms(number, alarms)
        found.append(list(alarms))
    return found


@pytest.mark.parametrize(
    ("rewards", "scores", "is_on"),
    [
        (UP, DOWN, True),
        (UP, (1e15, 9e14, 1e14, 0.0), True),
        ((0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0), True),
        (UP, UP, False),
        (UP, FLAT, False),
        (FLAT, DOWN, False),
        (DOWN, DOWN, False),
        (DOWN, UP, False),
        (UP, (0.6, 0.0, 0.1, 0.0), False),  # lower, but within three standard errors
        ((0.0, 0.6, 0.5, 0.6), DOWN, False),
    ],
)
def test_alarm_needs_rising_rewards_and_falling_scores(
    rewards: Sequence[float], scores: Sequence[float], is_on: bool
) -> None:
    assert alarms_of(rewards, scores)[-1] == ([f"{PREFIX}judge"] if is_on else [])


def test_alarm_needs_all_its_steps_and_does_not_count_those_without_a_score() -> None:
    rewards = (0.0, 9.0, 0.1, 9.0, 0.5, 0.6)
    assert alarms_of(rewards, (0.6, None, 0.5, None, 0.1, 0.0)) == [[]] * 5 + [[f"{PREFIX}judge"]]
    assert alarms_of(UP, DOWN, num_steps=6) == [[]] * 4


def test_alarm_that_is_on_stays_until_the_change_is_less_than_half() -> None:
    before = {f"{PREFIX}judge": Alarm(name=f"{PREFIX}judge", value=-1.0, bound=-1.0, text="", since=3)}
    # The standard error of each difference is 0.1 x sqrt(2) / sqrt(2) = 0.1.
    for difference, is_raised, is_kept in ((0.31, True, True), (0.29, False, True), (0.14, False, False)):
        steps = EvaluatedSteps(("judge",), 4)
        for number, noise in enumerate((-0.05, 0.05, -0.05, 0.05), start=1):
            change = difference * 2**-0.5 if number > 2 else 0.0
            steps.note(number, {"reward_mean": change + noise, "eval_score/judge": -change + noise})
        assert bool(steps.alarms(4, {})) is is_raised
        assert bool(steps.alarms(4, before)) is is_kept
        assert all(alarm.since == 3 for alarm in steps.alarms(4, before).values())


def test_reward_of_all_groups_counts_where_some_are_filtered_out() -> None:
    """The reward of those that dynamic sampling keeps hardly changes."""
    steps = EvaluatedSteps(("judge",), 4)
    for number, (reward, score) in enumerate(zip(UP, DOWN, strict=True), start=1):
        steps.note(number, {"reward_mean": 0.5, "sampled_reward_mean": reward, "eval_score/judge": score})
    assert steps.alarms(4, {})


def test_scorers_are_judged_by_themselves_and_their_single_keys_are_not() -> None:
    steps = EvaluatedSteps(("a", "b"), 4)
    for number, (up, down) in enumerate(zip(UP, DOWN, strict=True), start=1):
        steps.note(number, {"reward_mean": up, "eval_score/a": up, "eval_score/b": down, "eval_score/a/size": down})
    assert list(steps.alarms(4, {})) == [f"{PREFIX}b"]


numbers = st.lists(st.floats(-1e15, 1e15), min_size=4, max_size=12)


@given(numbers, st.floats(-1e15, 1e15))
def test_constant_score_raises_no_alarm(rewards: list[float], score: float) -> None:
    assert not any(alarms_of(rewards, [score] * len(rewards)))


@given(numbers)
def test_score_that_is_the_reward_raises_no_alarm(rewards: list[float]) -> None:
    assert not any(alarms_of(rewards, rewards))


@given(numbers, st.integers(1, 11))
def test_restored_steps_raise_the_same_alarms(values: list[float], at: int) -> None:
    whole, begun = EvaluatedSteps(("judge",), 4), EvaluatedSteps(("judge",), 4)
    for number, value in enumerate(values):
        metrics = {"reward_mean": value, "eval_score/judge": -value}
        whole.note(number, metrics)
        begun.note(number, metrics)
        if number == at:
            again = EvaluatedSteps(("judge",), 4)
            again.restore(begun.summary())
            begun = again
        assert begun.alarms(number, {}) == whole.alarms(number, {})
