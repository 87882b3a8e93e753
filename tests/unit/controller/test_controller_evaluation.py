"""Evaluation: one version, pinned on a few rollouts until every held-out prompt is scored or given up."""

from __future__ import annotations

import json

import pytest
from transcript import Script

from starling.common.files import MAX_LINE_BYTES
from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.evaluation.evaluation import (
    MAX_TASKS,
    TASK_CHARACTERS,
    Evaluation,
    num_pinned,
    pass_at,
)
from starling.controller.core.events import Write
from starling.controller.core.groups.group import GroupState


def evaluating(*rollouts: str, **changes: int) -> Script:
    script = Script(evaluate_at_start=True, evaluate_at_end=True, max_staleness=1, **changes)
    script.start_run(*rollouts, slots=4 if len(rollouts) != 2 else 8)
    return script


def summary(script: Script) -> dict[str, object]:
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "evaluation"]
    return note.fields


def test_evaluation_goes_first_and_leaves_half_of_the_only_rollout_to_training() -> None:
    script = evaluating(num_held_out=3)
    assert script.log[-4:] == [
        "rollout-0 <- generate:e0:0 held0 >= v0",
        "rollout-0 <- generate:e1:0 held1 >= v0",
        "rollout-0 <- generate:t0:0 train0 >= v0",
        "rollout-0 <- generate:t1:0 train1 >= v0",
    ], "the evaluation takes two of four slots"
    assert script.controller.waiting_for == "evaluation of version 0: 0 of 3 prompts"


def test_only_pinned_rollouts_keep_the_evaluated_version() -> None:
    script = evaluating("rollout-0", "rollout-1", "rollout-2", "rollout-3")
    assert script.state.evaluations.current is not None
    assert len(script.state.evaluations.current.pinned) == 1
    (bound,) = script.state.evaluations.current.pinned
    free = next(name for name in ("rollout-0", "rollout-1", "rollout-2", "rollout-3") if name != bound)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    assert script.trains(1)[-1] == "policy-0 <- publish:1:0"
    adopting = {line.split(" <- ")[0] for line in script.publishes(1) if "adopt:1" in line}
    assert adopting == {"rollout-0", "rollout-1", "rollout-2", "rollout-3"} - {bound}
    assert script.controller.waiting_for.startswith("the groups of step 2"), "no evaluation pins it"
    script.adopts(free, 1, script.attempt_of(free, "adopt:1"))
    for n in (0, 1):
        script.generates(bound, f"generate:e{n}:0", num=1)
        lines = script.scores(f"score:e{n}:0", float(n))
    assert f"{bound} <- adopt:1:3" in lines, "the rollout is not pinned any longer"
    assert {k: summary(script)[k] for k in ("version", "cause", "num_prompts", "num_failed", "reward_mean", "k")} == {
        "version": 0,
        "cause": "start",
        "num_prompts": 2,
        "num_failed": 0,
        "reward_mean": 0.5,
        "k": 1,
    }


def test_group_of_a_lost_pinned_rollout_goes_to_a_holder_of_the_version() -> None:
    script = evaluating()
    script.disconnect("rollout-0")
    assert script.joins("rollout-1", slots=4)[-1] == "rollout-1 <- adopt:0:1"
    assert "rollout-1 <- generate:e0:1 held0 >= v0" in script.adopts("rollout-1", 0, 1)


def test_evaluation_of_a_lost_version_moves_to_the_newest() -> None:
    script = evaluating("rollout-0", "rollout-1")
    assert script.state.evaluations.current is not None
    (bound,) = script.state.evaluations.current.pinned
    other = {"rollout-0": "rollout-1", "rollout-1": "rollout-0"}[bound]
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    script.adopts(other, 1)
    lines = script.disconnect(bound)
    assert "(evaluation_moved )" in lines
    assert f"{other} <- generate:e2:0 held0 >= v1" in lines


def test_evaluation_groups_are_stored_without_tokens() -> None:
    script = evaluating()
    script.complete_groups("generate:t0:0")
    script.generates("rollout-0", "generate:e0:0", num=1)
    assert script.state.evaluations.current is not None
    (held_out,) = script.state.evaluations.current.within(GroupState.GENERATED)
    assert held_out.buffers == ()
    (write,) = [command for command in script.commands if isinstance(command, Write)]
    assert write.payload == ()
    trained = script.state.buffer.get(0)
    assert trained is not None
    assert [len(buffer) for buffer in trained.buffers] == [4, 8, 8, 8]


def test_evaluation_has_a_deadline() -> None:
    script = evaluating(evaluation_s=5)
    script.generates("rollout-0", "generate:e0:0", num=1)
    script.scores("score:e0:0", 1.0)
    for name in ("policy-0", "rollout-0", "reward-0"):
        script.heartbeats(name, version=0)
    assert "(evaluation )" in script.advance_time(5.0)
    assert (summary(script)["num_failed"], summary(script)["reward_mean"]) == (1, 1.0)


def test_discarded_group_is_revoked_from_its_replica() -> None:
    script = evaluating("rollout-0", evaluation_s=10)
    assert any(lease_subject(lease.id)[0] == "e" for lease in script.state.replicas.leases.all_of("rollout-0"))
    for _ in range(11):
        script.advance_time(1.0)
        held = [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of("rollout-0")]
        script.heartbeats("rollout-0", *held, version=0)
        script.heartbeats("policy-0")
        script.heartbeats("reward-0")
    assert script.state.evaluations.current is None
    assert not any(lease_subject(lease.id)[0] == "e" for lease in script.state.replicas.leases.all_of("rollout-0"))


