"""Evaluation scores: which groups have them, where they are reported, and that nothing is trained on them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcript import Script

from starling.algo.advantage import decoupled_normalised, group_normalised
from starling.common.ranges import MAX_SCORES
from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.groups.validation.scores import TrainedScorer, is_drawn
from starling.controller.core.records import RewardsStored
from starling.controller.core.training.reward_hacking import PREFIX
from starling.reward.core.groups import GroupScores, SendScores
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import Score

SCORERS = (
    WeightedScorer("right", 1.0),
    WeightedScorer("short", 0.5),
    WeightedScorer("judge", 0.0, evaluates=True),
)
TRAINED = (TrainedScorer("right", 1.0), TrainedScorer("short", 0.5))
Judged = tuple[float | None, ...]


def script(**changes: Any) -> Script:
    plan = {"evaluation_scorers": ("judge",), "evaluated_share": 1.0, "num_scorers": 3}
    return Script(**{**plan, **changes})


def asked(run: Script, lease: str) -> wire.ScoreGroup:
    """Return what the reward replica was told to score."""
    message = run.commands_sent[run.aliases.long(lease)].message
    assert isinstance(message, wire.ScoreGroup)
    return message


def answer(message: wire.ScoreGroup, right: Judged, short: Judged, judged: Judged) -> wire.GroupScored:
    """Return the answer of a reward service with these scores; None fails."""
    service = GroupScores(SCORERS, 1)
    service.add(message)
    commands: list[object] = []
    for scorer, values in enumerate((right, short, judged)):
        for index, value in enumerate(values):
            status = wire.Status.OK if value is not None else wire.Status.REWARD_ERROR
            commands += service.record(Score(message.lease, index, scorer, value, status))
    (sent,) = (command for command in commands if isinstance(command, SendScores))
    return sent.message


def score(run: Script, number: int, judged: Judged, **changes: Any) -> list[str]:
    """Generate group `number`, and score it; right are 1 and 0, short 0 and 3."""
    run.generates("rollout-0", f"generate:t{number}:0", run.state.weights.version)
    message = answer(asked(run, f"score:t{number}:0"), (1.0, 0.0), (0.0, 3.0), judged)
    return run.receive("reward-0", msgspec.structs.replace(message, **changes))


def sent_groups(run: Script) -> tuple[wire.TrainGroup, ...]:
    [step] = [send.message for send in run.sent if isinstance(send.message, wire.TrainStep)]
    return step.groups


def fields(run: Script, kind: str) -> dict[str, Any]:
    [note] = [one for one in run.commands if isinstance(one, Note) and one.kind == kind]
    return note.fields


# --- nothing is trained on them ---------------------------------------------------------------------------------------

judgements = st.tuples(*[st.none() | st.floats(allow_nan=False, allow_infinity=False)] * 2)


@given(first=judgements, second=judgements, decoupled=st.booleans(), dynamic=st.booleans())
def test_evaluation_scores_change_no_advantage(first: Judged, second: Judged, decoupled: bool, dynamic: bool) -> None:
    """Neither with GDPO nor with GRPO, and no group is left out or generated again for them."""
    plan: dict[str, Any] = {"dynamic_sampling": dynamic}
    plan |= {"scorers": TRAINED, "compares_scores": True} if decoupled else {}
    trained = []
    for share in (0.0, 1.0):
        run = script(evaluated_share=share, **plan)
        run.start_run()
        score(run, 0, first)
        score(run, 1, second)
        trained.append(sent_groups(run))
    plain, evaluated = trained
    assert evaluated == plain
    rewards = [[one.reward for one in group.trajectories] for group in evaluated]
    assert rewards == [[1.0, 1.5]] * 2
    if decoupled:
        assert [[one.label for one in group.scores] for group in evaluated] == [["right", "short"]] * 2
        advantages = decoupled_normalised(rewards, [group.scores for group in evaluated])
    else:
        advantages = group_normalised(rewards)
    right_is_better = decoupled  # where each scorer is normalised by itself, and "right" has the greater weight
    assert all((first > second) is right_is_better for first, second in advantages)


def test_dynamic_sampling_does_not_look_at_evaluation_scores() -> None:
    run = script(dynamic_sampling=True)
    run.start_run()
    run.generates("rollout-0", "generate:t0:0")
    message = answer(asked(run, "score:t0:0"), (1.0, 1.0), (0.0, 0.0), (0.0, 9.0))
    assert "(filtered train0)" in run.receive("reward-0", message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_evaluation_score_that_is_no_number_has_failed_and_costs_no_group(value: float) -> None:
    run = script()
    run.start_run()
    score(run, 0, (0.5, 0.5), evaluation_scores={"judge": (value, 0.25)})
    score(run, 1, (None, None))
    assert len(sent_groups(run)) == 2
    run.trains(1)
    assert fields(run, "step")["eval_score/judge"] == 0.25


def test_many_evaluation_scores_cost_no_group() -> None:
    """They have a limit of their own."""
    run = script()
    run.start_run()
    score(run, 0, (None, None), evaluation_scores={f"judge/{number}": (1.0, 0.0) for number in range(MAX_SCORES)})
    [stored] = [write.record for write in run.journal if isinstance(write.record, RewardsStored)]
    assert len(stored.evaluation_scores) == MAX_SCORES


@pytest.mark.parametrize(
    "scores", [{"judge": (1.0,)}, {"j" * 300: (1.0, 1.0)}, {str(n): (1.0, 1.0) for n in range(MAX_SCORES + 1)}]
)
def test_evaluation_scores_of_another_form_are_no_answer(scores: dict[str, Judged]) -> None:
    run = script()
    run.start_run()
    score(run, 0, (0.5, 0.5), evaluation_scores=scores)
    assert not any(isinstance(write.record, RewardsStored) for write in run.journal)


# --- which groups have them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_evaluated"),
    [({}, True), ({"evaluated_share": 0.0}, False), ({"evaluation_scorers": ()}, False)],
)
def test_share_of_training_groups_is_evaluated(changes: dict[str, Any], is_evaluated: bool) -> None:
    run = script(**changes)
    run.start_run()
    run.generates("rollout-0", "generate:t0:0")
    assert asked(run, "score:t0:0").evaluate is is_evaluated


def test_scores_that_were_not_asked_for_are_left_out() -> None:
    run = script(evaluated_share=0.0)
    run.start_run()
    score(run, 0, (9.0, 9.0), evaluation_scores={"judge": (9.0, 9.0)})
    score(run, 1, (9.0, 9.0))
    run.trains(1)
    assert "eval_score/judge" not in fields(run, "step")


def test_held_out_prompts_are_always_evaluated() -> None:
    run = script(evaluated_share=0.0, evaluate_at_start=True, max_staleness=1)
    run.start_run(slots=4)
    for number, judged in enumerate((0.25, 0.75)):
        run.generates("rollout-0", f"generate:e{number}:0", num=1)
        message = asked(run, f"score:e{number}:0")
        assert message.evaluate
        run.receive("reward-0", answer(message, (1.0,), (0.0,), (judged,)))
    found = fields(run, "evaluation")
    assert (found["eval_score/judge"], found["score/right"], found["reward_mean"]) == (0.5, 1.0, 1.0)


@given(seed=st.integers(0, 1 << 40), first=st.floats(0, 1), second=st.floats(0, 1))
def test_greater_share_draws_the_same_groups_and_more(seed: int, first: float, second: float) -> None:
    low, high = sorted((first, second))
    drawn = [{ordinal for ordinal in range(50) if is_drawn(seed, ordinal, share)} for share in (low, high)]
    assert drawn[0] <= drawn[1]
    assert not any(is_drawn(seed, ordinal, 0.0) for ordinal in range(50))
    assert all(is_drawn(seed, ordinal, 1.0) for ordinal in range(50))


def test_share_of_many_groups_is_that_of_the_recipe() -> None:
    num = sum(is_drawn(7, ordinal, 0.1) for ordinal in range(10_000))
    assert 850 <= num <= 1150


# --- a restart --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_restarted_controller_has_the_evaluation_scores(compacted: bool) -> None:
    run = script()
    run.start_run()
    score(run, 0, (0.25, None))
    score(run, 1, (0.75, 0.5))
    run.restart(compacted=compacted)
    groups = run.state.buffer.frozen_groups(1)
    assert [group.evaluation_scores for group in groups] == [{"judge": (0.25, None)}, {"judge": (0.75, 0.5)}]


# --- the alarm --------------------------------------------------------------------------------------------------------


def train(run: Script, step: int, reward: float, judged: float) -> list[str]:
    """Train and publish a step of two groups; return the lines about alarms."""
    for number in (2 * step - 2, 2 * step - 1):
        run.generates("rollout-0", f"generate:t{number}:0", step - 1)
        message = answer(asked(run, f"score:t{number}:0"), (reward, reward + 1.0), (0.0, 0.0), (judged, judged))
        run.receive("reward-0", message)
    lines = [line for line in run.trains(step) if "alarm" in line]
    run.publishes(step)
    run.adopts("rollout-0", step, run.attempt_of("rollout-0", f"adopt:{step}"))
    return lines


HACKED = (0.0, 0.1, 0.0, 0.8, 0.9, 0.8)
"""Rewards of steps; the judge's scores are 1 minus them."""


