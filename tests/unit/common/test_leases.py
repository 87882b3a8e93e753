"""The lease book: doubled, lost and late messages change nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from starling.common.ids import LEASE_KINDS, lease_id, lease_incarnation, lease_kind, lease_subject
from starling.common.leases import LeaseTable
from starling.common.wire.messages import HeldLease, LeaseProgress, Leave

ANSWER = Leave(reason="any message will do")


def test_a_command_is_done_once_and_its_answer_kept_until_released() -> None:
    book = LeaseTable(resend_s=2.0)
    assert book.grant("a")
    assert not book.grant("a")
    assert book.held() == (HeldLease(lease="a", phase="queued"),)
    assert book.work("a")
    assert book.answer("a", ANSWER, (b"x",), now=10.0)
    assert not book.grant("a")
    assert book.due(11.0) == []
    assert book.due(12.0) == [(ANSWER, (b"x",))]
    assert book.due(13.0) == []
    book.resend("a")
    assert book.due(13.0) == [(ANSWER, (b"x",))]
    assert book.release(("a",)) == []
    assert book.held() == ()


def test_what_is_released_early_is_given_up() -> None:
    book = LeaseTable(resend_s=2.0)
    book.grant("a")
    book.grant("b")
    assert book.release(("a", "unknown")) == ["a"]
    assert not book.work("a")
    assert not book.answer("a", ANSWER, (), now=0.0)
    assert book.held() == (HeldLease(lease="b", phase="queued"),)


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


def test_work_has_a_progress_from_its_start_to_its_answer() -> None:
    book, some = LeaseTable(resend_s=2.0), LeaseProgress(bytes_done=3, bytes_total=7, seconds_left=2.0)
    book.advance("a", some)
    book.grant("a")
    book.advance("a", some)
    assert book.held() == (HeldLease(lease="a", phase="queued"),)
    book.work("a")
    book.advance("a", some)
    assert book.held() == (HeldLease(lease="a", phase="working", progress=some),)
    book.answer("a", ANSWER, (), now=0.0)
    book.advance("a", some)
    assert book.held() == (HeldLease(lease="a", phase="answered"),), "what is over has no progress"


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
    """Commands and releases in any order and number, against a set that says what must be held."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.held, self.answered, self.now = LeaseTable(resend_s=1.0), set[str](), set[str](), 0.0

    leases = st.sampled_from("abcd")

    @rule(lease=leases)
    def command(self, lease: str) -> None:
        assert self.book.grant(lease) == (lease not in self.held)
        self.held.add(lease)

    @rule(lease=leases)
    def answer(self, lease: str) -> None:
        assert self.book.answer(lease, ANSWER, (), self.now) == (lease in self.held)
        if lease in self.held:
            self.answered.add(lease)

    @rule(lease=leases)
    def release(self, lease: str) -> None:
        given_up = self.book.release((lease,))
        assert given_up == ([lease] if lease in self.held - self.answered else [])
        self.held.discard(lease)
        self.answered.discard(lease)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        assert len(self.book.due(self.now)) == len(self.answered)

    @invariant()
    def the_heartbeat_tells_all(self) -> None:
        assert {held.lease for held in self.book.held()} == self.held


TestDeliveries = Deliveries.TestCase
