"""How a run ends: complete, stopped at any moment, or failed; always by the same road, and never twice."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.wire import messages as wire

EVERYBODY = ("policy-0", "reward-0", "rollout-0")


def drained(script: Script, reason: str) -> list[str]:
    """Return what everybody is told in the end."""
    return [f"{name} <- drain: {reason}" for name in sorted(script.state.replicas.membership.members)]


def saves(script: Script, step: int) -> list[str]:
    return script.hears("policy-0", wire.CheckpointSaved(lease=f"checkpoint:{step}:0", step=step, path="/p"))


def all_leave(script: Script) -> str:
    lines: list[str] = []
    for name in sorted(script.state.replicas.membership.members):
        lines = script.leaves(name)
    return lines[-1]


# --- a policy that is gone -----------------------------------------------------------------------------------------


def test_run_waits_for_another_policy_and_fails_without_one() -> None:
    script = Script(start_s=20.0)
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    assert script.leaves("policy-0") == ["(left policy-0)"]
    assert script.controller.waiting_for == "needs a policy, which is gone"
    for _ in range(12):
        script.beats("rollout-0", version=0)
        script.beats("reward-0")
        lines = script.waits(2.0)
    reason = "the run needs a policy, which is gone, for 20 s; start what is missing or lower the number in the recipe"
    assert lines == drained(script, reason)
    assert all_leave(script) == f"failed: {reason}"


def test_lone_policy_is_removed_by_silence_and_not_by_a_closed_connection() -> None:
    script = Script()
    script.begins()
    assert script.loses("policy-0") == []
    script.now += script.plan.lease_s + 0.01
    script.beats("rollout-0", version=0)
    script.beats("reward-0")
    assert script.waits(0.0) == ["(left policy-0)"]


def test_restarted_policy_replays_its_steps() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    script.publishes(1)
    assert script.joins("policy-0", epoch=2) == ["(left policy-0)", "(joined policy-0)", "policy-0 <- welcome"]
    assert script.log[-1] == "journal: fetch 1"
    assert script.controller.waiting_for == "policy-0 to catch up: it holds version 0 of 1"
    assert script.fetched(1) == ["policy-0 <- train:1:1 train0 train1"]
    [send] = script.sent
    assert isinstance(send.message, wire.TrainStep)
    assert send.message.replayed
    assert len(send.buffers) == 8
    assert script.trains(1, 1, epoch=2) == ["policy-0 <- release train:1:1"], "no step is told twice"
    script.adopts("rollout-0", 1)
    assert script.makes_groups(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")


def test_policy_with_a_saved_state_replays_only_later_steps() -> None:
    script = Script(num_steps=3, save_every=1)
    script.begins()
    script.makes_groups(0, 1)
    assert script.trains(1)[-1] == "policy-0 <- save:1:0"
    script.publishes(1)
    assert script.saves_state(1) == ["policy-0 <- release save:1:0", "(state 1)"]
    script.adopts("rollout-0", 1)
    assert script.makes_groups(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")
    script.joins("policy-0", epoch=2, version=1)
    assert "policy-0 <- train:2:1 train2 train3" in script.log, "the active step is dispatched again with its groups"


def test_policy_that_made_the_active_step_is_not_asked_again() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.leaves("policy-0")
    lines = script.joins("policy-0", epoch=2, version=1)
    assert "(step 1)" in lines
    assert script.state.version == 1


@pytest.mark.parametrize(
    ("lease", "verb"), [("publish:0:0", "publish"), ("train:1:0", "train"), ("checkpoint:2:0", "checkpoint")]
)
def test_run_fails_when_the_policy_cannot_do_its_work(lease: str, verb: str) -> None:
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


def test_stop_before_any_replica_joined() -> None:
    assert Script().stops() == ["done: enough"]


def test_stop_before_the_policy_joined() -> None:
    script = Script()
    script.joins("rollout-0")
    assert script.stops() == ["rollout-0 <- drain: enough"]
    assert script.leaves("rollout-0")[-1] == "done: enough"


def test_stop_before_the_first_step_saves_nothing() -> None:
    script = Script()
    script.begins()
    assert script.stops() == ["(tail )", *drained(script, "enough")]
    assert all_leave(script) == "done: enough"


def test_stop_during_a_step_waits_for_it_and_saves_it() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    assert script.stops() == []
    assert script.controller.waiting_for == "the policy to train step 1"
    assert script.trains(1) == [
        "policy-0 <- release train:1:0",
        "(step 1)",
        "(trained 1)",
        "policy-0 <- publish:1:0",
    ]
    assert script.publishes(1)[-2:] == ["policy-0 <- save:1:0", "policy-0 <- checkpoint:1:0"], (
        "what was asked for is out"
    )
    script.saves_state(1)
    assert saves(script, 1) == ["policy-0 <- release checkpoint:1:0", "(checkpoint 1)", *drained(script, "enough")]
    assert all_leave(script) == "done: enough"
    assert "journal <- RunEnded" not in script.log, "a run that was stopped can be taken up again"


def test_stop_during_a_supervised_step_waits_for_it_too() -> None:
    script = Script(num_supervised_steps=5)
    script.joins("policy-0")
    script.stops()
    assert script.trains(1) == [
        "policy-0 <- release train:1:0",
        "(step 1)",
        "policy-0 <- save:1:0",
        "policy-0 <- checkpoint:1:0",
    ]


def test_stop_between_two_steps_dispatches_no_step() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    assert script.stops() == ["(tail )", "policy-0 <- save:1:0", "policy-0 <- checkpoint:1:0"]
    assert script.generates("rollout-0", "generate:t2:0", 1) == ["rollout-0 <- release generate:t2:0"]


def test_stop_during_an_evaluation_drops_it() -> None:
    script = Script(evaluate_at_start=True)
    script.begins()
    assert script.stops() == ["(tail )", *drained(script, "enough")]


def test_first_reason_to_stop_stands() -> None:
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.stops("first")
    script.stops("second")
    script.trains(1)
    script.publishes(1)
    saves(script, 1)
    assert script.saves_state(1)[-1] == "rollout-0 <- drain: first"


def at_checkpoint(**changes: int) -> Script:
    """Return a run that is complete but for its checkpoint."""
    script = Script(num_steps=1, **changes)
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    assert script.publishes(1)[-1] == "policy-0 <- checkpoint:1:0"
    return script


def test_stop_comes_too_late_for_a_run_that_is_complete() -> None:
    script = at_checkpoint()
    assert script.stops() == []
    saves(script, 1)
    assert script.stops() == []
    assert all_leave(script) == "done: the run is complete"
    assert script.stops() == []


# --- drain and finish ----------------------------------------------------------------------------------------------


def test_lost_checkpoint_command_is_sent_again() -> None:
    script = at_checkpoint()
    script.now += 2.0
    assert script.beats("policy-0") == ["policy-0 <- welcome", "policy-0 <- checkpoint:1:0"]


def test_drain_is_repeated_with_each_heartbeat() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.beats("reward-0") == ["reward-0 <- welcome", "reward-0 <- drain: the run is complete"]


def test_replica_that_joins_during_drain_is_drained() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.joins("rollout-5") == ["(joined rollout-5)", "rollout-5 <- welcome"]
    assert script.beats("rollout-5")[-1] == "rollout-5 <- drain: the run is complete"


def test_drain_ends_without_replicas_that_stay() -> None:
    script = at_checkpoint(drain_s=9)
    saves(script, 1)
    script.leaves("policy-0")
    script.leaves("reward-0")
    script.now += 8.9
    assert script.beats("rollout-0", version=1)[-1] == "rollout-0 <- drain: the run is complete"
    assert script.waits(0.1) == ["(left rollout-0)", "done: the run is complete"]
    assert script.waits(1.0) == []
    assert script.leaves("rollout-0") == []


def test_policy_that_leaves_during_drain_does_not_fail_the_run() -> None:
    script = at_checkpoint()
    saves(script, 1)
    assert script.leaves("policy-0") == ["(left policy-0)"]
    assert all_leave(script) == "done: the run is complete"


def test_returned_policy_writes_the_last_checkpoint() -> None:
    script = at_checkpoint()
    assert script.leaves("policy-0") == ["(left policy-0)"]
    script.joins("policy-0", epoch=2)
    assert script.fetched(1) == ["policy-0 <- train:1:1 train0 train1"]
    assert script.trains(1, 1, epoch=2)[-1] == "policy-0 <- checkpoint:1:1"


def test_run_fails_without_a_policy_for_the_last_checkpoint() -> None:
    script = at_checkpoint(start_s=20)
    script.leaves("policy-0")
    for _ in range(12):
        script.beats("rollout-0", version=1)
        script.beats("reward-0")
        lines = script.waits(2.0)
    assert lines[0].startswith("reward-0 <- drain: the run needs a policy, which is gone, for 20 s")


def test_stop_has_a_deadline() -> None:
    script = Script(stop_s=5.0)
    script.begins()
    script.makes_groups(0, 1)
    script.stops()
    for name in EVERYBODY:
        script.beats(name, version=0)
    lines = script.waits(5.1)
    assert lines[0].endswith("the run did not stop in order within 5 s; it waits for the policy to train step 1")


def test_failed_save_is_retried_while_the_run_goes_on() -> None:
    script = Script(num_steps=3, save_every=1)
    script.begins()
    script.makes_groups(0, 1)
    assert script.trains(1)[-1] == "policy-0 <- save:1:0"
    script.publishes(1)
    assert "(failed policy-0)" in script.fails("policy-0", "save:1:0", "the disk is full", fatal=True)
    script.adopts("rollout-0", 1)
    assert script.makes_groups(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")
    for name in EVERYBODY:
        script.beats(name, version=1)
    assert script.waits(9.0) == []
    for name in EVERYBODY:
        script.beats(name, version=1)
    script.waits(6.1)
    assert script.trains(2)[-1] == "policy-0 <- save:2:0"


def test_stop_waits_for_the_state_to_be_saved_until_its_deadline() -> None:
    script = Script(stop_s=20.0)
    script.begins()
    script.makes_groups(0, 1)
    script.stops()
    script.trains(1)
    script.publishes(1)
    script.fails("policy-0", "save:1:0", "the disk is full", fatal=True)
    saves(script, 1)
    for _ in range(2):
        for name in EVERYBODY:
            script.beats(name, version=1)
        lines = script.waits(7.6)
    assert lines == ["policy-0 <- save:1:1"]
    saved = wire.CheckpointSaved(lease="save:1:1", step=1, path="/s", state=True)
    assert script.hears("policy-0", saved)[-1] == "rollout-0 <- drain: enough"


def test_journal_keeps_steps_since_the_previous_state() -> None:
    script = Script(num_steps=4, save_every=1)
    script.begins()
    for step in (1, 2, 3):
        script.makes_groups(2 * step - 2, 2 * step - 1, version=step - 1)
        script.trains(step)
        script.publishes(step)
        script.adopts("rollout-0", step)
        script.saves_state(step)
    assert [line for line in script.log if line.startswith("journal: prune")] == [
        "journal: prune 1",
        "journal: prune 2",
    ]
    script.joins("policy-0", epoch=2, version=2)
    assert script.log[-1] == "journal: fetch 3", "the newest state is damaged, say: the one before will do"
    lines = script.joins("policy-0", epoch=3, version=1)
    assert "policy-0 is at version 1, and the journal keeps only the steps after version 2" in lines[-1]


def test_states_are_saved_with_some_time_between_them() -> None:
    script = Script(num_steps=4, save_every=1, save_rest_s=5.0)
    script.begins()
    for step in (1, 2):
        script.makes_groups(2 * step - 2, 2 * step - 1, version=step - 1)
        script.trains(step)
        script.publishes(step)
        script.adopts("rollout-0", step)
        if step == 1:
            script.saves_state(step)
            script.now += 3.0
    assert "policy-0 <- save:2:0" not in script.log
    script.now += 2.0
    script.makes_groups(4, 5, version=2)
    saved, dealt = (script.log.index(line) for line in ("policy-0 <- save:2:0", "policy-0 <- train:3:0 train4 train5"))
    assert saved < dealt, "the policy takes the state before the next step changes it, and writes it meanwhile"
