"""Every publication ends in one answer: the offer, once its digests are known, or one sentence why there is none."""

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
from starling.weightsync.plan.offer import RankOffer, attested_root, decode_offer, joined_root, make_offer
from starling.weightsync.publisher.publisher import PublishedSnapshot, Publisher
from starling.weightsync.tensors.modules import layout_of

WAIT_S = 60.0
RANK = RankOffer(rank=0, transport="local", address="/", token="t", snapshot=1, holds="h", root="0" * 32)


class Heard:
    """What the offers said to whom."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[tuple[str, wire.Up, tuple[bytes, ...]]] = queue.SimpleQueue()
        self.broken: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.offers = OfferSender(
            lambda *answer: self.answers.put(answer),
            self.broken.put,
            lambda: self.news.put(self.offers.offered),
        )

    def next(self) -> tuple[str, Any, tuple[bytes, ...]]:
        """Return the next answer."""
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.offers.close()


def test_a_version_is_offered_when_its_digests_are_known(heard: Heard) -> None:
    tensors = {"w": torch.arange(12.0).reshape(3, 4)}
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        publication = publisher.snapshot(7, tensors)
        heard.offers.send("publish:7:0", publication)
        lease, message, (encoded,) = heard.next()
        assert decode_offer(encoded) == publication.offer()
    assert (lease, message.lease, message.version) == ("publish:7:0", "publish:7:0", 7)
    assert message.publish_s == publication.stall_s


def test_nobody_waits_for_digests_but_the_offer(heard: Heard) -> None:
    digests: Future[RankOffer] = Future()
    heard.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests))
    assert heard.answers.empty()
    digests.set_result(RANK)
    _, message, (encoded,) = heard.next()
    assert (message.version, message.publish_s) == (1, 0.25)
    assert decode_offer(encoded).ranks == (RANK,)


def test_the_newest_offer_is_made_again_to_whoever_asks(heard: Heard) -> None:
    tensors = {"w": torch.arange(12.0)}
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        assert not heard.offers.resend("publish:0:0", 0)
        encoded = {}
        for version in (0, 1):
            heard.offers.send(f"publish:{version}:0", publisher.snapshot(version, tensors))
            _, _, (encoded[version],) = heard.next()
            assert heard.offers.resend(f"publish:{version}:1", version)
            lease, message, buffers = heard.next()
            assert (lease, message.lease, message.version) == (f"publish:{version}:1", lease, version)
            assert buffers == (encoded[version],)
        assert not heard.offers.resend("publish:0:2", 0), "only the newest stands for sure"
        assert not heard.offers.resend("publish:2:0", 2)
    assert heard.answers.empty()


def test_what_is_on_offer_and_what_is_outstanding_is_told(heard: Heard) -> None:
    digests: Future[RankOffer] = Future()
    assert (heard.offers.offered, heard.offers.waits(0.0)) == (-1, ())
    heard.offers.send("publish:4:0", PublishedSnapshot(4, 0.25, digests))
    now = time.monotonic()
    (wait,) = heard.offers.waits(now)
    assert wait.what == "digests of version 4"
    assert wait.since_s + wait.seconds_left == pytest.approx(OFFER_TIMEOUT_S)
    assert heard.offers.waits(now + 2 * OFFER_TIMEOUT_S)[0].seconds_left == 0.0
    assert heard.offers.offered == -1
    digests.set_result(RANK)
    assert heard.news.get(timeout=WAIT_S) == 4
    assert (heard.offers.offered, heard.offers.waits(now)) == (4, ())


def test_a_failed_publication_is_answered_with_its_sentence(heard: Heard) -> None:
    digests: Future[RankOffer] = Future()
    heard.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests))
    digests.set_exception(WeightsError("The memory of rank 0 is gone."))
    failed = wire.LeaseFailed(
        lease="publish:1:0", status=wire.Status.INFRA_LOST, reason="The memory of rank 0 is gone.", fatal=True
    )
    assert heard.next() == ("publish:1:0", failed, ())


def test_what_is_no_failure_of_a_publication_is_handed_on(heard: Heard) -> None:
    digests: Future[RankOffer] = Future()
    heard.offers.send("publish:1:0", PublishedSnapshot(1, 0.25, digests))
    digests.set_exception(ZeroDivisionError("a mistake of ours"))
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        heard.broken.get(timeout=WAIT_S).result()
    assert heard.answers.empty()


def test_several_ranks_attest_a_version_only_together() -> None:
    offer = make_offer(3, [RANK])
    sent, other = "1" * 32, "2" * 32
    good, wrong = attested_root(offer, sent, sent), attested_root(offer, sent, other)
    assert good == offer.root
    assert joined_root(offer, [good]) == joined_root(offer, [good, good]) == offer.root
    for roots in ([wrong], [good, wrong], [wrong, good], [wrong, wrong]):  # copies that are wrong in the same way
        assert joined_root(offer, roots) != offer.root
