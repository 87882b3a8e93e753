"""Rare combinations of events, each of which once exposed a bug."""

from __future__ import annotations

from typing import Any

import msgspec
from transcript import SMALL, Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.events import Send, Ticked, Write
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, MemberLeft
from starling.sim.replicas.weights import encoded_layout, encoded_offer


def join(script: Script, name: str, *, host: str = "h", incarnation: int = 1, version: int = -1) -> list[str]:
    """Let `name` join, able to serve weights and to share steps."""
    role: Any = name.rpartition("-")[0]
    hello = wire.Hello(
        role=role,
        host=host,
        pid=1,
        num_slots=2,
        version=version,
        has_layout=True,
        serves=True,
        peer="h:1" if role == "policy" else "",
    )
    return script.receive(name, hello, encoded_layout(name), incarnation=incarnation)


def publish(script: Script, name: str, version: int, attempt: int) -> list[str]:
    """Let `name` publish `version` under its lease number `attempt`."""
    published = wire.WeightsPublished(lease=f"publish:{version}:{attempt}", version=version, publish_s=0.0)
    return script.receive(name, published, encoded_offer(version))


def messages_to(name: str, lines: list[str]) -> list[str]:
    """Return the lines of messages to `name`, without welcomes and releases."""
    messages = [line.removeprefix(f"{name} <- ") for line in lines if line.startswith(f"{name} <- ")]
    return [line for line in messages if line != "welcome" and not line.startswith("release")]


def test_nothing_happens_after_the_end() -> None:
    script = Script()
    script.start_run()
    script.request_stop()
    script.disconnect("policy-0")
    script.advance_time(SMALL.drain_s + 1)
    assert script.log[-1] == "done: enough"
    num = len(script.journal)
    assert script.advance_time(60) == []
    assert script.joins("rollout-5") == []
    assert len(script.journal) == num


def test_policy_pulls_optimizer_state_only_from_a_policy() -> None:
    script = Script(num_policies=1)
    join(script, "rollout-0", host="near")
    join(script, "policy-0", host="far", version=0)
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    lines = join(script, "rollout-1", host="near")
    assert messages_to("rollout-0", lines) == ["publish:0:1"]
    publish(script, "rollout-0", 0, 1)
    script.adopts("rollout-1", 0, 1)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1, 0)
    join(script, "rollout-2", host="near")
    publish(script, "rollout-0", 1, 1)
    assert script.state.weights.offers["rollout-0"].version == 1
    join(script, "policy-1", host="near", version=0)
    [pull] = [send.message for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    assert pull.peer == "h:1"
    assert pull.source == "policy-0"


def test_restarted_replica_has_no_failures() -> None:
    script = Script()
    join(script, "policy-0", version=0)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    join(script, "policy-1", version=0)
    script.fails("policy-1", f"adopt:1:{script.attempt_of('policy-1', 'adopt:1')}")
    script.disconnect("policy-1")
    for _ in range(8):
        script.advance_time(SMALL.lease_s / 2)
        for name in ("policy-0", "rollout-0", "reward-0"):
            script.heartbeats(name, version=script.state.replicas.membership.members[name].version)
    join(script, "policy-1", incarnation=2, version=0)
    lease = f"adopt:1:{script.attempt_of('policy-1', 'adopt:1')}"
    failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="no luck")
    script.receive("policy-1", failed, incarnation=2)
    assert "policy-1" in script.state.replicas.membership.members


def test_rollout_that_hangs_in_a_publication_does_not_delay_publications() -> None:
    script = Script(max_staleness=1)
    join(script, "rollout-0")
    script.joins("policy-0")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    lines = join(script, "rollout-1")
    assert messages_to("rollout-0", lines) == [], "policy-0 offers it on the same host"
    script.state.weights.forget("policy-0", None)
    lines = join(script, "rollout-2")
    assert messages_to("rollout-0", lines) == ["publish:0:1"]
    assert "publish:1:0" in messages_to("policy-0", script.trains(1))


def test_supervised_run_refuses_an_evaluation() -> None:
    script = Script(num_supervised_steps=1, num_steps=0)
    script.joins("policy-0")
    [reply] = script.receive("operator-0", wire.RequestEvaluation(request="a"))
    assert reply.startswith("operator-0 <- no: ")
    assert "policy-0 <- checkpoint:1:0" in script.trains(1)


