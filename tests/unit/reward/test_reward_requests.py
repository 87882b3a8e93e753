"""State machine of HTTP requests: every sample gets its own outcome, every request one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.groups import CancelTask, SubmitTask
from starling.reward.core.requests import Answer, Command, RequestResult, RewardRequest, RewardRequests
from starling.reward.core.rewards import NO_BOUNDS, RewardBounds, WeightedScorer
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask

SCORERS = (WeightedScorer("right", 1.0), WeightedScorer("sums", 0.5, tasks=("sums",)), WeightedScorer("seen", 0.0))


def machine(bounds: RewardBounds = NO_BOUNDS, timeout_s: float = 10.0) -> RewardRequests:
    return RewardRequests(SCORERS, bounds, timeout_s)


def request(id: str, *tasks: str | None, prompts: int | None = None) -> RewardRequest:
    """Return a request with one sample for each task; `prompts` limits how many prompts they have."""
    texts: list[PromptText] = []
    samples = []
    for index, task in enumerate(tasks):
        metadata: dict[str, Any] = {} if task is None else {"task": task}
        if prompts is None or len(texts) < prompts:
            texts.append(PromptText(f"p{index}", "r", metadata))
        completion = CompletionText(text=f"c{index}", status=Status.OK, num_tokens=1)
        samples.append(Sample(index, len(texts) - 1, completion))
    return RewardRequest(id, tuple(texts), tuple(samples))


def tasks_of(commands: list[Command]) -> list[ScoreTask]:
    assert all(isinstance(command, SubmitTask) for command in commands), commands
    return [command.task for command in commands if isinstance(command, SubmitTask)]


def result_of(commands: list[Command]) -> RequestResult:
    (answer,) = (command for command in commands if isinstance(command, Answer))
    return answer.result


def test_request_from_arrival_to_answer() -> None:
    requests = machine()
    plain, sums = tasks_of(requests.add(request("a", None, "sums", "other"), now=0.0))
    assert (plain.scorers, [sample.index for sample in plain.samples]) == ((0, 2), [0, 2])
    assert (sums.scorers, [sample.index for sample in sums.samples]) == ((0, 1, 2), [1])
    for task, index, scorer, value in (
        (sums, 1, 0, 1.0),
        (plain, 2, 0, 3.0),
        (plain, 0, 2, 7.0),
        (sums, 1, 1, 4.0),
        (plain, 0, 0, 2.0),
        (sums, 1, 2, 8.0),
    ):
        assert requests.record(Score(task.id, index, scorer, value)) == []
    result = result_of(requests.record(Score(plain.id, 2, 2, 9.0)))
    assert (result.id, result.rewards, result.statuses) == ("a", (2.0, 3.0, 3.0), (Status.OK,) * 3)
    assert result.problems == ((), (), ())
    assert result.scores == {"right": (2.0, 1.0, 3.0), "sums": (None, 4.0, None), "seen": (7.0, 8.0, 9.0)}
    assert (len(requests), requests.next_deadline()) == (0, None)
    assert not requests.has_task(plain.id)


def test_failure_of_one_sample_leaves_the_others_their_rewards() -> None:
    requests = machine()
    (task,) = tasks_of(requests.add(request("a", None, None), now=0.0))
    requests.record(Score(task.id, 0, 0, None, Status.REWARD_TIMEOUT, "it hung."))
    requests.record(Score(task.id, 0, 2, None, Status.REWARD_ERROR, "it fell."))
    requests.record(Score(task.id, 1, 0, 1.0))
    result = result_of(requests.record(Score(task.id, 1, 2, None, Status.REWARD_ERROR, "it fell.")))
    assert (result.rewards, result.statuses) == ((None, 1.0), (Status.REWARD_TIMEOUT, Status.OK))
    assert result.problems == (("it hung.", "it fell."), ("it fell.",))


def test_samples_that_are_late_time_out_and_the_others_are_answered() -> None:
    requests = machine(timeout_s=10.0)
    (first,) = tasks_of(requests.add(request("a", None, None), now=0.0))
    tasks_of(requests.add(request("b", None), now=4.0))
    requests.record(Score(first.id, 1, 0, 1.0))
    requests.record(Score(first.id, 1, 2, 1.0))
    assert requests.next_deadline() == 10.0
    assert requests.expire(9.9) == []
    cancelled, answer = requests.expire(10.0)
    assert cancelled == CancelTask(first.id)
    result = result_of([answer])
    assert (result.rewards, result.statuses) == ((None, 1.0), (Status.REWARD_TIMEOUT, Status.OK))
    assert result.problems == (("2 scores did not come within 10 s.",), ())
    assert requests.next_deadline() == 14.0
    assert requests.record(Score(first.id, 0, 0, 1.0)) == [], "it is late"


def test_sample_that_no_scorer_scores_is_answered_with_the_reason() -> None:
    requests = RewardRequests(SCORERS[1:2], NO_BOUNDS, 10.0)
    result = result_of(requests.add(request("a", None), now=0.0))
    assert (result.rewards, result.statuses) == ((None,), (Status.REWARD_ERROR,))
    assert result.problems == (("no scorer is for the task of this prompt; add it to the `tasks` of one.",),)
    (task,) = tasks_of(requests.add(request("b", None, "sums"), now=0.0))
    result = result_of(requests.record(Score(task.id, 1, 0, 2.0)))
    assert (result.rewards, result.statuses) == ((None, 1.0), (Status.REWARD_ERROR, Status.OK))


def test_observed_score_that_is_late_costs_no_reward() -> None:
    requests = machine()
    (task,) = tasks_of(requests.add(request("a", None), now=0.0))
    requests.record(Score(task.id, 0, 0, 1.0))
    result = result_of(requests.expire(10.0))
    assert (result.rewards, result.statuses) == ((1.0,), (Status.OK,))
    assert result.problems == (("1 score did not come within 10 s.",),)


def test_cancelled_request_is_forgotten_without_an_answer() -> None:
    requests = machine()
    first, second = tasks_of(requests.add(request("a", None, "sums"), now=0.0))
    assert requests.cancel("a") == [CancelTask(first.id), CancelTask(second.id)]
    assert requests.cancel("a") == requests.cancel("b") == []
    assert requests.record(Score(first.id, 0, 0, 1.0)) == []
    assert (len(requests), requests.expire(1e9)) == (0, [])


def test_scores_of_groups_and_repeated_ones_change_nothing() -> None:
    requests = machine()
    (task,) = tasks_of(requests.add(request("a", None), now=0.0))
    assert requests.record(Score("score:1:0", 0, 0, 1.0)) == []
    assert requests.record(Score(task.id, 0, 0, 1.0)) == []
    assert requests.record(Score(task.id, 0, 0, 5.0)) == []
    assert result_of(requests.record(Score(task.id, 0, 2, 1.0))).rewards == (1.0,)


def test_sum_has_the_bounds_of_the_service() -> None:
    requests = machine(RewardBounds(clip_max=1.5, scale=2.0))
    (task,) = tasks_of(requests.add(request("a", None), now=0.0))
    requests.record(Score(task.id, 0, 0, 7.0))
    assert result_of(requests.record(Score(task.id, 0, 2, 0.0))).rewards == (3.0,)


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from([None, "sums"]), min_size=1, max_size=4)),
        st.tuples(st.just("record"), st.integers(0, 1 << 16)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("expire"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(events)
def test_every_request_has_one_answer_or_was_cancelled(steps: list[tuple[str, Any]]) -> None:
    """Whatever the order: no answer comes twice, none is missing, and nothing is left of what has ended."""
    requests, now, added = machine(timeout_s=3.0), 0.0, list[str]()
    outstanding = list[tuple[str, int, int]]()
    answers, cancelled = list[str](), set[str]()
    for step, detail in steps:
        commands: list[Command] = []
        match step:
            case "add":
                added.append(f"r{len(added)}")
                commands = requests.add(request(added[-1], *detail), now)
            case "record" if outstanding:
                task, index, scorer = outstanding.pop(detail % len(outstanding))
                commands = requests.record(Score(task, index, scorer, 1.0))
            case "cancel" if added:
                id = added[detail % len(added)]
                if id not in answers:
                    cancelled.add(id)
                commands = requests.cancel(id)
            case "expire":
                now += detail
                commands = requests.expire(now)
        for command in commands:
            match command:
                case SubmitTask(task=task_):
                    outstanding += [(task_.id, sample.index, k) for sample in task_.samples for k in task_.scorers]
                case Answer(result=result):
                    answers.append(result.id)
    answers += [one.result.id for one in requests.expire(now + 3.0) if isinstance(one, Answer)]
    assert sorted(answers) == sorted(set(added) - cancelled)
    assert len(requests) == 0
    assert not any(requests.has_task(task) for task, _, _ in outstanding)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_prompts_of_a_task_are_those_of_the_request(num_prompts: int) -> None:
    """So that a groupwise scorer finds the samples of each prompt."""
    one = request("a", None, None, None, prompts=num_prompts)
    (task,) = tasks_of(machine().add(one, now=0.0))
    assert task.prompts == one.prompts
    assert [sample.prompt for sample in task.samples] == [min(index, num_prompts - 1) for index in range(3)]


def test_request_is_scored_by_the_scorers_that_it_names_with_the_reasons_of_each() -> None:
    requests = machine()
    asked = replace(request("a", "sums", None, "sums"), only=(1, 2))
    (task,) = tasks_of(requests.add(asked, now=0.0))
    assert (task.scorers, len(task.samples)) == ((1, 2), 3), "a named scorer is asked whatever its tasks"
    requests.record(Score(task.id, 0, 1, 1.0))
    requests.record(Score(task.id, 1, 1, 2.0))
    requests.record(Score(task.id, 2, 1, None, Status.REWARD_ERROR, "scorer 'sums' fell."))
    for index in (0, 1):
        requests.record(Score(task.id, index, 2, 0.5))
    result = result_of([one for one in requests.expire(10.0) if isinstance(one, Answer)])
    assert result.scores == {"right": (None,) * 3, "sums": (1.0, 2.0, None), "seen": (0.5, 0.5, None)}
    assert result.failures == {
        "sums": ("", "", "scorer 'sums' fell."),
        "seen": ("", "", "scorer 'seen' gave no score within 10 s."),
    }


def test_request_that_names_no_scorer_is_answered_at_once() -> None:
    result = result_of(machine().add(replace(request("a", None), only=()), now=0.0))
    assert (result.rewards, result.statuses, result.failures) == ((None,), (Status.REWARD_ERROR,), {})
