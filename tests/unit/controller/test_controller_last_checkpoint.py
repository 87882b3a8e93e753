"""Ends of a run: complete, stopped at any moment, or failed."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.wire import messages as wire

ALL_REPLICAS = ("policy-0", "reward-0", "rollout-0")


def drain_lines(script: Script, reason: str) -> list[str]:
    """Return the drain messages to all members."""
    return [f"{name} <- drain: {reason}" for name in sorted(script.state.replicas.membership.members)]


def report_checkpoint(script: Script, step: int) -> list[str]:
    return script.receive("policy-0", wire.CheckpointSaved(lease=f"checkpoint:{step}:0", step=step, path="/p"))


def leave_all(script: Script) -> str:
    lines: list[str] = []
    for name in sorted(script.state.replicas.membership.members):
        lines = script.leaves(name)
    return lines[-1]


# --- a lost policy -------------------------------------------------------------------------------------------------


def test_run_waits_for_another_policy_and_fails_without_one() -> None:
    script = Script(start_s=20.0)
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    assert script.leaves("policy-0") == ["(left policy-0)"]
    assert script.controller.waiting_for == "needs a policy, which is gone"
    for _ in range(12):
        script.heartbeats("rollout-0", version=0)
        script.heartbeats("reward-0")
        lines = script.advance_time(2.0)
    reason = "the run needs a policy, which is gone, for 20 s; start what is missing or lower the number in the recipe"
    assert lines == drain_lines(script, reason)
    assert leave_all(script) == f"failed: {reason}"


def test_lone_policy_is_removed_by_silence_and_not_by_a_closed_connection() -> None:
    script = Script()
    script.start_run()
    assert script.disconnect("policy-0") == []
    script.now += script.plan.lease_s + 0.01
    script.heartbeats("rollout-0", version=0)
    script.heartbeats("reward-0")
    assert script.advance_time(0.0) == ["(left policy-0)"]


def test_restarted_policy_replays_its_steps() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    assert script.joins("policy-0", incarnation=2) == ["(left policy-0)", "(joined policy-0)", "policy-0 <- welcome"]
    assert script.log[-1] == "journal: fetch 1"
    assert script.controller.waiting_for == "policy-0 to catch up: it holds version 0 of 1"
    assert script.fetched(1) == ["policy-0 <- train:1:1 train0 train1"]
    [send] = script.sent
    assert isinstance(send.message, wire.TrainStep)
    assert send.message.replayed
    assert len(send.buffers) == 8
    assert script.trains(1, 1, incarnation=2) == ["policy-0 <- release train:1:1"], "no step is committed twice"
    script.adopts("rollout-0", 1)
    assert script.generate_and_score(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")


def test_policy_with_a_saved_state_replays_only_later_steps() -> None:
    script = Script(num_steps=3, save_every=1)
    script.start_run()
    script.generate_and_score(0, 1)
    assert script.trains(1)[-1] == "policy-0 <- save:1:0"
    script.publishes(1)
    assert script.saves_state(1) == ["policy-0 <- release save:1:0", "(state 1)"]
    script.adopts("rollout-0", 1)
    assert script.generate_and_score(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")
    script.joins("policy-0", incarnation=2, version=1)
    assert "policy-0 <- train:2:1 train2 train3" in script.log, "the active step is dispatched again with its groups"


def test_policy_that_made_the_active_step_gets_no_other_command() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.leaves("policy-0")
    lines = script.joins("policy-0", incarnation=2, version=1)
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
        script.start_run()
        script.generate_and_score(0, 1)
    if verb == "checkpoint":
        script.trains(1)
        script.publishes(1)
        script.adopts("rollout-0", 1)
        script.generate_and_score(2, 3, version=1)
        script.trains(2)
        script.publishes(2)
    lines = script.fails("policy-0", lease, "the disk is full", fatal=True)
    assert lines[-1].endswith(f"drain: policy-0 could not {verb}: the disk is full")
    assert leave_all(script) == f"failed: policy-0 could not {verb}: the disk is full"


# --- a stop request ------------------------------------------------------------------------------------------------


def test_stop_before_any_replica_joined() -> None:
    assert Script().request_stop() == ["done: enough"]


def test_stop_before_the_policy_joined() -> None:
    script = Script()
    script.joins("rollout-0")
    assert script.request_stop() == ["rollout-0 <- drain: enough"]
    assert script.leaves("rollout-0")[-1] == "done: enough"


def test_stop_before_the_first_step_saves_nothing() -> None:
    script = Script()
    script.start_run()
    assert script.request_stop() == ["(tail )", *drain_lines(script, "enough")]
    assert leave_all(script) == "done: enough"


def test_stop_during_a_step_waits_for_it_and_saves_it() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    assert script.request_stop() == []
    assert script.controller.waiting_for == "the policy to train step 1"
    assert script.trains(1) == [
        "policy-0 <- release train:1:0",
        "(step 1)",
        "(trained 1)",
        "policy-0 <- publish:1:0",
    ]
    assert script.publishes(1)[-2:] == ["policy-0 <- save:1:0", "policy-0 <- checkpoint:1:0"], (
        "the requested publication is complete"
    )
    script.saves_state(1)
    assert report_checkpoint(script, 1) == [
        "policy-0 <- release checkpoint:1:0",
        "(checkpoint 1)",
        *drain_lines(script, "enough"),
    ]
    assert leave_all(script) == "done: enough"
    assert "journal <- RunEnded" not in script.log, "a stopped run can be resumed"


def test_stop_during_a_supervised_step_waits_for_it_too() -> None:
    script = Script(num_supervised_steps=5)
    script.joins("policy-0")
    script.request_stop()
    assert script.trains(1) == [
        "policy-0 <- release train:1:0",
        "(step 1)",
        "policy-0 <- save:1:0",
        "policy-0 <- checkpoint:1:0",
    ]


def test_stop_between_two_steps_dispatches_no_step() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    assert script.request_stop() == ["(tail )", "policy-0 <- save:1:0", "policy-0 <- checkpoint:1:0"]
    assert script.generates("rollout-0", "generate:t2:0", 1) == ["rollout-0 <- release generate:t2:0"]


def test_stopped_run_waits_for_no_policy_that_leaves_before_its_last_checkpoint() -> None:
    """As where all processes of a run receive SIGTERM: the policy writes a state, leaves, and does not return."""
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    script.request_stop()
    assert script.controller.waiting_for == "checkpointing: policy-0, reward-0, rollout-0"
    assert script.leaves("policy-0") == ["(left policy-0)", *drain_lines(script, "enough")]
    assert leave_all(script) == "done: enough"
    assert "journal <- RunEnded" not in script.log, "it can be resumed"


def test_stop_during_an_evaluation_drops_it() -> None:
    script = Script(evaluate_at_start=True)
    script.start_run()
    assert script.request_stop() == ["(tail )", *drain_lines(script, "enough")]


def test_first_reason_to_stop_stands() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.request_stop("first")
    script.request_stop("second")
    script.trains(1)
    script.publishes(1)
    report_checkpoint(script, 1)
    assert script.saves_state(1)[-1] == "rollout-0 <- drain: first"


def run_without_checkpoint(**changes: int) -> Script:
    """Return a run that lacks only its checkpoint."""
    script = Script(num_steps=1, **changes)
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    assert script.publishes(1)[-1] == "policy-0 <- checkpoint:1:0"
    return script


def test_stop_comes_too_late_for_a_run_that_is_complete() -> None:
    script = run_without_checkpoint()
    assert script.request_stop() == []
    report_checkpoint(script, 1)
    assert script.request_stop() == []
    assert leave_all(script) == "done: the run is complete"
    assert script.request_stop() == []


# --- drain and finish ----------------------------------------------------------------------------------------------


def test_lost_checkpoint_command_is_sent_again() -> None:
    script = run_without_checkpoint()
    script.now += 2.0
    assert script.heartbeats("policy-0") == ["policy-0 <- welcome", "policy-0 <- checkpoint:1:0"]


def test_drain_is_repeated_with_each_heartbeat() -> None:
    script = run_without_checkpoint()
    report_checkpoint(script, 1)
    assert script.heartbeats("reward-0") == ["reward-0 <- welcome", "reward-0 <- drain: the run is complete"]


def test_replica_that_joins_during_drain_is_drained() -> None:
    script = run_without_checkpoint()
    report_checkpoint(script, 1)
    assert script.joins("rollout-5") == ["(joined rollout-5)", "rollout-5 <- welcome"]
    assert script.heartbeats("rollout-5")[-1] == "rollout-5 <- drain: the run is complete"


def test_drain_ends_without_replicas_that_stay() -> None:
    script = run_without_checkpoint(drain_s=9)
    report_checkpoint(script, 1)
    script.leaves("policy-0")
    script.leaves("reward-0")
    script.now += 8.9
    assert script.heartbeats("rollout-0", version=1)[-1] == "rollout-0 <- drain: the run is complete"
    assert script.advance_time(0.1) == ["(left rollout-0)", "done: the run is complete"]
    assert script.advance_time(1.0) == []
    assert script.leaves("rollout-0") == []


def test_policy_that_leaves_during_drain_does_not_fail_the_run() -> None:
    script = run_without_checkpoint()
    report_checkpoint(script, 1)
    assert script.leaves("policy-0") == ["(left policy-0)"]
    assert leave_all(script) == "done: the run is complete"


def test_returned_policy_writes_the_last_checkpoint() -> None:
    script = run_without_checkpoint()
    assert script.leaves("policy-0") == ["(left policy-0)"]
    script.joins("policy-0", incarnation=2)
    assert script.fetched(1) == ["policy-0 <- train:1:1 train0 train1"]
    assert script.trains(1, 1, incarnation=2)[-1] == "policy-0 <- checkpoint:1:1"


def test_run_fails_without_a_policy_for_the_last_checkpoint() -> None:
    script = run_without_checkpoint(start_s=20)
    script.leaves("policy-0")
    for _ in range(12):
        script.heartbeats("rollout-0", version=1)
        script.heartbeats("reward-0")
        lines = script.advance_time(2.0)
    assert lines[0].startswith("reward-0 <- drain: the run needs a policy, which is gone, for 20 s")


def test_stop_has_a_deadline() -> None:
    script = Script(stop_s=5.0)
    script.start_run()
    script.generate_and_score(0, 1)
    script.request_stop()
    for name in ALL_REPLICAS:
        script.heartbeats(name, version=0)
    lines = script.advance_time(5.1)
    assert lines[0].endswith("the run did not stop gracefully within 5 s; it waits for the policy to train step 1")


def test_failed_save_is_retried_during_the_run() -> None:
    script = Script(num_steps=3, save_every=1)
    script.start_run()
    script.generate_and_score(0, 1)
    assert script.trains(1)[-1] == "policy-0 <- save:1:0"
    script.publishes(1)
    assert "(failed policy-0)" in script.fails("policy-0", "save:1:0", "the disk is full", fatal=True)
    script.adopts("rollout-0", 1)
    assert script.generate_and_score(2, 3, version=1)[-1].startswith("policy-0 <- train:2:0")
    for name in ALL_REPLICAS:
        script.heartbeats(name, version=1)
    assert script.advance_time(9.0) == []
    for name in ALL_REPLICAS:
        script.heartbeats(name, version=1)
    script.advance_time(6.1)
    assert script.trains(2)[-1] == "policy-0 <- save:2:0"


def test_stop_waits_for_the_state_to_be_saved_until_its_deadline() -> None:
    script = Script(stop_s=20.0)
    script.start_run()
    script.generate_and_score(0, 1)
    script.request_stop()
    script.trains(1)
    script.publishes(1)
    script.fails("policy-0", "save:1:0", "the disk is full", fatal=True)
    report_checkpoint(script, 1)
    for _ in range(2):
        for name in ALL_REPLICAS:
            script.heartbeats(name, version=1)
        lines = script.advance_time(7.6)
    assert lines == ["policy-0 <- save:1:1"]
    saved = wire.CheckpointSaved(lease="save:1:1", step=1, path="/s", state=True)
    assert script.receive("policy-0", saved)[-1] == "rollout-0 <- drain: enough"


def test_journal_keeps_steps_since_the_previous_state() -> None:
    script = Script(num_steps=4, save_every=1)
    script.start_run()
    for step in (1, 2, 3):
        script.generate_and_score(2 * step - 2, 2 * step - 1, version=step - 1)
        script.trains(step)
        script.publishes(step)
        script.adopts("rollout-0", step)
        script.saves_state(step)
    assert [line for line in script.log if line.startswith("journal: prune")] == [
        "journal: prune 1",
        "journal: prune 2",
    ]
    script.joins("policy-0", incarnation=2, version=2)
    assert script.log[-1] == "journal: fetch 3", "if the newest state is damaged, the previous one is used"
    lines = script.joins("policy-0", incarnation=3, version=1)
    assert "policy-0 is at version 1, and the journal keeps only the steps after version 2" in lines[-1]


def test_operator_has_a_state_saved_before_the_next_step() -> None:
    """Also where the recipe saves none."""
    script = Script(num_steps=4, save_every=0, save_rest_s=100.0)
    script.start_run()
    ask = wire.RequestCheckpoint(request="a")
    assert script.receive("operator-0", ask)[-1] == "operator-0 <- yes: the state of version 0 is saved already"
    script.generate_and_score(0, 1, version=0)
    asked = script.receive("operator-0", ask)
    assert asked == ["operator-0 <- yes: the state of version 0 is saved already"], "the step is not made yet"
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    assert "policy-0 <- save:1:0" not in script.log
    lines = script.receive("operator-0", ask)
    assert "policy-0 <- save:1:0" in lines
    assert "operator-0 <- yes: a policy saves the state of version 1, or of the step that it makes now" in lines
    script.saves_state(1)
    assert script.receive("operator-0", ask)[-1] == "operator-0 <- yes: the state of version 1 is saved already"
    script.receive("operator-0", wire.RequestStop(request="b", reason="enough"))
    refused = script.receive("operator-0", ask)[-1]
    assert refused == "operator-0 <- no: the run is ending; it saves its last state by itself"


def test_states_are_saved_at_least_save_rest_s_apart() -> None:
    """The first one at least that long after the first step was dispatched."""
    script = Script(num_steps=4, save_every=1, save_rest_s=5.0)
    script.start_run()
    for step in (1, 2):
        script.generate_and_score(2 * step - 2, 2 * step - 1, version=step - 1)
        if step == 1:
            script.now += 5.0
        script.trains(step)
        script.publishes(step)
        script.adopts("rollout-0", step)
        if step == 1:
            script.saves_state(step)
            script.now += 3.0
    assert "policy-0 <- save:2:0" not in script.log
    script.now += 2.0
    script.generate_and_score(4, 5, version=2)
    saved, dispatched = (
        script.log.index(line) for line in ("policy-0 <- save:2:0", "policy-0 <- train:3:0 train4 train5")
    )
    assert saved < dispatched, (
        "the policy copies the state before the next step changes it, and writes the copy during the step"
    )
