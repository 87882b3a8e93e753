"""Desired numbers of replicas: operators scale and drain, surplus replicas finish, leave, and stay away."""

from __future__ import annotations

import pytest
from test_controller_edges import join, messages_to
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note, Write
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import ReplicasScaled
from starling.controller.core.replicas.scaling.desired import MAX_DESIRED, surplus
from starling.controller.shell.status import MetricsHistory, snapshot


def scale(script: Script, role: str, num: int, request: str = "") -> list[str]:
    request = request or f"{role} {num} {script.now}"
    return script.receive("operator-0", wire.ScaleReplicas(request=request, role=role, num=num))


def drain(script: Script, name: str, request: str = "") -> list[str]:
    return script.receive("operator-0", wire.DrainReplica(request=request or f"{name} {script.now}", name=name))


def answer(lines: list[str]) -> str:
    """Return what the operator is told."""
    [text] = [line for line in lines if line.startswith("operator-0 <- ")]
    return text.removeprefix("operator-0 <- ")


def three_rollouts() -> Script:
    """Return a run with three rollouts of which rollout-0 and rollout-1 have a group each."""
    script = Script(num_rollouts=1)
    script.start_run("rollout-0", "rollout-1", "rollout-2", slots=1)
    return script


def test_surplus_is_the_newest_by_number() -> None:
    names = ["rollout-2", "rollout-10", "rollout-0", "rollout-9"]
    assert surplus(names, 2) == ["rollout-10", "rollout-9"]
    assert surplus(names, 4) == surplus(names, 9) == surplus([], 1) == []


def test_more_replicas_are_desired_until_they_join() -> None:
    script = three_rollouts()
    assert answer(scale(script, "rollout", 5)) == ("yes: 5 rollouts desired, 3 present: the launcher places 2 more")
    view = snapshot(script.state, MetricsHistory(0.0), 0.0, 0)
    assert (view.desired, view.draining) == ({"rollout": 5}, ())
    script.joins("rollout-3")
    script.joins("rollout-4")
    script.advance_time(0.1)
    assert not script.state.replicas.desired.draining
    assert [command.record for command in script.journal if isinstance(command.record, ReplicasScaled)] == [
        ReplicasScaled(
            role="rollout",
            num=5,
            request="rollout 5 0.0",
            answer="5 rollouts desired, 3 present: the launcher places 2 more",
        )
    ]


def test_surplus_rollouts_finish_their_groups_and_leave() -> None:
    script = three_rollouts()
    lines = scale(script, "rollout", 1)
    assert answer(lines) == "yes: 1 rollout desired, 3 present: 2 will be drained, the newest first"
    assert "rollout-2 <- drain: 1 rollout is desired" in lines, "it has no group"
    assert not any("rollout-1 <- drain" in line for line in lines), "it has one"
    view = snapshot(script.state, MetricsHistory(0.0), 0.0, 0)
    assert view.draining == ("rollout-1", "rollout-2")
    script.generates("rollout-1", "generate:t1:0")
    assert "rollout-1 <- drain: 1 rollout is desired" in script.advance_time(0.1)
    script.leaves("rollout-1")
    script.leaves("rollout-2")
    assert sorted(script.state.replicas.membership.members) == ["policy-0", "reward-0", "rollout-0"]
    assert snapshot(script.state, MetricsHistory(0.0), 0.0, 0).draining == ()
    script.scores("score:t1:0")
    lines = script.generates("rollout-0", "generate:t0:0")
    script.scores("score:t0:0")
    assert script.state.training.step is not None, "the remaining rollout completes the step"


def test_draining_rollout_gets_no_group() -> None:
    script = three_rollouts()
    drain(script, "rollout-0")
    script.fails("rollout-1", "generate:t1:0")
    script.generates("rollout-0", "generate:t0:0")
    script.disconnect("rollout-1")
    leases = script.state.replicas.leases
    assert (leases.num("rollout-0", "generate"), leases.num("rollout-2", "generate")) == (0, 1)


