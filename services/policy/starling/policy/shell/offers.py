"""Offers that follow their snapshots: a version is digested while the next step trains, and offered at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from starling.common.errors import StarlingError
from starling.common.wire import messages as wire

if TYPE_CHECKING:
    from starling.weightsync.execute.publish import Publication

Answer = Callable[[str, wire.Up, tuple[bytes, ...]], None]


class Offers:
    """Answers each `PublishWeights` from a thread of its own, so that no rollout waits for the end of a step.

    Args:
        answer: takes a lease, its result and the buffers; called in the thread.
        broken: takes the future of an offer that ended in no answer, but in an exception that is nobody's failure.
    """

    def __init__(self, answer: Answer, broken: Callable[[Future[None]], None]) -> None:
        self._answer, self._broken = answer, broken
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offer")

    def send(self, lease: str, publication: Publication) -> None:
        """Answer `lease` with the offer of `publication`, or with its failure, as soon as either is known."""
        self._thread.submit(self._send, lease, publication, time.perf_counter()).add_done_callback(self._done)

    def close(self) -> None:
        """Wait for what is under way. The publisher must be closed before, which ends every wait for digests."""
        self._thread.shutdown()

    def _send(self, lease: str, publication: Publication, begin: float) -> None:
        from starling.weightsync.layout import encode

        try:
            offer = publication.offer()
        except StarlingError as error:
            self._answer(lease, failure_of(lease, error), ())
            return
        published = wire.WeightsPublished(
            lease=lease,
            version=publication.version,
            publish_s=publication.stall_s,
            offer_s=time.perf_counter() - begin,
        )
        self._answer(lease, published, (encode(offer),))

    def _done(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._broken(future)


def failure_of(lease: str, error: StarlingError) -> wire.LeaseFailed:
    """Return the answer to a command that cannot be done, whoever tries it again."""
    return wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=str(error), fatal=True)
