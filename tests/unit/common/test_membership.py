"""How long a replica takes itself for a member, and what it makes of orders that come late."""

from __future__ import annotations

from starling.common.leases import LeaseTable
from starling.common.membership import MAX_UNANSWERED, MembershipLease
from starling.common.wire import messages as wire

SHARED = wire.Welcome(heartbeat_s=1.0, lease_s=10.0, shares_devices=True)
WAKE, GROUP = "wake:rollout-0:1.1", "generate:t0:1.2"


def welcomed(said_at: float, heard_at: float) -> tuple[MembershipLease, LeaseTable]:
    standing, book = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    standing.says(1, said_at)
    standing.answered("rollout-0/7/1", SHARED, book, heard_at)
    return standing, book


def test_it_holds_for_a_lease_from_what_was_said_and_not_from_the_answer() -> None:
    standing, _ = welcomed(said_at=5.0, heard_at=9.0)
    assert standing.holds(15.0)
    assert not standing.holds(15.1)


def test_it_is_over_before_others_may_have_the_devices() -> None:
    standing, _ = welcomed(said_at=0.0, heard_at=0.0)
    assert not standing.is_over("rollout", 17.5)
    assert standing.is_over("rollout", 17.6), "two leases, less what a process takes to end"
    assert not standing.is_over("policy", 297.5)
    assert standing.is_over("policy", 297.6), "a step may be under way"


def test_who_has_devices_of_its_own_has_them_for_good() -> None:
    standing, book = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    assert standing.holds(0.0), "nobody has said anything yet"
    standing.says(1, 0.0)
    standing.answered("rollout-0/7/1", wire.Welcome(heartbeat_s=1.0, lease_s=10.0), book, 0.0)
    assert standing.holds(1e9)
    assert not standing.is_over("rollout", 1e9)


def test_only_an_answer_to_what_it_said_itself_counts() -> None:
    standing, book = welcomed(said_at=0.0, heard_at=0.0)
    standing.says(2, 8.0)
    for cause in ("", "tick", "rollout-0/6/2", "rollout-1/7/2", "rollout-0/7/3", "rollout-0/7/x"):
        standing.answered(cause, SHARED, book, 8.0)
        assert not standing.holds(10.1), cause
    standing.answered("rollout-0/7/2", SHARED, book, 8.0)
    standing.answered("rollout-0/7/1", SHARED, book, 8.0)  # overtaken on its way
    assert standing.holds(18.0)


def test_an_order_to_wake_that_comes_late_is_not_heeded() -> None:
    standing, _ = welcomed(said_at=0.0, heard_at=0.0)
    assert not standing.forbids(WAKE, 9.0)
    assert standing.forbids(WAKE, 11.0), "it may be the turn of others by now"
    assert not standing.forbids(GROUP, 11.0)


def test_what_was_not_taken_up_before_it_was_lost_is_dropped_when_it_is_a_member_again() -> None:
    for answered_at, left in ((9.0, {WAKE, GROUP}), (11.0, {GROUP})):
        standing, book = welcomed(said_at=0.0, heard_at=0.0)
        standing.says(2, 8.0)
        book.grant(WAKE)
        book.grant(GROUP)
        standing.answered("rollout-0/7/2", SHARED, book, answered_at)
        assert {held.lease for held in book.held()} == left


def test_what_nobody_answers_is_not_kept_for_ever() -> None:
    standing, book = welcomed(said_at=0.0, heard_at=0.0)
    for seq in range(2, MAX_UNANSWERED + 3):
        standing.says(seq, 5.0)
    standing.answered("rollout-0/7/2", SHARED, book, 5.0)
    assert not standing.holds(10.1)
    standing.answered("rollout-0/7/3", SHARED, book, 5.0)
    assert standing.holds(15.0)


def test_a_replica_that_waited_long_for_its_first_welcome_is_not_ended() -> None:
    """The controller reads its data for a minute, and then what had come meanwhile, one hello after the other."""
    standing, book = MembershipLease("rollout-0/7/"), LeaseTable(resend_s=2.0)
    for seq in range(1, 121):
        standing.says(seq, seq / 2)
    for seq in range(1, 121):
        standing.answered(f"rollout-0/7/{seq}", SHARED, book, 60.0)
        assert not standing.is_over("rollout", 60.1), seq
    assert standing.holds(70.0)
    assert standing.is_over("rollout", 77.6)


def test_that_it_woke_is_not_said_any_more_when_it_may_sleep_since() -> None:
    standing, book = welcomed(said_at=0.0, heard_at=0.0)
    book.grant(WAKE)
    book.work(WAKE)
    book.answer(WAKE, wire.Woken(lease=WAKE), (), 1.0)
    standing.says(2, 11.0)
    standing.answered("rollout-0/7/2", SHARED, book, 11.1)
    assert not book.held()