def test_rollout_that_does_not_finish_gives_its_groups_back() -> None:
    script = three_rollouts()
    drain(script, "rollout-1")
    assert not messages_to("rollout-1", script.advance_time(script.plan.drain_s / 2))
    assert script.state.replicas.leases.num("rollout-1", "generate") == 1
    for name in ("policy-0", "reward-0", "rollout-0", "rollout-1", "rollout-2"):
        script.heartbeats(name, *held(script, name), version=0)
    lines = script.advance_time(script.plan.drain_s / 2)
    assert messages_to("rollout-1", lines) == ["drain: an operator drains it"]
    script.interrupts("rollout-1", "generate:t1:0", 1, 1)
    lines = script.leaves("rollout-1")
    assert script.state.replicas.leases.num("rollout-2", "generate") == 1, "it resumes the group"


def held(script: Script, name: str) -> list[str]:
    return [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of(name)]


def test_order_to_leave_is_repeated_with_heartbeats_and_then_enforced() -> None:
    script = three_rollouts()
    drain(script, "rollout-2")
    assert "rollout-2 <- drain: an operator drains it" in script.heartbeats("rollout-2", version=0)
    limit_s = script.plan.drain_s + script.plan.lease_s
    lines: list[str] = []
    for _ in range(int(limit_s) + 2):
        lines += script.advance_time(1.0)
        for name in sorted(script.state.replicas.membership.members):
            lines += script.heartbeats(name, *held(script, name), version=0)
    assert f"rollout-2 <- refused: rollout-2 was told to leave, and did not within {limit_s:g} s" in lines
    assert "rollout-2" not in script.state.replicas.membership.members


def test_drained_replica_lowers_the_desired_number() -> None:
    script = three_rollouts()
    assert answer(drain(script, "rollout-0", "r")) == "yes: rollout-0 is being drained, and 2 rollouts desired"
    assert answer(drain(script, "rollout-0", "r")) == "yes: rollout-0 is being drained, and 2 rollouts desired"
    assert answer(drain(script, "rollout-0", "other")) == "yes: rollout-0 is being drained already"
    assert script.state.replicas.desired.counts == {"rollout": 2}
    assert answer(drain(script, "rollout-1")) == "yes: rollout-1 is being drained, and 1 rollout desired"
    refused = answer(drain(script, "rollout-2"))
    assert refused == "no: rollout-2 is the only rollout of the run; scale rollout up first, or stop the run"


@pytest.mark.parametrize(
    ("role", "num", "problem"),
    [
        ("rollouts", 2, "there is no role 'rollouts' that can be scaled; did you mean rollout?"),
        ("gpu", 2, "there is no role 'gpu' that can be scaled; choose one of rollout, policy, reward, teacher"),
        ("controller", 2, "there is no role 'controller' that can be scaled; choose one of"),
        ("policy", 0, "policy 0 would leave the run without a policy; keep at least 1, or stop the run"),
        ("rollout", -3, "rollout -3 would leave the run without a rollout; keep at least 1"),
        ("rollout", MAX_DESIRED + 1, f"is more than a run may be scaled to; give at most {MAX_DESIRED}"),
        ("teacher", 1, "this run has no teacher: nothing would be given to one"),
        ("policy", 2, "policy-0 makes its steps alone; begin the run with policy.parallel.elastic = true"),
    ],
)
def test_bad_number_is_refused_in_one_sentence(role: str, num: int, problem: str) -> None:
    script = three_rollouts()
    refused = answer(scale(script, role, num))
    assert refused.startswith("no: ")
    assert problem in refused
    assert script.state.replicas.desired.is_unset
    assert not any(isinstance(command, Write) for command in script.commands)


def test_replica_whose_nodes_would_meet_where_others_do_is_refused() -> None:
    script = Script(num_rollouts=1, single_roles=frozenset({"rollout"}))
    script.start_run("rollout-0")
    assert answer(scale(script, "rollout", 2)) == (
        "no: the nodes of a rollout of this run meet at launch.rollout_rdzv, and the launcher cannot place a second "
        "rollout there; start it by hand, with an address of its own, or use the launcher slurm or ray, which place "
        "whole replicas"
    )
    assert not script.state.replicas.desired.counts
    script.joins("rollout-1")  # by hand
    assert answer(scale(script, "rollout", 2)) == "yes: 2 rollouts desired, and present"
    assert answer(scale(script, "rollout", 1)).startswith("yes: 1 rollout desired, 2 present: 1 will be drained")


