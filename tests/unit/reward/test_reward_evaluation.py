"""Evaluation scorers: their scores come with the rewards and are no part of them, whatever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.ranges import MAX_REWARD, MAX_SCORE_CHARACTERS, MAX_SCORES
from starling.common.wire.messages import CompletionText, GroupScored, Prompt, ScoreGroup, Status
from starling.controller.core.groups.validation.validation import UnusableResultError, check_rewards
from starling.reward.core.groups import CancelTask, GroupScores, SendScores, SubmitTask
from starling.reward.core.requests import Answer, Command, RequestResult, RewardRequest, RewardRequests
from starling.reward.core.rewards import NO_BOUNDS, WeightedScorer
from starling.reward.core.samples import PromptText, Sample, Score

RIGHT, SEEN = WeightedScorer("right", 2.0), WeightedScorer("seen", 0.0)
JUDGE = WeightedScorer("judge", 0.0, evaluates=True)
SCORERS = (JUDGE, RIGHT, SEEN)
LEASE = "score:1:0"


def group(*statuses: Status, evaluate: bool = True, task: str = "") -> ScoreGroup:
    prompt = Prompt(id="train/0/0", text="p", metadata={"task": task} if task else {})
    completions = tuple(CompletionText(text="c", status=status, num_tokens=1) for status in statuses)
    return ScoreGroup(lease=LEASE, prompt=prompt, completions=completions, evaluate=evaluate)


def answer_of(commands: list[object]) -> GroupScored:
    (answer,) = (command for command in commands if isinstance(command, SendScores))
    return answer.message


def score_all(scorers: tuple[WeightedScorer, ...], values: list[list[float | None]]) -> GroupScored:
    """Return the answer of a group, given the scores of each scorer; None fails."""
    machine = GroupScores(scorers, 1)
    (submit,) = machine.add(group(*[Status.OK] * len(values[0])))
    assert isinstance(submit, SubmitTask)
    found: list[object] = []
    for scorer in submit.task.scorers:
        for index, value in enumerate(values[scorer]):
            status = Status.OK if value is not None else Status.REWARD_ERROR
            found += machine.record(Score(LEASE, index, scorer, value, status, "" if value is not None else "it fell."))
    return answer_of(found)


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_rewards_are_those_without_the_evaluation_scorer(judged: list[float | None]) -> None:
    """Also if its score is huge, or has failed."""
    found = score_all(SCORERS, [judged, [1.0, 0.25], [5.0, 6.0]])
    plain = score_all(SCORERS[1:], [[1.0, 0.25], [5.0, 6.0]])
    usable = tuple(None if value is None or abs(value) > MAX_REWARD else value for value in judged)
    assert found.evaluation_scores == {"judge": usable}
    assert (found.rewards, found.statuses, found.components) == (plain.rewards, plain.statuses, plain.components)
    assert found.rewards == (2.0, 0.5)
    assert bool(found.problems) == (None in judged)


def test_failed_evaluation_score_does_not_name_the_failure_of_a_needed_one() -> None:
    """A controller counts timeouts and errors apart."""
    machine = GroupScores(SCORERS, 1)
    machine.add(group(Status.OK))
    assert machine.record(Score(LEASE, 0, 0, None, Status.REWARD_ERROR)) == []
    found = answer_of(list(machine.record(Score(LEASE, 0, 1, None, Status.REWARD_TIMEOUT))))
    assert found.statuses == (Status.REWARD_TIMEOUT,)


@pytest.mark.parametrize("scorer", [0, 1], ids=["evaluation", "training"])
def test_group_has_no_more_scores_than_the_controller_takes(scorer: int) -> None:
    """A class may have so many keys, of any length, that the group would be refused; HTTP clients get all of them."""
    parts = tuple((f"{number:0100}", 1.0) for number in range(MAX_SCORES))
    scorers = (replace(JUDGE, label="j" * 150), replace(RIGHT, label="r"))
    machine = GroupScores(scorers, 1)
    machine.add(group(Status.OK))
    machine.record(Score(LEASE, 0, 1 - scorer, 1.0))
    found = answer_of(list(machine.record(Score(LEASE, 0, scorer, 1.0, parts=parts))))
    assert found.rewards == (2.0,)
    assert found.components["r"] == found.evaluation_scores["j" * 150] == (1.0,)
    assert len(found.components) == (MAX_SCORES if scorer else 1)
    for names in (found.components, found.evaluation_scores):
        assert len(names) <= MAX_SCORES
        assert all(len(name) <= MAX_SCORE_CHARACTERS for name in names)


@pytest.mark.parametrize("value", [1e300, -2e15])
def test_huge_score_that_does_not_count_has_failed_and_costs_no_group(value: float) -> None:
    """A controller refuses a group with one."""
    machine = GroupScores(SCORERS, 1)
    machine.add(group(Status.OK))
    machine.record(Score(LEASE, 0, 0, value))
    machine.record(Score(LEASE, 0, 2, value))
    parts = (("counts", 1.0), ("other", value))
    found = answer_of(list(machine.record(Score(LEASE, 0, 1, 1.0, parts=parts))))
    assert found.rewards == (2.0,)
    assert found.components == {"right": (1.0,), "right/counts": (1.0,), "right/other": (None,), "seen": (None,)}
    check_rewards(found, 1, len(SCORERS))


def test_huge_score_that_counts_costs_its_group() -> None:
    machine = GroupScores((RIGHT, WeightedScorer("left", -2.0)), 1)
    machine.add(group(Status.OK))
    machine.record(Score(LEASE, 0, 0, 1e300))
    found = answer_of(list(machine.record(Score(LEASE, 0, 1, 1e300))))
    assert found.rewards == (0.0,)
    with pytest.raises(UnusableResultError, match="a score of right is 1e\\+300"):
        check_rewards(found, 1, 2)


def test_group_that_is_not_to_be_evaluated_has_no_evaluation_scores() -> None:
    machine = GroupScores(SCORERS, 1)
    (submit,) = machine.add(group(Status.OK, evaluate=False))
    assert isinstance(submit, SubmitTask)
    assert submit.task.scorers == (1, 2)
    machine.record(Score(LEASE, 0, 1, 1.0))
    message = answer_of([*machine.record(Score(LEASE, 0, 2, 1.0))])
    assert (message.rewards, message.evaluation_scores) == ((2.0,), {})


def test_prompt_that_only_an_evaluation_scorer_scores_has_no_reward() -> None:
    machine = GroupScores((JUDGE, replace(RIGHT, tasks=("sums",))), 1)
    machine.add(group(Status.OK, task="code"))
    message = answer_of([*machine.record(Score(LEASE, 0, 0, 1.0))])
    assert (message.rewards, message.statuses) == ((None,), (Status.REWARD_ERROR,))
    assert message.evaluation_scores == {"judge": (1.0,)}
    assert message.problems == (
        "Completion 0: no scorer is for the task of this prompt; add it to the `tasks` of one.",
    )


def test_group_waits_no_more_for_evaluation_scores_after_one_has_timed_out() -> None:
    """Else each of its completions would take the time limit, and the deadline of the group would pass."""
    machine = GroupScores(SCORERS[:2], 1)
    machine.add(group(Status.OK, Status.OK, Status.OK))
    assert machine.record(Score(LEASE, 0, 1, 1.0)) == []
    assert machine.record(Score(LEASE, 1, 0, 9.0)) == []
    assert machine.record(Score(LEASE, 0, 0, None, Status.REWARD_TIMEOUT, "it hung.")) == [], "rewards are needed"
    assert machine.record(Score(LEASE, 1, 1, 1.0)) == []
    commands = machine.record(Score(LEASE, 2, 1, 0.5))
    assert commands[0] == CancelTask(LEASE)
    message = answer_of([*commands])
    assert (message.rewards, message.statuses) == ((2.0, 2.0, 1.0), (Status.OK,) * 3)
    assert message.evaluation_scores == {"judge": (None, 9.0, None)}
    assert machine.record(Score(LEASE, 2, 0, 1.0)) == []


def test_group_with_all_rewards_ends_with_the_evaluation_score_that_times_out() -> None:
    machine = GroupScores(SCORERS[:2], 1)
    machine.add(group(Status.OK, Status.OK))
    for index in range(2):
        assert machine.record(Score(LEASE, index, 1, 1.0)) == []
    message = answer_of([*machine.record(Score(LEASE, 1, 0, None, Status.REWARD_TIMEOUT, "it hung."))])
    assert (message.rewards, message.evaluation_scores) == ((2.0, 2.0), {"judge": (None, None)})
    assert message.problems == ("Completion 1: it hung.",)


def test_needed_score_that_times_out_ends_a_group_whose_evaluation_is_late() -> None:
    machine = GroupScores(SCORERS[:2], 1)
    machine.add(group(Status.OK, Status.OK))
    machine.record(Score(LEASE, 0, 0, None, Status.REWARD_TIMEOUT, "it hung."))
    message = answer_of([*machine.record(Score(LEASE, 0, 1, None, Status.REWARD_TIMEOUT, "it hung."))])
    assert message.statuses == (Status.REWARD_TIMEOUT,) * 2


# --- requests of clients ----------------------------------------------------------------------------------------------


def request(num: int, *, evaluate: bool = True, only: tuple[int, ...] | None = None) -> RewardRequest:
    samples = tuple(Sample(i, 0, CompletionText(text="c", status=Status.OK, num_tokens=1)) for i in range(num))
    return RewardRequest("a", (PromptText("p", "", {}),), samples, only=only, evaluate=evaluate)


def result_of(commands: list[Command]) -> RequestResult:
    (answer,) = (command for command in commands if isinstance(command, Answer))
    return answer.result


def begin(asked: RewardRequest) -> tuple[RewardRequests, str, tuple[int, ...]]:
    machine = RewardRequests(SCORERS, NO_BOUNDS, 10.0)
    (submit,) = machine.add(asked, now=0.0)
    assert isinstance(submit, SubmitTask)
    return machine, submit.task.id, submit.task.scorers


def test_result_of_a_request_has_evaluation_scores_apart() -> None:
    machine, task, scorers = begin(request(1))
    assert scorers == (0, 1, 2)
    machine.record(Score(task, 0, 0, 1e300))
    machine.record(Score(task, 0, 1, 1.0))
    result = result_of(machine.record(Score(task, 0, 2, 7.0)))
    assert (result.rewards, result.scores) == ((2.0,), {"right": (1.0,), "seen": (7.0,)})
    assert result.evaluation_scores == {"judge": (1e300,)}


def test_late_evaluation_score_costs_a_sample_nothing() -> None:
    machine, task, _ = begin(request(1))
    machine.record(Score(task, 0, 1, 1.0))
    machine.record(Score(task, 0, 2, 7.0))
    result = result_of(machine.expire(10.0))
    assert (result.rewards, result.statuses) == ((2.0,), (Status.OK,))
    assert result.evaluation_scores == {"judge": (None,)}
    assert result.problems == (("1 score did not come within 10 s.",),)


def test_request_without_evaluation_has_no_such_scores() -> None:
    machine, task, scorers = begin(request(1, evaluate=False))
    assert scorers == (1, 2)
    machine.record(Score(task, 0, 1, 1.0))
    assert result_of(machine.record(Score(task, 0, 2, 7.0))).evaluation_scores == {}


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluation_scorer_that_a_request_names_is_one_of_its_scorers(evaluate: bool) -> None:
    machine, task, scorers = begin(request(1, only=(0,), evaluate=evaluate))
    assert scorers == (0,)
    result = result_of(machine.record(Score(task, 0, 0, 3.0)))
    assert (result.statuses, result.problems) == ((Status.OK,), ((),))
    assert (result.scores["judge"], result.evaluation_scores) == ((3.0,), {})