def restored(script: Script, incarnation: int) -> tuple[Controller, list[Write]]:
    """Return the next controller of this run, and an empty list for its records."""
    journaled = [JournalEntry(write.record, write.payload) for write in script.journal]
    streams = Stream("train"), Stream("sft")
    return Controller(script.plan, *streams, script.held_out, journal=journaled, incarnation=incarnation), []


def test_missing_replica_is_awaited_after_one_restart_only() -> None:
    script = Script()
    script.start_run("rollout-0", "rollout-1")
    controller, written = restored(script, 2)
    for now in range(60):
        written += [command for command in controller.step(Ticked(float(now))) if isinstance(command, Write)]
    left = {write.record.name for write in written if isinstance(write.record, MemberLeft)}
    assert left == {"policy-0", "reward-0", "rollout-0", "rollout-1"}
    assert not controller.state.replicas.membership.awaited
    script.journal += written
    assert not restored(script, 3)[0].state.replicas.membership.awaited


def test_fully_generated_run_needs_no_rollouts() -> None:
    script = Script(num_steps=1, start_s=20.0)
    script.start_run()
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.disconnect("rollout-0")
    for _ in range(40):
        script.advance_time(1.0)
        script.heartbeats("policy-0", "train:1:0")
    script.trains(1)
    script.publishes(1)
    for _ in range(40):
        script.advance_time(1.0)
        script.heartbeats("policy-0", "checkpoint:1:0", version=1)
    assert not script.state.lifecycle.failure


def test_stopping_run_needs_no_rollouts() -> None:
    script = Script(start_s=20.0)
    script.start_run()
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.request_stop()
    script.disconnect("rollout-0")
    for _ in range(40):
        script.advance_time(1.0)
        script.heartbeats("policy-0", "train:1:0")
    assert not script.state.lifecycle.failure


def test_shared_step_that_keeps_failing_fails_the_run() -> None:
    script = two_policies_in_a_step()
    for _ in range(100):
        if script.state.lifecycle.failure:
            break
        for name in ("policy-0", "policy-1"):
            script.fails(name, f"train:1:{script.attempt_of(name, 'train:1')}", f"{name} lost the others")
    assert script.state.lifecycle.failure == "policy-0 could not train: policy-0 lost the others"


def test_shared_step_that_no_policy_can_train_fails_the_run_at_once() -> None:
    script = two_policies_in_a_step()
    script.fails("policy-1", "train:1:1", "out of memory", fatal=True)
    assert script.state.lifecycle.failure == "policy-1 could not train: out of memory"


def test_policy_that_neither_makes_nor_fails_a_step_with_others_is_evicted() -> None:
    """Of those that lost it, none is: their answers come first."""
    script = two_policies_in_a_step()
    script.fails("policy-0", "train:1:0", "policy-1 does not answer")
    waited = 0.0
    while script.state.replicas.membership.num("policy") == 2:
        script.advance_time(1.0)
        for name in sorted(script.state.replicas.membership.members):
            script.heartbeats(name)
        waited += 1.0
        assert waited <= 2 * script.plan.lease_s
    assert waited >= script.plan.lease_s
    assert sorted(script.state.replicas.membership.members) == ["policy-0", "reward-0", "rollout-0"]
    [again] = [lease.send.message for lease in script.state.replicas.leases.all_of("policy-0") if lease.kind == "train"]
    assert (again.step, again.peers, len(again.groups)) == (1, (), 2)


def test_process_groups_last_as_long_as_steps_succeed_with_the_same_policies() -> None:
    script = two_policies_in_a_step(num_steps=4)
    names = [_group(script)]
    for step in (1, 2):
        for name in ("policy-0", "policy-1"):
            script.trains(step, script.attempt_of(name, f"train:{step}"), name=name)
        script.publishes(step)
        script.adopts("rollout-0", step)
        script.generate_and_score(2 * step, 2 * step + 1, version=step)
        names.append(_group(script))
    for name in ("policy-0", "policy-1"):
        script.fails(name, f"train:3:{script.attempt_of(name, 'train:3')}", "lost")
    names.append(_group(script))
    assert names[0] == names[1] == names[2]
    assert names[3] != names[0]


