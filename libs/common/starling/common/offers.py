"""Answers to `PublishWeights`: the offer of a version, sent as soon as the digests of its snapshot are computed.

Shared by the services that publish weights: the policy offers its own versions, a rollout the version that it uses. A
`PublishWeights` for the newest version is answered again with the same offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from starling.common.errors import StarlingError
from starling.common.wire import messages as wire

OFFER_TIMEOUT_S: Final = 600.0
"""Longest wait for the digests of a version."""

ROOTS_TIMEOUT_S: Final = 10.0
ROOTS_SHARE: Final = 8.0
"""Longest wait for the layout roots after that: so long, and so many times as long as the digests took, whichever is
longer. Rollouts choose their layouts; those whose roots are late pull this version from a policy."""

AnswerLease = Callable[[str, wire.Up, tuple[bytes, ...]], None]


class PublishedVersion(Protocol):
    """A version whose digests are being computed, as a weight publisher returns it."""

    version: int
    stall_s: float
    """Seconds that its snapshot took."""

    def encoded_offer(self, timeout_s: float) -> bytes:
        """Return the offer, waiting for the digests.

        Raises:
            StarlingError: there will be none, or not within `timeout_s`.
        """

    def layout_roots(self, timeout_s: float) -> dict[str, str]:
        """Return the layout roots that were asked for, by key, as far as they are known within `timeout_s`."""


def _ignore() -> None:
    return


class OfferSender:
    """Answers `PublishWeights` commands in one background thread, so that the caller never waits for digests.

    Args:
        answer: called in the thread with a lease, its result and the buffers.
        broken: called with the future of an offer that raised an unexpected exception.
        changed: called in the thread when `offered` and `waits` have changed.
    """

    def __init__(
        self, answer: AnswerLease, broken: Callable[[Future[None]], None], changed: Callable[[], None] = _ignore
    ) -> None:
        self._answer, self._broken, self._changed = answer, broken, changed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offer")
        self._newest: PublishedVersion | None = None
        self._pending: dict[str, tuple[int, float]] = {}  # lease -> version and start time
        self.offered = -1
        """The newest version that was offered; -1 for none."""

    def send(self, lease: str, publication: PublishedVersion) -> None:
        """Answer `lease` with the offer of `publication`, or with its failure, as soon as either is known."""
        self._newest = publication
        begin = time.monotonic()
        self._pending[lease] = publication.version, begin
        self._thread.submit(self._send, lease, publication, begin).add_done_callback(self._done)

    def resend(self, lease: str, version: int) -> bool:
        """Answer `lease` with the newest offer, if that is of `version`. Return whether it is."""
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
        """Wait for outstanding offers. Close the publisher first, which ends every wait for digests."""
        self._thread.shutdown()

    def _send(self, lease: str, publication: PublishedVersion, begin: float) -> None:
        try:
            offer = publication.encoded_offer(max(0.0, begin + OFFER_TIMEOUT_S - time.monotonic()))
            digest_s = time.monotonic() - begin
            layout_roots = publication.layout_roots(max(ROOTS_TIMEOUT_S, ROOTS_SHARE * digest_s))
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
            layout_roots=layout_roots,
        )
        self._answer(lease, published, (offer,))

    def _done(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._broken(future)
        self._changed()


def lease_failure(
    lease: str, error: StarlingError, version: int = -1, rejected: tuple[str, ...] = ()
) -> wire.LeaseFailed:
    """Return the answer to a command that fails on every retry, from a replica that holds `version`.

    `rejected`: prompts of groups without which the command could succeed.
    """
    infra_lost = wire.Status.INFRA_LOST
    return wire.LeaseFailed(
        lease=lease, status=infra_lost, reason=str(error), fatal=True, version=version, rejected=rejected
    )
