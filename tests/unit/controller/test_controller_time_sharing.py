"""Shared devices: which replicas are sent to sleep and woken, and when."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.explain import explain
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.time_sharing import TimeSharing


def answer_command(script: Script, name: str) -> list[str]:
    """Let `name` carry out its last command: sleep or wake."""
    [lease] = [lease for lease in script.state.replicas.leases.all_of(name) if lease.kind in ("sleep", "wake")]
    answer = wire.Slept if lease.kind == "sleep" else wire.Woken
    return script.receive(name, answer(lease=lease.id))


def generating(**changes: int) -> Script:
    """Return a run in which the rollout generates t0 and t1, and the policy sleeps."""
    script = Script(colocate=True, **changes)
    script.joins("policy-0")
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    answer_command(script, "rollout-0")
    answer_command(script, "policy-0")
    script.publishes(0)
    answer_command(script, "policy-0")
    answer_command(script, "rollout-0")
    script.adopts("rollout-0", 0)
    return script


def commands_sent(script: Script) -> list[str]:
    return [
        f"{send.peer} {'sleeps' if isinstance(send.message, wire.Sleep) else 'wakes'}"
        for send in script.sent
        if isinstance(send.message, wire.Sleep | wire.Wake)
    ]


def test_one_step_of_a_colocated_run() -> None:
    script = Script(colocate=True)
    script.joins("policy-0")
    assert commands_sent(script) == ["policy-0 wakes"], "there is no other replica"
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    assert commands_sent(script) == ["rollout-0 sleeps"]
    assert explain(script.state) == "rollout-0 to sleep: the policies are due"
    answer_command(script, "rollout-0")
    assert "policy-0 <- publish:0:0" in answer_command(script, "policy-0")
    script.publishes(0)
    assert commands_sent(script) == ["policy-0 sleeps"], "its offer is in host memory"
    assert explain(script.state) == "policy-0 to sleep: the rollouts are due"
    answer_command(script, "policy-0")
    assert commands_sent(script) == ["rollout-0 wakes"]
    assert "rollout-0 <- adopt:0:0" in answer_command(script, "rollout-0")
    script.adopts("rollout-0", 0)
    script.generate_and_score(0, 1)
    assert commands_sent(script) == ["rollout-0 sleeps"]
    answer_command(script, "rollout-0")
    assert commands_sent(script) == ["policy-0 wakes"]
    assert "policy-0 <- train:1:0 train0 train1" in answer_command(script, "policy-0")


def member_of(name: str) -> Member:
    role = name.rpartition("-")[0]
    return Member(name=name, role=role, incarnation=1, num_slots=1, heard_at=0.0, version=0)  # type: ignore[arg-type]


def test_no_replica_wakes_while_a_lost_one_may_be_awake() -> None:
    sharing, rollout = TimeSharing(shared=True, lease_s=10.0), member_of("rollout-0")
    sharing.note_answer(rollout, asleep=False)
    sharing.remove(rollout, 5.0, ended=False)
    assert sharing.obstacle([], 24.9) == "rollout-0"
    assert sharing.obstacle([], 25.0) == "", "two leases after it was declared lost"


def test_lost_policy_keeps_devices_for_many_leases() -> None:
    sharing, policy = TimeSharing(shared=True, lease_s=10.0, active="rollout"), member_of("policy-0")
    sharing.note_answer(policy, asleep=False)
    sharing.remove(policy, 5.0, ended=False)
    assert sharing.obstacle([], 304.9) == "policy-0"
    assert sharing.obstacle([], 305.0) == ""


def test_welcome_says_whether_devices_are_shared() -> None:
    script = Script(colocate=True)
    for name, shares in (("policy-0", True), ("reward-0", False), ("rollout-0", True)):
        script.joins(name)
        [welcome] = [send.message for send in script.sent if isinstance(send.message, wire.Welcome)]
        assert welcome.shares_devices == shares


def test_ended_asleep_or_returned_replica_does_not_prevent_waking() -> None:
    for slept, gone, returns in ((True, False, False), (False, True, False), (False, False, True)):
        sharing, rollout = TimeSharing(shared=True, lease_s=10.0), member_of("rollout-0")
        sharing.note_answer(rollout, asleep=slept)
        sharing.remove(rollout, 5.0, ended=gone)
        if returns:
            sharing.reset(rollout)
        assert sharing.obstacle([], 6.0) == ""


def test_restarted_controller_wakes_no_replica_at_once() -> None:
    sharing = TimeSharing(shared=True, lease_s=10.0)
    sharing.restart(0.0)
    assert sharing.obstacle([], 19.0) == "replicas that were lost before the controller's restart"
    assert sharing.obstacle([member_of("rollout-0")], 20.0) == "rollout-0", "its device state is unknown"
    sharing.active = "rollout"
    assert sharing.obstacle([], 299.0) == "replicas that were lost before the controller's restart", (
        "a policy during a step"
    )
    assert sharing.obstacle([member_of("policy-0")], 20.0) == "policy-0", "the lease of the previous incarnation"


def test_restarted_controller_waits_for_every_policy_of_the_run() -> None:
    sharing = TimeSharing(shared=True, lease_s=10.0, num_policies=2, active="rollout")
    sharing.restart(0.0)
    joined = [member_of("policy-0"), member_of("policy-1")]
    for member in joined:
        sharing.note_answer(member, asleep=True)
    assert sharing.obstacle(joined[:1], 299.0) == "replicas that were lost before the controller's restart", (
        "policy-1, which may be in a step that cannot be interrupted"
    )
    assert sharing.obstacle(joined, 20.0) == ""
    assert sharing.obstacle(joined[:1], 300.0) == ""


def test_rollout_that_gave_groups_back_to_sleep_gets_work_when_it_wakes() -> None:
    script = generating(max_staleness=1, prompts_per_step=1)
    script.generate_and_score(0)
    assert commands_sent(script) == ["rollout-0 sleeps"]
    script.interrupts("rollout-0", "generate:t1:0", 2, 2)
    answer_command(script, "rollout-0")
    answer_command(script, "policy-0")
    script.trains(1)
    script.publishes(1)
    answer_command(script, "policy-0")
    lines = answer_command(script, "rollout-0")
    assert any("generate:t1:1" in line for line in lines), lines


def test_failed_sleep_is_retried_after_a_while() -> None:
    script = generating()
    script.generate_and_score(0, 1)
    script.fails("rollout-0", "sleep:rollout-0:1", "it adopts a version")
    assert commands_sent(script) == [], "an immediate retry could loop forever"
    script.advance_time(0.9)
    assert commands_sent(script) == []
    script.advance_time(0.1)
    assert commands_sent(script) == ["rollout-0 sleeps"]


def wait_awake(script: Script, how: str, seconds: int) -> None:
    """Let time pass in which `rollout-1` does not sleep, and everything else answers."""
    incarnation = 1
    for second in range(seconds):
        for lease in script.state.replicas.leases.all_of("rollout-1"):
            if lease.kind == "sleep" and how == "fails":
                script.fails("rollout-1", lease.id, "it cannot")
        if how in ("joins again", "leaves and joins") and second % 40 == 39:
            if how == "leaves and joins":
                script.disconnect("rollout-1")
            incarnation = second
            script.joins("rollout-1", incarnation=incarnation)
        for name, member in list(script.state.replicas.membership.members.items()):
            held = [lease.id for lease in script.state.replicas.leases.all_of(name)]
            script.heartbeats(name, *held, version=member.version, incarnation=member.incarnation)
        script.advance_time(1.0)


def waiting_for_one_of_two() -> Script:
    """Return a run whose groups are complete, with rollout-0 asleep, and rollout-1 told to sleep."""
    script = generating()
    script.joins("rollout-1")
    answer_command(script, "rollout-1")
    script.adopts("rollout-1", 0, 1)
    script.generate_and_score(0, 1)
    answer_command(script, "rollout-0")
    return script


@pytest.mark.parametrize("how", ["fails", "does not answer", "joins again", "leaves and joins"])
def test_rollout_that_never_sleeps_is_evicted_and_counted(how: str) -> None:
    """Each failure, and each incarnation, would begin a new time limit: the run would stand still for ever."""
    script = waiting_for_one_of_two()
    assert explain(script.state) == "rollout-1 to sleep: the policies are due"
    limit_s = int(script.plan.timeouts.of("sleep"))
    wait_awake(script, how, limit_s - 5)
    assert not script.state.replicas.membership.num_invalid["rollout-1"]
    wait_awake(script, how, 10)
    assert script.state.replicas.membership.num_invalid["rollout-1"] == 1
    assert "rollout-1" not in script.state.replicas.membership.members
    wait_awake(script, "is gone", int(2 * script.plan.lease_s))
    answer_command(script, "policy-0")
    assert script.state.replicas.leases.of("policy-0", "train")


def test_seconds_of_a_rollout_that_sleeps_in_the_end_are_not_counted() -> None:
    script = waiting_for_one_of_two()
    wait_awake(script, "does not answer", 200)
    answer_command(script, "rollout-1")
    assert not script.state.replicas.membership.awake_s
    wait_awake(script, "does not answer", 200)
    assert not script.state.replicas.membership.num_invalid


ASLEEP = "this policy is asleep: wake it first"


@pytest.mark.parametrize("lost", [False, True])
def test_step_that_finds_the_policy_asleep_is_dispatched_again(lost: bool) -> None:
    """The command was in flight when the connection closed, whether or not the policy was declared lost."""
    script = generating()
    script.generate_and_score(0, 1)
    answer_command(script, "rollout-0")
    answer_command(script, "policy-0")
    assert script.state.replicas.leases.of("policy-0", "train")
    if lost:
        script.advance_time(6.0)
        script.heartbeats("rollout-0", version=0)
        script.heartbeats("reward-0")
        script.advance_time(6.0)
        assert not script.state.replicas.membership.of("policy")
    script.joins("policy-0")
    script.fails("policy-0", "train:1:0", ASLEEP, fatal=True)
    assert script.state.lifecycle.stage is RunStage.RUNNING
    script.heartbeats("policy-0", version=0)
    lines = answer_command(script, "policy-0")
    assert any("train:1:1 train0 train1" in line for line in lines), lines
    script.fails("policy-0", "train:1:1", "out of memory")
    assert script.state.lifecycle.stage is not RunStage.RUNNING, "an awake policy must not report that it sleeps"


@pytest.mark.parametrize("how", ["at each deadline", "fails", "joins again"])
def test_rollout_that_never_adopts_while_policies_wait_is_evicted_and_counted(how: str) -> None:
    """It sleeps when it is told to, wakes, and has its next command to adopt until the deadline: at each step."""
    script = generating(num_steps=40)
    incarnation, begun = 0, script.now
    deadline_s = script.plan.timeouts.of("adopt")
    membership, leases = script.state.replicas.membership, script.state.replicas.leases
    while membership.num_invalid["rollout-1"] < 3 and script.now < begun + 20 * deadline_s:
        if "rollout-1" not in membership.members:
            incarnation += 1
            script.joins("rollout-1", incarnation=incarnation, version=-1)
        for name, member in list(membership.members.items()):
            held = leases.all_of(name)
            script.heartbeats(name, *[one.id for one in held], version=member.version, incarnation=member.incarnation)
            for lease in held:
                if lease.kind in ("sleep", "wake"):
                    answer = wire.Slept if lease.kind == "sleep" else wire.Woken
                    script.receive(name, answer(lease=lease.id), incarnation=member.incarnation)
                elif name == "rollout-1":
                    if lease.kind == "adopt" and how != "at each deadline" and lease.deadline - script.now < 5:
                        if how == "fails":
                            failed = wire.LeaseFailed(lease=lease.id, status=wire.Status.INFRA_LOST, reason="no")
                            script.receive(name, failed, incarnation=member.incarnation)
                        else:
                            incarnation += 1
                            script.joins("rollout-1", incarnation=incarnation, version=-1)
                elif lease.kind == "adopt":
                    script.adopts(name, script.state.weights.version, int(script.aliases.short(lease.id).split(":")[2]))
                elif lease.kind == "generate":
                    script.generates(name, lease.id, member.version)
                elif lease.kind == "score":
                    script.scores(lease.id)
                elif lease.kind == "train":
                    script.trains(script.state.version + 1, int(script.aliases.short(lease.id).split(":")[2]))
                elif lease.kind == "publish":
                    script.publishes(script.state.version, script.aliases.short(lease.id))
        script.advance_time(1.0)
    assert membership.num_invalid["rollout-1"] == 3
    assert "rollout-0" in membership.members
    assert not membership.num_invalid["rollout-0"]


@pytest.mark.parametrize("how", ["does not answer", "fails", "joins again", "adopts"])
def test_stop_does_not_fail_for_a_rollout_that_does_not_sleep(how: str) -> None:
    """The policy has to wake to save its state, and a graceful stop has less time than a sleep may take."""
    script = waiting_for_one_of_two()
    answer_command(script, "rollout-1")
    answer_command(script, "policy-0")
    script.trains(1)
    script.publishes(1)
    for name in ("policy-0", "rollout-0", "rollout-1"):
        answer_command(script, name)
    script.adopts("rollout-0", 1)
    if how != "adopts":
        script.adopts("rollout-1", 1, 1)
    begun = script.now
    script.request_stop()
    answer_command(script, "rollout-0")
    incarnation = 1
    while not script.state.replicas.leases.of("policy-0", "wake") and script.now < begun + 0.75 * script.plan.stop_s:
        if how == "joins again" and "rollout-1" not in script.state.replicas.membership.members:
            incarnation += 1
            script.joins("rollout-1", incarnation=incarnation)
        wait_awake(script, how, 1)
    assert "policy-0 <- save:1:0" in answer_command(script, "policy-0")