def test_unknown_replica_is_refused_with_the_present_ones() -> None:
    refused = answer(drain(three_rollouts(), "rollout-7"))
    assert refused == (
        "no: there is no replica 'rollout-7' in the run; the present ones are: policy-0, reward-0, rollout-0, "
        "rollout-1, rollout-2"
    )


def test_ending_run_is_not_scaled() -> None:
    script = three_rollouts()
    script.request_stop()
    assert answer(scale(script, "rollout", 4)).startswith("no: the run is ending")


def test_repeated_request_counts_once() -> None:
    script = three_rollouts()
    scale(script, "rollout", 5, "r")
    scale(script, "rollout", 2, "s")
    assert answer(scale(script, "rollout", 5, "r")).startswith("yes: 5 rollouts desired")
    assert script.state.replicas.desired.counts == {"rollout": 2}


@pytest.mark.parametrize("compacted", [False, True])
def test_desired_number_survives_the_controller(compacted: bool) -> None:
    script = three_rollouts()
    drain(script, "rollout-0", "r")
    desired = script.state.replicas.desired
    script.restart(compacted=compacted)
    restored = script.state.replicas.desired
    assert (restored.counts, restored.chosen) == ({"rollout": 2}, {"rollout-0": None})
    assert restored.requests == desired.requests
    for name in ("policy-0", "reward-0", "rollout-0", "rollout-1", "rollout-2"):
        script.joins(name)
        script.heartbeats(name, version=0)
    lines = script.advance_time(0.1)
    assert messages_to("rollout-0", lines) == ["drain: an operator drains it"], "and not rollout-2"
    script.leaves("rollout-0")
    script.restart(compacted=compacted)
    assert not script.state.replicas.desired.chosen


def test_run_that_was_scaled_down_before_it_began_awaits_no_more() -> None:
    script = Script(num_rollouts=3)
    script.start_run("rollout-0")
    assert not script.state.replicas.leases.has("generate")
    scale(script, "rollout", 1)
    script.advance_time(0.1)
    assert script.state.replicas.leases.has("generate")


def sharing_policies(num: int) -> Script:
    """Return a run whose policies make the first step together."""
    script = Script(num_steps=4)
    for number in range(num):
        join(script, f"policy-{number}", version=0)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    return script


def test_policy_is_drained_at_the_boundary_of_a_step() -> None:
    script = sharing_policies(2)
    assert answer(scale(script, "policy", 3)) == "yes: 3 policies desired, 2 present: the launcher places 1 more"
    lines = scale(script, "policy", 1)
    assert not any("<- drain" in line for line in lines)
    script.trains(1, 0, name="policy-0")
    assert script.state.version == 0, "the step waits for both"
    script.trains(1, 1, name="policy-1")
    assert script.state.version == 1
    assert "policy-1 <- drain: 1 policy is desired" in script.advance_time(0.1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    script.complete_groups("generate:t2:0", "generate:t3:0", version=1)
    step = script.state.training.step
    assert step is not None
    assert list(step.shares) == ["policy-0"], "the one that is drained makes no further step"
    script.leaves("policy-1")
    assert script.state.training.step is step
    assert not step.broken
    script.trains(2)
    assert script.state.version == 2


def test_only_policy_with_the_newest_version_is_kept_until_another_has_it() -> None:
    script = sharing_policies(1)
    script.trains(1)
    join(script, "policy-1", version=0)
    drain(script, "policy-0")
    script.advance_time(0.1)
    assert not script.state.replicas.desired.draining
    script.state.replicas.membership.members["policy-1"].version = 1
    script.advance_time(0.1)
    assert list(script.state.replicas.desired.draining) == ["policy-0"]


def test_changes_are_noted() -> None:
    script = three_rollouts()
    scale(script, "rollout", 2)
    notes = [command for command in script.commands if isinstance(command, Note)]
    assert [(note.kind, note.fields) for note in notes] == [
        ("scaled", {"role": "rollout", "num": 2, "cause": "an operator"}),
        ("draining", {"replica": "rollout-2", "reason": "2 rollouts are desired"}),
    ]
    assert script.state.lifecycle.stage is RunStage.RUNNING