def test_evaluations_come_every_so_many_steps_and_on_request() -> None:
    script = Script(num_steps=4, evaluate_every=2)
    script.start_run()
    for step in (1, 2):
        script.generate_and_score(2 * step - 2, 2 * step - 1, version=step - 1)
        script.trains(step)
        script.publishes(step)
        lines = script.adopts("rollout-0", step)
    assert "rollout-0 <- generate:e0:0 held0 >= v2" in lines
    ask = wire.RequestEvaluation(request="r", num_completions=2)
    reply = script.receive("operator-0", ask)
    assert reply == ["operator-0 <- yes: the newest version will be evaluated after the evaluation of version 2"]
    assert script.receive("operator-0", ask) == reply
    for n in (0, 1):
        script.generates("rollout-0", f"generate:e{n}:0", 2, num=1)
        lines = script.scores(f"score:e{n}:0", 1.0)
    assert "(evaluation 2)" in lines
    assert script.state.evaluations.current is not None
    assert (script.state.evaluations.current.cause, script.state.evaluations.current.num_completions) == ("request", 2)
    assert script.state.evaluations.requested == [], "a repeated request counts once"


@pytest.mark.parametrize(
    ("k", "num", "num_right", "expected"),
    [(1, 4, 1, 0.25), (2, 4, 1, 0.5), (4, 4, 1, 1.0), (3, 4, 0, 0.0), (2, 4, 2, 5 / 6)],
)
def test_pass_at_k_is_unbiased(k: int, num: int, num_right: int, expected: float) -> None:
    assert pass_at(k, num, num_right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num", "share", "expected"), [(0, 0.25, 0), (1, 0.25, 1), (4, 0.25, 1), (5, 0.25, 2), (8, 1, 8)]
)
def test_evaluation_is_pinned_to_a_share_of_the_rollouts(num: int, share: float, expected: int) -> None:
    assert num_pinned(num, share) == expected


def test_last_version_is_evaluated_before_the_checkpoint() -> None:
    script = Script(evaluate_at_end=True, num_steps=1)
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    assert script.adopts("rollout-0", 1)[2:] == ["rollout-0 <- generate:e0:0 held0 >= v1"]
    script.generates("rollout-0", "generate:e0:0", 1, num=1)
    script.generates("rollout-0", "generate:e1:0", 1, num=1)
    script.scores("score:e0:0", 1.0)
    assert script.scores("score:e1:0", 1.0)[1:] == ["(evaluation 1)", "policy-0 <- checkpoint:1:0"]


def test_evaluation_alone() -> None:
    script = Script(evaluate_at_start=True, num_steps=0)
    script.start_run()
    for n in (0, 1):
        script.generates("rollout-0", f"generate:e{n}:0", num=1)
    script.scores("score:e0:0", 1.0)
    lines = script.scores("score:e1:0", 0.0)
    assert lines[1] == "(evaluation )"
    assert lines[2:] == [f"{name} <- drain: the run is complete" for name in ("policy-0", "reward-0", "rollout-0")]


def test_held_out_prompts_that_cannot_be_answered_are_counted() -> None:
    script = Script(evaluate_at_start=True, num_steps=0)
    script.start_run()
    assert "(discarded held0)" in script.fails("rollout-0", "generate:e0:0", "too long", fatal=True)
    script.generates("rollout-0", "generate:e1:0", num=1)
    script.scores("score:e1:0", 1.0)
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "evaluation"]
    assert (note.fields["num_failed"], note.fields["reward_mean"]) == (1, 1.0)


@pytest.mark.parametrize("of", ["e", "t"])
def test_rollout_that_gives_groups_back_is_pinned_no_more(of: str) -> None:
    """It gets no group for a while then, and held up each evaluation until its deadline, also by groups to train."""
    script = evaluating("rollout-0", "rollout-1", max_tries=2)
    assert script.state.evaluations.current is not None
    (bound,) = script.state.evaluations.current.pinned
    other = {"rollout-0": "rollout-1", "rollout-1": "rollout-0"}[bound]
    held = next(one for one in script.state.replicas.leases.all_of(bound) if lease_subject(one.id)[0] == of)
    script.interrupts(bound, held.id)
    assert script.state.evaluations.current.pinned == {other}
    for lease in script.state.replicas.leases.all_of(bound):
        script.interrupts(bound, lease.id)
    for n in (0, 1):
        [lease] = [one.id for one in script.state.replicas.leases.all_of(other) if one.id.startswith(f"generate:e{n}:")]
        script.generates(other, lease, num=1)
        [lease] = [one.id for one in script.state.replicas.leases.all_of("reward-0") if f":e{n}:" in one.id]
        script.scores(lease, 1.0)
    assert summary(script)["num_failed"] == 0


def test_results_of_a_task_for_each_prompt_fit_into_a_line_that_is_read_again() -> None:
    held_out = [
        wire.Prompt(id=f"held{row}", text="x", metadata={"task": f"{row % 2_500} {'😀' * 8_000}"})
        for row in range(2_501)
    ]
    evaluation = Evaluation(
        1, 0, "start", held_out, num_completions=1, max_tries=1, first=0, deadline=1.0, expected=lambda _: 1
    )
    for group in list(evaluation.live()):
        group.rewards = (1.0,)
        evaluation.move(group, GroupState.SCORED)
    tasks = evaluation.summary()["tasks"]
    assert len(tasks) == MAX_TASKS
    assert max(map(len, tasks)) == TASK_CHARACTERS
    assert sum(one["num_prompts"] for one in tasks.values()) == MAX_TASKS + 1, "the largest are listed"
    assert len(json.dumps(evaluation.summary())) < MAX_LINE_BYTES
