"""Offers that follow their snapshots: a version is digested while its replica works on, and offered at once.

Whoever publishes - the policy what it made, a rollout what it uses - answers `PublishWeights` this way, and answers it
again with the same offer for as long as that is the newest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from starling.common.errors import StarlingError
from starling.common.wire import messages as wire

if TYPE_CHECKING:  # it imports torch, which services do only once their settings are known to be right
    from starling.weightsync.publisher.publisher import PublishedSnapshot

OFFER_TIMEOUT_S: Final = 600.0
"""By then the digests of a version are there, or something is wrong."""

AnswerLease = Callable[[str, wire.Up, tuple[bytes, ...]], None]


def _nobody() -> None:
    """Nobody wants to know."""


class OfferSender:
    """Answers each `PublishWeights` from a thread of its own, so that nobody waits for digests but who wants the offer.

    Args:
        answer: takes a lease, its result and the buffers; called in the thread.
        broken: takes the future of an offer that ended in no answer, but in an exception that is nobody's failure.
        changed: told when `offered` and `waits` are others than before; called in the thread.
    """

    def __init__(
        self, answer: AnswerLease, broken: Callable[[Future[None]], None], changed: Callable[[], None] = _nobody
    ) -> None:
        self._answer, self._broken, self._changed = answer, broken, changed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offer")
        self._newest: PublishedSnapshot | None = None
        self._pending: dict[str, tuple[int, float]] = {}  # lease -> version and since when
        self.offered = -1
        """The newest version that was offered; -1 for none."""

    def send(self, lease: str, publication: PublishedSnapshot) -> None:
        """Answer `lease` with the offer of `publication`, or with its failure, as soon as either is known."""
        self._newest = publication
        begin = time.monotonic()
        self._pending[lease] = publication.version, begin
        self._thread.submit(self._send, lease, publication, begin).add_done_callback(self._done)

    def again(self, lease: str, version: int) -> bool:
        """Answer `lease` as the newest publication was, if that was of `version`. Returns whether it was."""
        if self._newest is None or self._newest.version != version:
            return False
        self.send(lease, self._newest)
        return True

    def waits(self, now: float) -> tuple[wire.Wait, ...]:
        """Return the offers that are outstanding at `now` (monotonic seconds)."""
        return tuple(
            wire.Wait(
                what=f"digests of version {version}",
                on="processor",
                since_s=now - begin,
                seconds_left=max(0.0, begin + OFFER_TIMEOUT_S - now),
            )
            for version, begin in list(self._pending.values())
        )

    def close(self) -> None:
        """Wait for what is under way. The publisher must be closed before, which ends every wait for digests."""
        self._thread.shutdown()

    def _send(self, lease: str, publication: PublishedSnapshot, begin: float) -> None:
        from starling.weightsync.plan.layout import encode

        try:
            offer = publication.offer(max(0.0, begin + OFFER_TIMEOUT_S - time.monotonic()))
        except StarlingError as error:
            self._answer(lease, lease_failure(lease, error), ())
            return
        finally:
            del self._pending[lease]
        self.offered = max(self.offered, publication.version)
        published = wire.WeightsPublished(
            lease=lease,
            version=publication.version,
            publish_s=publication.stall_s,
            offer_s=time.monotonic() - begin,
        )
        self._answer(lease, published, (encode(offer),))

    def _done(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._broken(future)
        self._changed()


def lease_failure(lease: str, error: StarlingError, version: int = -1) -> wire.LeaseFailed:
    """Return the answer to a command that cannot be done by who holds `version`, whoever tries it again."""
    infra_lost = wire.Status.INFRA_LOST
    return wire.LeaseFailed(lease=lease, status=infra_lost, reason=str(error), fatal=True, version=version)
