"""Membership lease of a replica, and commands that arrive after it has expired."""

from __future__ import annotations

from starling.common.leases.membership import MAX_UNANSWERED, MembershipLease
from starling.common.leases.table import LeaseTable
from starling.common.wire import messages as wire

SHARED = wire.Welcome(heartbeat_s=1.0, lease_s=10.0, shares_devices=True)
WAKE, GROUP = "wake:rollout-0:1.1", "generate:t0:1.2"


def welcomed(said_at: float, heard_at: float) -> tuple[MembershipLease, LeaseTable]:
    membership, leases = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    membership.sent(1, said_at)
    membership.welcomed("rollout-0/7/1", SHARED, leases, heard_at)
    return membership, leases


def test_lease_runs_from_the_send_and_not_from_the_answer() -> None:
    membership, _ = welcomed(said_at=5.0, heard_at=9.0)
    assert membership.is_valid(15.0)
    assert not membership.is_valid(15.1)


def test_replica_must_exit_before_others_get_its_devices() -> None:
    membership, _ = welcomed(said_at=0.0, heard_at=0.0)
    assert not membership.must_exit("rollout", 17.5)
    assert membership.must_exit("rollout", 17.6), "two leases, minus the time a process takes to end"
    assert not membership.must_exit("policy", 297.5)
    assert membership.must_exit("policy", 297.6), "a step may be in progress"


def test_unshared_devices_are_kept_forever() -> None:
    membership, leases = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    assert membership.is_valid(0.0), "no message was received yet"
    membership.sent(1, 0.0)
    membership.welcomed("rollout-0/7/1", wire.Welcome(heartbeat_s=1.0, lease_s=10.0), leases, 0.0)
    assert membership.is_valid(1e9)
    assert not membership.must_exit("rollout", 1e9)


def test_only_answers_to_own_messages_extend_the_lease() -> None:
    membership, leases = welcomed(said_at=0.0, heard_at=0.0)
    membership.sent(2, 8.0)
    for cause in ("", "tick", "rollout-0/6/2", "rollout-1/7/2", "rollout-0/7/3", "rollout-0/7/x"):
        membership.welcomed(cause, SHARED, leases, 8.0)
        assert not membership.is_valid(10.1), cause
    membership.welcomed("rollout-0/7/2", SHARED, leases, 8.0)
    membership.welcomed("rollout-0/7/1", SHARED, leases, 8.0)  # overtaken by a later answer
    assert membership.is_valid(18.0)


def test_late_wake_command_is_forbidden() -> None:
    membership, _ = welcomed(said_at=0.0, heard_at=0.0)
    assert not membership.forbids(WAKE, 9.0)
    assert membership.forbids(WAKE, 11.0), "other replicas may use the devices by now"
    assert not membership.forbids(GROUP, 11.0)


def test_wake_command_without_a_welcome_is_forbidden() -> None:
    membership = MembershipLease("rollout-0/1/")
    membership.sent(1, 0.0)
    assert membership.forbids(WAKE, 1.0), "without a lease it would keep the devices, however long it hears nothing"
    assert not membership.forbids(GROUP, 1.0)
    membership.welcomed("rollout-0/1/1", SHARED, LeaseTable(resend_s=2.0), 1.0)
    assert not membership.forbids(WAKE, 1.0)


def test_rejoining_drops_a_pending_wake_command() -> None:
    for answered_at, left in ((9.0, {WAKE, GROUP}), (11.0, {GROUP})):
        membership, leases = welcomed(said_at=0.0, heard_at=0.0)
        membership.sent(2, 8.0)
        leases.grant(WAKE)
        leases.grant(GROUP)
        membership.welcomed("rollout-0/7/2", SHARED, leases, answered_at)
        assert {held.lease for held in leases.held()} == left


def test_unanswered_messages_are_bounded() -> None:
    membership, leases = welcomed(said_at=0.0, heard_at=0.0)
    for seq in range(2, MAX_UNANSWERED + 3):
        membership.sent(seq, 5.0)
    membership.welcomed("rollout-0/7/2", SHARED, leases, 5.0)
    assert not membership.is_valid(10.1)
    membership.welcomed("rollout-0/7/3", SHARED, leases, 5.0)
    assert membership.is_valid(15.0)


def test_late_first_welcome_does_not_end_the_replica() -> None:
    """The controller loads data for a minute, and then answers the queued hellos one by one."""
    membership, leases = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    for seq in range(1, 121):
        membership.sent(seq, seq / 2)
    for seq in range(1, 121):
        membership.welcomed(f"rollout-0/7/{seq}", SHARED, leases, 60.0)
        assert not membership.must_exit("rollout", 60.1), seq
    assert membership.is_valid(70.0)
    assert membership.must_exit("rollout", 77.6)


def test_rejoining_drops_an_answered_wake_command() -> None:
    membership, leases = welcomed(said_at=0.0, heard_at=0.0)
    leases.grant(WAKE)
    leases.work(WAKE)
    leases.answer(WAKE, wire.Woken(lease=WAKE), (), 1.0)
    membership.sent(2, 11.0)
    membership.welcomed("rollout-0/7/2", SHARED, leases, 11.1)
    assert not leases.held()