def test_policy_with_other_settings_is_refused() -> None:
    script = Script()
    hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, serves=True, peer="h:1")
    script.receive("policy-0", hello, encoded_layout("policy-0"))
    other = msgspec.structs.replace(hello, settings_digest="f" * 32)
    assert script.receive("policy-1", other, encoded_layout("policy-1")) == [
        "(refused policy-1)",
        "policy-1 <- refused: policy-1 has other settings of [policy], [model] or run.seed, another config.json of its "
        "model or other versions of packages than policy-0, whose steps it would share; start it with the same recipe, "
        "model folder and installation",
    ]
    long = msgspec.structs.replace(hello, peer="h" * 300)
    assert "may have 261" in script.receive("policy-1", long, encoded_layout("policy-1"))[-1]


def two_policies_in_a_step(**changes: Any) -> Script:
    """Return a run whose two policies make step 1."""
    script = Script(**changes)
    join(script, "policy-0", version=0)
    join(script, "policy-1", version=0)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    return script


def _group(script: Script) -> str:
    [message] = {
        lease.send.message.group
        for name in ("policy-0", "policy-1")
        for lease in script.state.replicas.leases.all_of(name)
        if lease.kind == "train" and lease.send is not None and isinstance(lease.send.message, wire.TrainStep)
    }
    return message


def test_nothing_new_is_evaluated_while_the_last_checkpoint_is_written() -> None:
    script = Script(num_steps=1)
    script.start_run()
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    assert str(script.state.lifecycle.stage) == "checkpointing"
    script.receive("operator-0", wire.ChangeSetting(request="a", key="evaluation.every", value=1))
    assert script.state.evaluations.current is None


def test_version_is_journaled_once_per_root() -> None:
    script = Script()
    join(script, "policy-0", version=0)
    join(script, "rollout-0", host="a")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    join(script, "rollout-1", host="a")
    publish(script, "rollout-0", 0, 1)
    assert sum(line == "journal <- VersionPublished" for line in script.log) == 1


def test_step_waits_for_the_snapshot_requested_before_the_crash() -> None:
    """The policy has the command to publish version 1, and not yet that to train step 2."""
    script = Script(max_staleness=1)
    script.start_run(slots=4)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.complete_groups("generate:t2:0", "generate:t3:0")
    script.trains(1)
    asked = [send.message for send in script.sent if isinstance(send.message, wire.PublishWeights | wire.TrainStep)]
    assert [type(message) for message in asked] == [wire.PublishWeights, wire.TrainStep]
    controller, _ = restored(script, 2)
    again = Script(script.plan)
    again.controller, again.state, again.aliases = controller, controller.state, script.aliases
    for name in ("policy-0", "reward-0", "rollout-0"):
        again.joins(name, version=1)
        held = (wire.HeldLease(lease=asked[0].lease, phase="queued"),) if name == "policy-0" else ()
        again.receive(name, wire.Heartbeat(leases=held, version=1 if name == "policy-0" else -1))
    steps = [c.message for c in again.commands if isinstance(c, Send) and isinstance(c.message, wire.TrainStep)]
    assert [step.published for step in steps] == [1]


def test_setting_has_its_last_value() -> None:
    script = Script()
    for value in range(50):
        change = wire.ChangeSetting(request=str(value), key="rl.max_tries", value=value)
        script.receive("operator-0", msgspec.structs.replace(change))
    assert script.state.training.changes.now("rl.max_tries", 0) == 49


def resumed(before: Script) -> Script:
    """Return the script of the next controller of this run."""
    after = Script(before.plan)
    after.journal, after.aliases = list(before.journal), before.aliases
    after.controller, _ = restored(before, before.state.incarnation + 1)
    after.state = after.controller.state
    return after


def test_journaled_evaluation_request_survives_crashes() -> None:
    script = Script()
    script.joins("policy-0")
    assert script.receive("operator-0", wire.RequestEvaluation(request="a", num_completions=3))[-1].startswith("oper")
    script = resumed(script)
    assert [expected.num_completions for expected in script.state.evaluations.requested] == [3]
    assert script.receive("operator-0", wire.RequestEvaluation(request="a", num_completions=3))
    assert len(script.state.evaluations.requested) == 1
    script.advance_time(0.0)
    script.advance_time(10.0)
    script.start_run()
    assert script.state.evaluations.current is not None
    script = resumed(script)
    assert not script.state.evaluations.requested
    assert script.state.evaluations.granted == {"a"}


