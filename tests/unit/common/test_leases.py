"""Lease table: duplicate, lost and late messages change nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from starling.common.ids import LEASE_KINDS, lease_id, lease_incarnation, lease_kind, lease_subject
from starling.common.leases.table import LeaseTable
from starling.common.wire.messages import HeldLease, LeaseProgress, Leave

ANSWER = Leave(reason="any message will do")


def test_command_is_granted_once_and_its_answer_kept_until_released() -> None:
    table = LeaseTable(resend_s=2.0)
    assert table.grant("a")
    assert not table.grant("a")
    assert table.held() == (HeldLease(lease="a", phase="queued"),)
    assert table.work("a")
    assert table.answer("a", ANSWER, (b"x",), now=10.0)
    assert not table.grant("a")
    assert table.due(11.0) == []
    assert table.due(12.0) == [(ANSWER, (b"x",))]
    assert table.due(13.0) == []
    table.resend("a")
    assert table.due(13.0) == [(ANSWER, (b"x",))]
    assert table.release(("a",)) == []
    assert table.held() == ()


def test_release_before_the_answer_cancels_the_work() -> None:
    table = LeaseTable(resend_s=2.0)
    table.grant("a")
    table.grant("b")
    assert table.release(("a", "unknown")) == ["a"]
    assert not table.work("a")
    assert not table.answer("a", ANSWER, (), now=0.0)
    assert table.held() == (HeldLease(lease="b", phase="queued"),)


def test_lease_ids() -> None:
    assert lease_id("generate", "t17", 2, 41) == "generate:t17:2.41"
    assert [lease_kind(lease_id(kind, 1, 1, 0)) for kind in LEASE_KINDS] == list(LEASE_KINDS)
    assert lease_kind("nonsense") is None
    assert lease_subject(lease_id("generate", "t17", 2, 41)) == "t17"
    assert [lease_incarnation(lease) for lease in (lease_id("train", 5, 3, 8), "train:5:x", "train", "train:5:²")] == [
        3,
        -1,
        -1,
        -1,
    ]


def test_lease_has_progress_from_start_to_answer() -> None:
    table, some = LeaseTable(resend_s=2.0), LeaseProgress(bytes_done=3, bytes_total=7, seconds_left=2.0)
    table.advance("a", some)
    table.grant("a")
    table.advance("a", some)
    assert table.held() == (HeldLease(lease="a", phase="queued"),)
    table.work("a")
    table.advance("a", some)
    assert table.held() == (HeldLease(lease="a", phase="working", progress=some),)
    table.answer("a", ANSWER, (), now=0.0)
    table.advance("a", some)
    assert table.held() == (HeldLease(lease="a", phase="answered"),), "an answered lease has no progress"


@pytest.mark.parametrize(
    ("done", "total", "seconds_left", "words"),
    [
        (0, 7, None, "0 %"),
        (3, 7, 2.14, "42 %, 2.1 s left"),
        (6_999, 7_000, 0.01, "99 %, 0.0 s left"),
        (7, 7, 0.0, "100 %, 0.0 s left"),
        (0, 0, 0.0, "100 %, 0.0 s left"),
    ],
)
def test_progress_in_words(done: int, total: int, seconds_left: float | None, words: str) -> None:
    assert str(LeaseProgress(bytes_done=done, bytes_total=total, seconds_left=seconds_left)) == words


class Deliveries(RuleBasedStateMachine):
    """Random commands, answers and releases, compared with a model set of held leases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.held, self.answered, self.now = LeaseTable(resend_s=1.0), set[str](), set[str](), 0.0

    leases = st.sampled_from("abcd")

    @rule(lease=leases)
    def command(self, lease: str) -> None:
        assert self.table.grant(lease) == (lease not in self.held)
        self.held.add(lease)

    @rule(lease=leases)
    def answer(self, lease: str) -> None:
        assert self.table.answer(lease, ANSWER, (), self.now) == (lease in self.held)
        if lease in self.held:
            self.answered.add(lease)

    @rule(lease=leases)
    def release(self, lease: str) -> None:
        given_up = self.table.release((lease,))
        assert given_up == ([lease] if lease in self.held - self.answered else [])
        self.held.discard(lease)
        self.answered.discard(lease)

    @rule()
    def advance_time(self) -> None:
        self.now += 1.0
        assert len(self.table.due(self.now)) == len(self.answered)

    @invariant()
    def heartbeat_lists_all_leases(self) -> None:
        assert {held.lease for held in self.table.held()} == self.held


TestDeliveries = Deliveries.TestCase
