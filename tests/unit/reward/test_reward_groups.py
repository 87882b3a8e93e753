"""State machine of the reward service: scores in any order become the rewards of a group once."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import (
    TRAINABLE_STATUSES,
    ChatMessage,
    CompletionText,
    GroupScored,
    Prompt,
    ScoreGroup,
    Status,
)
from starling.reward.core.groups import (
    CancelTask,
    GroupScores,
    SendScores,
    SubmitTask,
    prompt_text,
)
from starling.reward.core.rewards import RewardBounds, WeightedScorer
from starling.reward.core.samples import Score

TWO = (WeightedScorer("right", 1.0), WeightedScorer("form", 0.5))


def machine(scorers: tuple[WeightedScorer, ...] = TWO, num_slots: int = 2) -> GroupScores:
    return GroupScores(scorers, num_slots)


def group(lease: str, *statuses: Status) -> ScoreGroup:
    completions = tuple(CompletionText(text=f"c{i}", status=s, num_tokens=1) for i, s in enumerate(statuses))
    prompt = Prompt(id="train/0/0", text="p", reference="r", metadata={"k": 1})
    return ScoreGroup(lease=lease, prompt=prompt, completions=completions)


def phases(scores: GroupScores) -> dict[str, str]:
    return dict.fromkeys(scores.working, "working") | dict.fromkeys(scores.queued, "queued")


def test_group_from_arrival_to_answer() -> None:
    scores = machine()
    (submit,) = scores.add(group("score:1:0", Status.OK, Status.TRUNCATED, Status.ENV_ERROR))
    assert isinstance(submit, SubmitTask)
    assert [(one.index, one.completion.text, one.completion.status) for one in submit.task.samples] == [
        (0, "c0", Status.OK),
        (1, "c1", Status.TRUNCATED),
    ]
    (prompt,) = submit.task.prompts
    assert (prompt.reference, prompt.text, prompt.metadata) == ("r", "p", {"k": 1})
    assert phases(scores) == {"score:1:0": "working"}

    assert scores.record(Score("score:1:0", 1, 1, 1.0)) == []
    assert scores.record(Score("score:1:0", 0, 0, 1.0)) == []
    assert scores.record(Score("score:1:0", 0, 1, 0.0)) == []
    (answer,) = scores.record(Score("score:1:0", 1, 0, 0.25))
    expected = GroupScored(
        lease="score:1:0",
        rewards=(1.0, 0.75, None),
        statuses=(Status.OK, Status.TRUNCATED, Status.ENV_ERROR),
        components={"right": (1.0, 0.25, None), "form": (0.0, 1.0, None)},
    )
    assert answer == SendScores(expected)
    assert scores.cancel(("score:1:0", "score:9:9")) == []
    assert phases(scores) == {}


def test_failed_scorer_gives_a_reason_instead_of_a_reward() -> None:
    scores = machine()
    scores.add(group("score:1:0", Status.OK, Status.OK))
    scores.record(Score("score:1:0", 0, 1, None, Status.REWARD_ERROR, "it raised."))
    scores.record(Score("score:1:0", 1, 0, 2.0))
    scores.record(Score("score:1:0", 1, 1, -1.0))
    (answer,) = scores.record(Score("score:1:0", 0, 0, None, Status.REWARD_TIMEOUT, "it hung."))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (None, 1.5)
    assert answer.message.statuses == (Status.REWARD_TIMEOUT, Status.OK)
    assert answer.message.problems == ("Completion 0: it hung.", "Completion 0: it raised.")
    assert answer.message.components == {"right": (None, 2.0), "form": (None, -1.0)}


def test_group_is_answered_when_a_needed_score_has_timed_out() -> None:
    """Texts that hang a scorer would take its time limit for each completion, beyond the deadline of the group."""
    scores = machine(num_slots=1)
    scores.add(group("score:1:0", *[Status.OK] * 63, Status.ENV_ERROR))
    scores.add(group("score:2:0", Status.OK))
    scores.record(Score("score:1:0", 0, 0, 1.0))
    scores.record(Score("score:1:0", 0, 1, 1.0))
    scores.record(Score("score:1:0", 1, 0, 1.0))
    cancel, answer, submit = scores.record(Score("score:1:0", 2, 0, None, Status.REWARD_TIMEOUT, "it hung."))
    assert cancel == CancelTask("score:1:0")
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (1.5, *[None] * 63)
    assert answer.message.statuses == (Status.OK, *[Status.REWARD_TIMEOUT] * 62, Status.ENV_ERROR)
    assert answer.message.problems == ("Completion 2: it hung.",)
    assert isinstance(submit, SubmitTask)
    assert phases(scores) == {"score:2:0": "working"}
    assert scores.record(Score("score:1:0", 3, 0, 1.0)) == []


def test_time_limit_of_an_observed_score_does_not_answer_the_group() -> None:
    scores = machine((WeightedScorer("right", 2.0), WeightedScorer("seen", 0.0)))
    scores.add(group("score:1:0", Status.OK))
    assert scores.record(Score("score:1:0", 0, 1, None, Status.REWARD_TIMEOUT, "it hung.")) == []
    (answer,) = scores.record(Score("score:1:0", 0, 0, 1.0))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (2.0,)


def test_problem_of_several_completions_is_reported_once_with_their_number() -> None:
    scores = machine()
    scores.add(group("score:1:0", Status.OK, Status.OK, Status.OK, Status.OK))
    for index in range(4):
        scores.record(Score("score:1:0", index, 0, None, Status.REWARD_ERROR, "it raised."))
    for index, problem in enumerate(("it hung.", "it hung.", "it raised.", "no number.")):
        command = scores.record(Score("score:1:0", index, 1, None, Status.REWARD_ERROR, problem))
    (answer,) = command
    assert isinstance(answer, SendScores)
    assert answer.message.problems == (
        "All 4 completions: it raised.",
        "2 of 4 completions: it hung.",
        "Completion 3: no number.",
    )


def test_scorer_of_weight_0_is_only_observed() -> None:
    scores = machine((WeightedScorer("right", 2.0), WeightedScorer("seen", 0.0)))
    scores.add(group("score:1:0", Status.OK))
    scores.record(Score("score:1:0", 0, 1, None, Status.REWARD_ERROR, "it raised."))
    (answer,) = scores.record(Score("score:1:0", 0, 0, 1.0))
    assert isinstance(answer, SendScores)
    assert (answer.message.rewards, answer.message.statuses) == ((2.0,), (Status.OK,))
    assert answer.message.problems == ("Completion 0: it raised.",)


def test_negative_scores_and_weights() -> None:
    for weight, reward in ((0.5, 0.75), (-0.5, 1.25)):
        scores = machine((WeightedScorer("right", 1.0), WeightedScorer("overlong", weight)))
        scores.add(group("score:1:0", Status.OK))
        scores.record(Score("score:1:0", 0, 0, 1.0))
        (answer,) = scores.record(Score("score:1:0", 0, 1, -0.5))
        assert isinstance(answer, SendScores)
        assert answer.message.rewards == (reward,)
        assert answer.message.components == {"right": (1.0,), "overlong": (-0.5,)}


@pytest.mark.parametrize(
    ("values", "reward"),
    [
        ((0.5, 1.0), 2.0 * (0.5 + 3.0)),
        ((5.0, 1.0), 2.0 * (1.0 + 3.0)),
        ((-5.0, 0.0), 2.0 * -1.0),
        ((1.0, 9.0), 2.0 * 4.5),
        ((-1.0, -9.0), 2.0 * -3.0),
        ((-1.0, -1.7e308), 2.0 * -3.0),
    ],
)
def test_scores_and_their_sum_have_bounds_and_the_sum_a_factor(values: tuple[float, float], reward: float) -> None:
    scorers = (WeightedScorer("a", 1.0, clip_min=-1.0, clip_max=1.0), WeightedScorer("b", 3.0))
    scores = GroupScores(scorers, 2, RewardBounds(clip_min=-3.0, clip_max=4.5, scale=2.0))
    scores.add(group("score:1:0", Status.OK))
    scores.record(Score("score:1:0", 0, 0, values[0]))
    (answer,) = scores.record(Score("score:1:0", 0, 1, values[1]))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (reward,)
    assert answer.message.components == {"a": values[:1], "b": values[1:]}, "metrics have the scores themselves"


def test_components_have_all_scores_of_a_scorer_with_several() -> None:
    scores = machine((WeightedScorer("judge", 1.0), WeightedScorer("form", 0.5)))
    scores.add(group("score:1:0", Status.OK, Status.TRUNCATED, Status.ENV_ERROR))
    scores.record(Score("score:1:0", 0, 0, 3.0, parts=(("quality", 1.0), ("motion", 2.0))))
    failed = Score("score:1:0", 1, 0, None, Status.REWARD_ERROR, "it fell.", (("quality", 5.0), ("motion", None)))
    scores.record(failed)
    scores.record(Score("score:1:0", 0, 1, 1.0))
    (answer,) = scores.record(Score("score:1:0", 1, 1, 0.0))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (3.5, None, None)
    assert answer.message.components == {
        "judge": (3.0, None, None),
        "judge/quality": (1.0, 5.0, None),
        "judge/motion": (2.0, None, None),
        "form": (1.0, 0.0, None),
    }


@pytest.mark.parametrize("values", [(1e308, 1e308), (1.7e308, -1.7e308), (1.7e308, 1.7e308)])
def test_sum_beyond_floats_is_a_failure(values: tuple[float, float]) -> None:
    scores = machine((WeightedScorer("a", 10.0), WeightedScorer("b", 10.0)))
    scores.add(group("score:1:0", Status.OK))
    scores.record(Score("score:1:0", 0, 0, values[0]))
    (answer,) = scores.record(Score("score:1:0", 0, 1, values[1]))
    assert isinstance(answer, SendScores)
    assert (answer.message.rewards, answer.message.statuses) == ((None,), (Status.REWARD_ERROR,))
    assert "too large" in answer.message.problems[0]


@pytest.mark.parametrize("statuses", [(), (Status.INFRA_LOST, Status.CANCELLED_STALE)])
def test_group_without_scorable_completion_is_answered_at_once(statuses: tuple[Status, ...]) -> None:
    scores = machine()
    (answer,) = scores.add(group("score:1:0", *statuses))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (None,) * len(statuses)
    assert answer.message.statuses == statuses


def test_groups_beyond_the_slots_queue_and_follow_in_order() -> None:
    scores = machine((WeightedScorer("right", 1.0),), num_slots=1)
    leases = ["score:1:0", "score:2:0", "score:3:0"]
    commands = [command for lease in leases for command in scores.add(group(lease, Status.OK))]
    assert [command.task.id for command in commands if isinstance(command, SubmitTask)] == leases[:1]
    assert list(phases(scores).values()) == ["working", "queued", "queued"]
    assert scores.cancel(("score:2:0",)) == []
    answer, submit = scores.record(Score("score:1:0", 0, 0, 1.0))
    assert isinstance(answer, SendScores)
    assert isinstance(submit, SubmitTask)
    assert submit.task.id == "score:3:0"
    assert scores.cancel(("score:3:0",)) == [CancelTask("score:3:0")]


def test_repeated_and_late_messages_change_nothing() -> None:
    scores = machine((WeightedScorer("right", 1.0),))
    message = group("score:1:0", Status.OK, Status.OK)
    scores.add(message)
    assert scores.record(Score("score:1:0", 0, 0, 1.0)) == []
    assert scores.record(Score("score:1:0", 0, 0, 9.0)) == []
    (answer,) = scores.record(Score("score:1:0", 1, 0, 1.0))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (1.0, 1.0)
    scores.cancel(("score:1:0",))
    assert scores.record(Score("score:1:0", 1, 0, 1.0)) == []


def test_prompt_text_joins_message_contents() -> None:
    messages = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="2+2?"))
    assert prompt_text(Prompt(id="x", messages=messages, text="unused")) == "Be brief.\n\n2+2?"
    assert prompt_text(Prompt(id="x", text="2+2?")) == "2+2?"


values = st.one_of(st.none(), st.floats(-1e6, 1e6))
weights = st.floats(-10, 10).filter(lambda weight: weight != 0)


@given(st.data(), st.lists(st.sampled_from(Status), max_size=5), st.lists(weights, min_size=1, max_size=3))
def test_rewards_do_not_depend_on_the_order_of_the_scores(
    data: st.DataObject, statuses: list[Status], scorer_weights: list[float]
) -> None:
    scorers = tuple(WeightedScorer(str(i), weight) for i, weight in enumerate(scorer_weights))
    scores = machine(scorers)
    commands = scores.add(group("score:1:0", *statuses))
    expected = [
        (c, s) for c, status in enumerate(statuses) if status in TRAINABLE_STATUSES for s in range(len(scorers))
    ]
    given_values = {place: data.draw(values) for place in expected}
    for completion, scorer in data.draw(st.permutations(expected)):
        value = given_values[completion, scorer]
        status = Status.OK if value is not None else Status.REWARD_ERROR
        problem = "" if value is not None else f"scorer {scorer} failed."
        commands += scores.record(Score("score:1:0", completion, scorer, value, status, problem))
    (message,) = [command.message for command in commands if isinstance(command, SendScores)]
    for index, status in enumerate(statuses):
        row = [given_values.get((index, s)) for s in range(len(scorers))]
        if status not in TRAINABLE_STATUSES:
            assert (message.rewards[index], message.statuses[index]) == (None, status)
        elif None in row:
            assert (message.rewards[index], message.statuses[index]) == (None, Status.REWARD_ERROR)
        else:
            exact = math.fsum(w * v for w, v in zip(scorer_weights, row, strict=True) if v is not None)
            assert (message.rewards[index], message.statuses[index]) == (exact, status)
    failed = {scorer for (_, scorer), value in given_values.items() if value is None}
    assert sorted(problem.partition(": ")[2] for problem in message.problems) == [
        f"scorer {scorer} failed." for scorer in sorted(failed)
    ]


actions = st.lists(st.tuples(st.sampled_from(["add", "record", "release"]), st.integers(0, 5)), max_size=40)


@given(actions, st.integers(1, 3))
def test_slots_never_leak(steps: list[tuple[str, int]], num_slots: int) -> None:
    scores = machine((WeightedScorer("right", 1.0),), num_slots)
    for action, number in steps:
        lease = f"score:{number}:0"
        if action == "add" and lease not in phases(scores):
            scores.add(group(lease, Status.OK))
        elif action == "record" and phases(scores).get(lease) == "working":
            scores.record(Score(lease, 0, 0, 1.0))
        elif action == "release":
            scores.cancel((lease,))
        counts = list(phases(scores).values())
        assert counts.count("working") == min(num_slots, counts.count("working") + counts.count("queued"))
    scores.cancel(tuple(phases(scores)))
    assert scores == machine(scores.scorers, num_slots)


def test_scorer_for_other_tasks_adds_nothing() -> None:
    scorers = (WeightedScorer("sums", 1.0, ("sums",)), WeightedScorer("words", 1.0, ("words",)), TWO[1])
    scores = machine(scorers)
    message = group("score:1:0", Status.OK)
    words = msgspec.structs.replace(message, prompt=Prompt(id="words/0", text="p", metadata={"task": "words"}))
    (submit,) = scores.add(words)
    assert isinstance(submit, SubmitTask)
    assert submit.task.scorers == (1, 2)
    scores.record(Score("score:1:0", 0, 1, 1.0))
    (answer,) = scores.record(Score("score:1:0", 0, 2, 1.0))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (1.5,)
    assert answer.message.components == {"sums": (None,), "words": (1.0,), "form": (1.0,)}


def test_prompt_without_scorer_has_no_reward() -> None:
    (answer,) = machine((WeightedScorer("sums", 1.0, ("sums",)),)).add(group("score:1:0", Status.OK))
    assert isinstance(answer, SendScores)
    assert (answer.message.rewards, answer.message.statuses) == ((None,), (Status.REWARD_ERROR,))
    assert answer.message.problems == (
        "Completion 0: no scorer is for the task of this prompt; add it to the `tasks` of one.",
    )