def test_journaled_stop_survives_crashes() -> None:
    script = Script()
    script.start_run()
    lines = script.receive("operator-0", wire.RequestStop(request="a", reason="maintenance"))
    assert any("the run is stopping, and waits for " in line for line in lines), lines
    script.receive("operator-0", wire.RequestStop(request="b", reason="another"))
    script = resumed(script)
    script.advance_time(0.0)
    script.advance_time(10.0)
    script.advance_time(SMALL.drain_s + 1)
    assert script.log[-1] == "done: maintenance"
    assert not resumed(script).state.lifecycle.stopping, "from here on the run can be resumed"


def test_journaled_stop_has_a_deadline_after_a_crash() -> None:
    script = Script(stop_s=30.0)
    script.start_run()
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.receive("operator-0", wire.RequestStop(request="a", reason="maintenance"))
    script = resumed(script)
    script.joins("policy-0")
    for _ in range(40):
        script.advance_time(1.0)
        script.heartbeats("policy-0")
    assert script.state.lifecycle.failure.startswith("the run did not stop gracefully within 30 s")


def test_stop_by_signal_is_not_journaled() -> None:
    script = Script()
    script.start_run()
    script.request_stop()
    assert not resumed(script).state.lifecycle.stopping


def test_replica_that_returns_late_must_report_its_leases_first() -> None:
    script = Script()
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    script = resumed(script)
    script.advance_time(0.0)
    script.advance_time(10.0)
    assert not messages_to("reward-0", script.joins("reward-0"))
    assert not messages_to("reward-0", script.heartbeats("reward-0", "score:t0:0"))
    assert script.state.replicas.leases.num("reward-0", "score") == 1


def test_holders_forget_replaced_versions() -> None:
    script = Script()
    script.start_run()
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    assert script.state.weights.holders == {(1, "h"): {"rollout-0": None}}
    script.disconnect("rollout-0")
    assert not script.state.weights.holders


def test_torn_rollout_is_not_pinned_before_it_adopts_again() -> None:
    script = Script(evaluate_at_start=True)
    script.start_run(slots=8)
    assert script.state.replicas.leases.num("rollout-0", "generate") > 0
    script.heartbeats("rollout-0", version=-1)
    assert not script.state.replicas.leases.num("rollout-0", "generate")
    script.advance_time(0.1)
    assert not script.state.replicas.leases.num("rollout-0", "generate")


def test_rollout_that_hangs_in_a_publication_does_not_delay_the_end() -> None:
    script = Script()
    join(script, "rollout-0", host="a")
    script.joins("policy-0")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    join(script, "rollout-1", host="a")
    assert script.state.replicas.leases.num("rollout-0", "publish") == 1
    script.request_stop()
    assert str(script.state.lifecycle.stage) == "draining"


def test_moved_evaluation_keeps_its_deadline() -> None:
    script = Script(evaluate_at_start=True, evaluation_s=100.0)
    script.start_run()
    before = script.state.evaluations.current
    assert before is not None
    script.now = 40.0
    for name in ("policy-0", "rollout-0", "reward-0"):
        script.heartbeats(
            name, *(script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of(name)), version=0
        )
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.disconnect("rollout-0")
    script.trains(1)
    script.publishes(1)
    script.joins("rollout-1")
    script.adopts("rollout-1", 1)
    after = script.state.evaluations.current
    assert after is not None
    assert (after.version, after.deadline) == (1, before.deadline)


def test_only_rollout_gives_all_its_slots_to_an_evaluation_when_another_comes() -> None:
    script = Script(num_held_out=4, evaluate_at_start=True, num_rollouts=2)
    script.start_run(slots=4)
    assert script.state.replicas.leases.num("rollout-0", "generate") == 2
    assert [line.split()[2] for line in script.joins("rollout-1") if "generate" in line] == [
        "generate:e2:0",
        "generate:e3:0",
    ]
