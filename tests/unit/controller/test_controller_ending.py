"""How a run ends: complete, stopped at any moment, or failed; always by the same road, and never twice."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.wire import messages as wire

EVERYBODY = ("policy-0", "reward-0", "rollout-0")


def drained(script: Script, reason: str) -> list[str]:
    """Return what everybody is told in the end."""
    return [f"{name} <- drain: {reason}" for name in sorted(script.state.membership.members)]


def saves(script: Script, step: int) -> list[str]:
    return script.hears("policy-0", wire.CheckpointSaved(lease=f"checkpoint:{step}:0", step=step, path="/p"))


def all_leave(script: Script) -> str:
    lines: list[str] = []
    for name in sorted(script.state.membership.members):
        lines = script.leaves(name)
    return lines[-1]


# --- the policy cannot be replaced ---------------------------------------------------------------------------------


def test_the_run_fails_with_its_policy() -> None:
    script = Script()
    script.begins()
    reason = "policy-0 was lost (it left: drained), and with it the weights of version 0"
    assert script.leaves("policy-0") == ["(left policy-0)", *drained(script, reason)]
    assert all_leave(script) == f"failed: {reason}"


def test_a_closed_connection_is_no_lost_policy_but_silence_is() -> None:
    script = Script()
    script.begins()
    assert script.loses("policy-0") == []
    script.now += script.plan.lease_s + 0.01
    script.beats("rollout-0", version=0)
    script.beats("reward-0")
    lines = script.waits(0.0)
    reason = "policy-0 was lost (it was silent for 10 s), and with it the weights of version 0"
    assert lines == ["(left policy-0)", f"reward-0 <- drain: {reason}", f"rollout-0 <- drain: {reason}"]


def test_a_policy_that_was_started_again_has_lost_its_weights() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    lines = script.joins("policy-0", epoch=2)
    reason = "policy-0 was lost (it was started again), and with it the weights of version 1"
    assert lines == ["(left policy-0)", "(joined policy-0)", "policy-0 <- welcome", *drained(script, reason)]


@pytest.mark.parametrize(
    ("lease", "verb"), [("publish:0:0", "publish"), ("train:1:0", "train"), ("checkpoint:2:0", "checkpoint")]
)
def test_the_run_fails_when_the_policy_cannot_do_its_work(lease: str, verb: str) -> None:
    script = Script()
    script.joins("policy-0")
    if verb != "publish":
        script = Script()
        script.begins()
        script.makes_groups(0, 1)
    if verb == "checkpoint":
        script.trains(1)
        script.publishes(1)
        script.adopts("rollout-0", 1)
        script.makes_groups(2, 3, version=1)
        script.trains(2)
        script.publishes(2)
    lines = script.fails("policy-0", lease, "the disk is full", fatal=True)
    assert lines[-1].endswith(f"drain: policy-0 could not {verb}: the disk is full")
    assert all_leave(script) == f"failed: policy-0 could not {verb}: the disk is full"


# --- a stop request ------------------------------------------------------------------------------------------------


def test_a_stop_before_anybody_came() -> None:
    assert Script().stops() == ["done: enough"]


def test_a_stop_before_the_policy_came() -> None:
    script = Script()
    script.joins("rollout-0")
    assert script.stops() == ["rollout-0 <- drain: enough"]
    assert script.leaves("rollout-0")[-1] == "done: enough"


def test_a_stop_before_the_first_step_saves_nothing() -> None:
    script = Script()
    script.begins()
    assert script.stops() == drained(script, "enough")
    assert all_leave(script) == "done: enough"


def test_a_stop_during_a_step_waits_for_it_and_saves_it() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    assert script.stops() == []
    assert script.state.waiting_for == "the policy trains step 1"
    assert script.trains(1) == [
        "policy-0 <- release train:1:0",
        "(step 1)",
        "(trained 1)",
        "policy-0 <- publish:1:0",
    ]
    assert script.publishes(1)[-1] == "policy-0 <- checkpoint:1:0", "what was asked for is out before the end begins"
    assert saves(script, 1) == ["policy-0 <- release checkpoint:1:0", "(checkpoint 1)", *drained(script, "enough")]
    assert all_leave(script) == "done: enough"


def test_a_stop_during_a_supervised_step_waits_for_it_too() -> None:
    script = Script(num_sft_steps=5)
    script.joins("policy-0")
    script.stops()
    assert script.trains(1) == ["policy-0 <- release train:1:0", "(step 1)", "policy-0 <- checkpoint:1:0"]


def test_a_stop_between_two_steps_deals_nothing_more() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    assert script.stops() == ["policy-0 <- checkpoint:1:0"]
    assert script.generates("rollout-0", "generate:t2:0", 1) == ["rollout-0 <- release generate:t2:0"]


def test_a_stop_during_an_evaluation_drops_it() -> None:
    script = Script(evaluate_at_start=True)
    script.begins()
    assert script.stops() == drained(script, "enough")


def test_the_first_reason_to_stop_stands() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.stops("first")
    script.stops("second")
    script.trains(1)
    script.publishes(1)
    assert saves(script, 1)[-1] == "rollout-0 <- drain: first"


def at_checkpoint(**changes: int) -> Script:
    """Return a run that is complete but for its checkpoint."""
    script = Script(num_steps=1, **changes)
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    assert script.publishes(1)[-1] == "policy-0 <- checkpoint:1:0"
    return script


def test_a_stop_comes_too_late_for_a_run_that_is_complete() -> None:
    script = at_checkpoint()
    assert script.stops() == []
    saves(script, 1)
    assert script.stops() == []
    assert all_leave(script) == "done: the run is complete"
    assert script.stops() == []


# --- drain and finish ----------------------------------------------------------------------------------------------


def test_a_lost_checkpoint_command_is_sent_again() -> None:
    script = at_checkpoint()
    script.now += 2.0
    assert script.beats("policy-0") == ["policy-0 <- welcome", "policy-0 <- checkpoint:1:0"]


def test_a_lost_drain_is_said_again_to_each_heartbeat() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.beats("reward-0") == ["reward-0 <- welcome", "reward-0 <- drain: the run is complete"]


def test_a_replica_that_joins_a_draining_run_is_told() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.joins("rollout-5") == ["(joined rollout-5)", "rollout-5 <- welcome"]
    assert script.beats("rollout-5")[-1] == "rollout-5 <- drain: the run is complete"


def test_the_run_ends_without_those_who_do_not_leave() -> None:
    script = at_checkpoint(drain_s=9)
    saves(script, 1)
    script.leaves("policy-0")
    script.leaves("reward-0")
    script.now += 8.9
    assert script.beats("rollout-0", version=1)[-1] == "rollout-0 <- drain: the run is complete"
    assert script.waits(0.1) == ["(left rollout-0)", "done: the run is complete"]
    assert script.waits(1.0) == []
    assert script.leaves("rollout-0") == ["(left rollout-0)"]


def test_a_policy_that_leaves_as_it_was_told_does_not_fail_the_run() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.leaves("policy-0") == ["(left policy-0)"]
    assert all_leave(script) == "done: the run is complete"


def test_a_policy_lost_before_its_checkpoint_fails_the_run() -> None:
    script = at_checkpoint()
    assert script.leaves("policy-0")[1].startswith("reward-0 <- drain: policy-0 was lost")
    assert all_leave(script).startswith("failed: policy-0 was lost")
