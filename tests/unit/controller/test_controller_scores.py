"""Scores of single scorers: what a group must have of them, what the policy gets, and dynamic sampling by them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.groups.validation.scores import TrainedScorer, are_equal, scores_of
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import RewardsStored
from starling.controller.core.training.metrics import MAX_NAMES, MetricNames

RIGHT = TrainedScorer("right", 1.0)
SHORT = TrainedScorer("short", 0.5, clip_min=-1.0, clip_max=2.0)
CODE = TrainedScorer("code", 2.0, tasks=("code",))


def script(*scorers: TrainedScorer, **changes: Any) -> Script:
    return Script(scorers=scorers or (RIGHT, SHORT), compares_scores=True, **changes)


def score(run: Script, number: int, **scores: tuple[float | None, ...]) -> list[str]:
    """Generate group `number`, and send its scores; each reward is their sum."""
    run.generates("rollout-0", f"generate:t{number}:0")
    rewards = tuple(sum(value or 0.0 for value in values) for values in zip(*scores.values(), strict=True))
    message = wire.GroupScored(
        lease=f"score:t{number}:0", rewards=rewards, statuses=(wire.Status.OK,) * 2, components=scores
    )
    return run.receive("reward-0", message)


def sent_groups(run: Script) -> tuple[wire.TrainGroup, ...]:
    [step] = [send.message for send in run.sent if isinstance(send.message, wire.TrainStep)]
    return step.groups


def reasons(run: Script) -> list[str]:
    notes = (command for command in run.commands if isinstance(command, Note))
    return [note.fields["reason"] for note in notes if note.kind in ("waiting", "invalid")]


def test_policy_gets_the_scores_of_each_scorer_within_its_bounds() -> None:
    run = script()
    run.start_run()
    score(run, 0, right=(1.0, 0.0), short=(-7.0, 0.25), observed=(9.0, 9.0))
    score(run, 1, right=(1.0, 1.0), short=(5.0, 0.0), observed=(9.0, 9.0))
    first, second = sent_groups(run)
    assert first.scores == (
        wire.ScorerScores(label="right", weight=1.0, values=(1.0, 0.0)),
        wire.ScorerScores(label="short", weight=0.5, values=(-1.0, 0.25)),
    )
    assert [one.values for one in second.scores] == [(1.0, 1.0), (2.0, 0.0)]


def test_policy_gets_no_scores_where_the_algorithm_takes_rewards() -> None:
    run = Script()
    run.start_run()
    score(run, 0, right=(1.0, 0.0))
    score(run, 1, right=(1.0, 0.0))
    assert [group.scores for group in sent_groups(run)] == [(), ()]


@pytest.mark.parametrize(
    "scores",
    [
        {"right": (1.0, 0.0)},
        {"right": (1.0, 0.0), "short": (None, 0.0)},
        {"right": (1.0, 0.0), "shorter": (1.0, 0.0)},
        {"right": (None, None), "short": (1.0, 0.0)},
    ],
)
def test_group_without_a_score_that_counts_is_generated_again(scores: dict[str, tuple[float | None, ...]]) -> None:
    run = script()
    run.start_run()
    score(run, 0, **scores)
    missing = "right" if None in scores["right"] else "short"
    assert any(f"no score of {missing!r}, which counts in the reward" in reason for reason in reasons(run))
    assert not any(isinstance(write.record, RewardsStored) for write in run.journal)


def test_scorer_of_another_task_has_no_scores() -> None:
    run = script(RIGHT, CODE)
    run.start_run()
    score(run, 0, right=(1.0, 0.0), code=(None, None))
    score(run, 1, right=(0.0, 1.0), code=(None, None))
    assert [[one.values for one in group.scores] for group in sent_groups(run)] == [
        [(1.0, 0.0), (None, None)],
        [(0.0, 1.0), (None, None)],
    ]
    prompt = wire.Prompt(id="p", text="x", metadata={"task": "code"})
    assert CODE.scores(prompt)
    assert not CODE.scores(wire.Prompt(id="p", text="x"))
    assert RIGHT.scores(prompt)


def test_dynamic_sampling_keeps_groups_of_equal_rewards_whose_scores_differ() -> None:
    run = script(dynamic_sampling=True)
    run.start_run()
    score(run, 0, right=(1.0, 0.0), short=(0.0, 1.0))  # equal sums
    score(run, 1, right=(1.0, 1.0), short=(3.0, 2.0))  # equal within the bounds
    score(run, 2, right=(1.0, 1.0), short=(1.0, 0.5))
    assert [group.prompt_id for group in sent_groups(run)] == ["train0", "train2"]
    by_reward = Script(dynamic_sampling=True, scorers=(RIGHT, SHORT))
    by_reward.start_run()
    score(by_reward, 0, right=(1.0, 0.0), short=(0.0, 1.0))
    assert "(filtered train0)" in by_reward.log


@pytest.mark.parametrize("compacted", [False, True])
def test_restarted_controller_sends_the_same_scores(compacted: bool) -> None:
    run = script()
    run.start_run()
    score(run, 0, right=(1.0, 0.0), short=(0.5, 0.25))
    score(run, 1, right=(0.0, 0.0), short=(0.0, 1.0))
    before = sent_groups(run)
    run.restart(compacted=compacted)
    groups = run.state.buffer.frozen_groups(1)
    assert [scores_of(group.components, run.plan.scorers, 2) for group in groups] == [one.scores for one in before]


def test_step_that_is_made_again_has_its_scores() -> None:
    """Another policy repeats a committed step from the records of the journal."""
    run = script(num_steps=3)
    run.start_run()
    score(run, 0, right=(1.0, 0.0), short=(0.5, 0.25))
    score(run, 1, right=(0.0, 0.0), short=(0.0, 1.0))
    before = sent_groups(run)
    run.trains(1)
    run.publishes(1)
    run.joins("policy-0", incarnation=2)
    run.fetched(1)
    assert [group.scores for group in sent_groups(run)] == [group.scores for group in before]


def test_names_of_scorers_that_count_are_never_left_out() -> None:
    names = MetricNames(num_scorers=2, labels=("right", "short"))
    made_up = {str(index): 1.0 for index in range(2 * MAX_NAMES)}
    names.known("reward-9", made_up)
    assert names.known("reward-9", {"right": 1.0, "x": 2.0, "short": 3.0}) == {"right": 1.0, "short": 3.0}


def test_plan_with_scorers_survives_a_recording() -> None:
    plan = script(RIGHT, SHORT, CODE).plan
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_fields()))
    assert RunPlan.from_fields(fields) == plan


def test_scores_of_a_scorer_that_is_new_in_the_recipe_are_none() -> None:
    assert [one.values for one in scores_of({"right": (1.0, 0.0)}, (RIGHT, SHORT), 2)] == [(1.0, 0.0), (None, None)]


def test_scores_are_equal_within_their_bounds() -> None:
    assert are_equal({"right": (1.0, 1.0), "short": (3.0, 2.0)}, (RIGHT, SHORT))
    assert not are_equal({"right": (1.0, 1.0), "short": (1.5, 2.0)}, (RIGHT, SHORT))
    assert are_equal({"right": (1.0, 1.0), "code": (None, None)}, (RIGHT, CODE))


def test_group_whose_scorer_fails_says_by_which_status() -> None:
    script = Script(max_tries=1)
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    script.scores("score:t0:0", 1.0, None)
    notes = [command for command in script.commands if getattr(command, "kind", "") in ("waiting", "discarded")]
    assert [note.fields["status"] for note in notes] == ["reward_error"]