def test_alarm_begins_when_rewards_rise_and_evaluation_scores_fall() -> None:
    run = script(alarm_steps=6, num_steps=9)
    run.start_run()
    lines = [train(run, step, reward, 1.0 - reward) for step, reward in enumerate(HACKED, start=1)]
    assert lines == [[], [], [], [], [], ["(alarm 6)"]]
    [alarm] = run.state.training.alarms.values()
    assert (alarm.name, alarm.since, alarm.value) == (f"{PREFIX}judge", 6, pytest.approx(-0.8))
    assert alarm.text.startswith(
        "from step 1 to 6 the reward rose from 0.533 to 1.33, while eval_score/judge fell from 0.967 to 0.167, so"
    )
    assert train(run, 7, 0.9, 0.1) == [], "it is still on"
    assert train(run, 8, 0.8, 0.2) == ["(alarm_over 8)"], "both stay as they are"


@pytest.mark.parametrize("compacted", [False, True])
def test_restarted_controller_has_the_alarm_and_the_steps_before(compacted: bool) -> None:
    run = script(alarm_steps=6, num_steps=9)
    run.start_run()
    for step, reward in enumerate(HACKED, start=1):
        train(run, step, reward, 1.0 - reward)
    before = run.state.training
    run.restart(compacted=compacted)
    after = run.state.training
    assert list(after.alarms) == [f"{PREFIX}judge"]
    assert after.alarms == before.alarms
    assert len(after.evaluated.summary()["judge"]) == 6
    assert after.evaluated.summary() == before.evaluated.summary()
