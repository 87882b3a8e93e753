"""Every publication gets one answer: the offer once its digests are computed, or the reason why there is none."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from starling.common.errors import WeightsError
from starling.common.offers import OFFER_TIMEOUT_S, OfferSender
from starling.common.wire import messages as wire
from starling.weightsync.offers.offer import LayoutPart, RankOffer, decode_offer, root_of_parts
from starling.weightsync.plan.layout import Box
from starling.weightsync.publisher.published import PublishedSnapshot
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

WAIT_S = 60.0
RANK = RankOffer(rank=0, transport="local", address="/", secret="t", snapshot=1, holds="h", root="0" * 32)


class RecordedSender:
    """An `OfferSender` whose calls are recorded."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[tuple[str, wire.Up, tuple[bytes, ...]]] = queue.SimpleQueue()
        self.broken: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self.changes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.offers = OfferSender(
            lambda *answer: self.answers.put(answer),
            self.broken.put,
            lambda: self.changes.put(self.offers.offered),
        )

    def next(self) -> tuple[str, Any, tuple[bytes, ...]]:
        """Return the next answer."""
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def sender() -> Iterator[RecordedSender]:
    sender = RecordedSender()
    yield sender
    sender.offers.close()


def test_offer_is_sent_when_digests_are_computed(sender: RecordedSender) -> None:
    tensors = {"w": torch.arange(12.0).reshape(3, 4)}
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        publication = publisher.snapshot(7, tensors)
        sender.offers.send("publish:7:0", publication)
        lease, message, (encoded,) = sender.next()
        assert decode_offer(encoded) == publication.offer()
    assert (lease, message.lease, message.version) == ("publish:7:0", "publish:7:0", 7)
    assert message.publish_s == publication.stall_s


def test_send_does_not_wait_for_digests(sender: RecordedSender) -> None:
    digests: Future[RankOffer] = Future()
    sender.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests, {}))
    assert sender.answers.empty()
    digests.set_result(RANK)
    _, message, (encoded,) = sender.next()
    assert (message.version, message.publish_s) == (1, 0.25)
    assert decode_offer(encoded).ranks == (RANK,)


def test_offer_does_not_wait_long_for_layout_roots(sender: RecordedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout chooses its layout: its root may take minutes, or never come."""
    monkeypatch.setattr("starling.common.offers.ROOTS_TIMEOUT_S", 0.1)
    digests: Future[RankOffer] = Future()
    digests.set_result(RANK)
    first, second = (((0, Box(offset=(0,), size=(1,)), bytes([number])),) for number in range(2))
    early, late, gone = Future[LayoutPart](), Future[LayoutPart](), Future[LayoutPart]()
    early.set_result((first,))
    gone.cancel()
    roots = {"late": late, "early": early, "gone": gone}
    sender.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests, roots))
    _, message, _ = sender.next()
    assert message.layout_roots == {"early": root_of_parts([(first,)])}
    late.set_result((second,))
    assert sender.offers.resend("publish:1:1", 1)
    _, message, _ = sender.next()
    assert message.layout_roots == {"early": root_of_parts([(first,)]), "late": root_of_parts([(second,)])}


def test_newest_offer_is_resent_on_request(sender: RecordedSender) -> None:
    tensors = {"w": torch.arange(12.0)}
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        assert not sender.offers.resend("publish:0:0", 0)
        encoded = {}
        for version in (0, 1):
            sender.offers.send(f"publish:{version}:0", publisher.snapshot(version, tensors))
            _, _, (encoded[version],) = sender.next()
            assert sender.offers.resend(f"publish:{version}:1", version)
            lease, message, buffers = sender.next()
            assert (lease, message.lease, message.version) == (f"publish:{version}:1", lease, version)
            assert buffers == (encoded[version],)
        assert not sender.offers.resend("publish:0:2", 0), "an older snapshot may be overwritten"
        assert not sender.offers.resend("publish:2:0", 2)
    assert sender.answers.empty()


def test_offered_version_and_outstanding_offers_are_reported(sender: RecordedSender) -> None:
    digests: Future[RankOffer] = Future()
    assert (sender.offers.offered, sender.offers.waits(0.0)) == (-1, ())
    sender.offers.send("publish:4:0", PublishedSnapshot(4, 0.25, digests, {}))
    now = time.monotonic()
    (wait,) = sender.offers.waits(now)
    assert wait.what == "digests of version 4"
    assert wait.since_s + wait.seconds_left == pytest.approx(OFFER_TIMEOUT_S)
    assert sender.offers.waits(now + 2 * OFFER_TIMEOUT_S)[0].seconds_left == 0.0
    assert sender.offers.offered == -1
    digests.set_result(RANK)
    assert sender.changes.get(timeout=WAIT_S) == 4
    assert (sender.offers.offered, sender.offers.waits(now)) == (4, ())


def test_failed_publication_is_answered_with_its_reason(sender: RecordedSender) -> None:
    digests: Future[RankOffer] = Future()
    sender.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests, {}))
    digests.set_exception(WeightsError("The memory of rank 0 is gone."))
    failed = wire.LeaseFailed(
        lease="publish:1:0", status=wire.Status.INFRA_LOST, reason="The memory of rank 0 is gone.", fatal=True
    )
    assert sender.next() == ("publish:1:0", failed, ())


def test_unexpected_exception_is_passed_on(sender: RecordedSender) -> None:
    digests: Future[RankOffer] = Future()
    sender.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests, {}))
    digests.set_exception(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        sender.broken.get(timeout=WAIT_S).result()
    assert sender.answers.empty()
