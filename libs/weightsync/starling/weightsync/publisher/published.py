"""One published version: its offer, its layout roots and its changes, while they are computed in another thread."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.delta.format import DeltaTotal
from starling.weightsync.offers.offer import LayoutPart, Offer, RankOffer, make_offer, root_of_parts
from starling.weightsync.plan.layout import encode

DIGEST_TIMEOUT_S: Final = 600.0
"""Longest wait for the digests of a snapshot."""


class PublishedSnapshot:
    """One version in a snapshot, whose digests are being computed in another thread."""

    def __init__(
        self,
        version: int,
        stall_s: float,
        rank: Future[RankOffer],
        layout_parts: dict[str, Future[LayoutPart]],
        changes: Future[DeltaTotal | None] | None = None,
    ) -> None:
        self.version = version
        self.stall_s = stall_s
        """Seconds that the snapshot took: the only part of publishing that blocks training."""
        self._rank, self._layout_parts, self._changes = rank, layout_parts, changes

    def layout_roots(self, timeout_s: float = DIGEST_TIMEOUT_S) -> dict[str, str]:
        """Return the layout roots by the keys under which their plans were given, as far as they are known within
        `timeout_s`: those that failed, and that a later version or `close` has ended, are left out.

        These are the roots of a publisher of one rank; see `layout_parts` for others."""
        return {key: root_of_parts([part]) for key, part in self.layout_parts(timeout_s).items()}

    def layout_parts(self, timeout_s: float = DIGEST_TIMEOUT_S) -> dict[str, LayoutPart]:
        """Return this rank's parts of the layout roots, like these; `offers.offer.root_of_parts` joins all ranks'."""
        deadline = time.monotonic() + timeout_s
        parts: dict[str, LayoutPart] = {}
        for key, future in list(self._layout_parts.items()):  # more may be asked for meanwhile
            with suppress(TimeoutError, CancelledError):
                if future.exception(max(0.0, deadline - time.monotonic())) is None:
                    parts[key] = future.result()
        return parts

    def offer(self, timeout_s: float = DIGEST_TIMEOUT_S) -> Offer:
        """Return the offer, once the root of the version is known.

        Raises:
            WeightsError: not within `timeout_s`, or the publisher was closed.
        """
        try:
            return make_offer(self.version, [self._rank.result(timeout_s)])
        except TimeoutError as error:
            raise WeightsError(f"Version {self.version} was not digested within {timeout_s:g} s.") from error
        except CancelledError as error:
            raise WeightsError(f"Version {self.version} is gone: its publisher was closed.") from error

    def encoded_offer(self, timeout_s: float = DIGEST_TIMEOUT_S) -> bytes:
        """Return the offer as it travels. Raises WeightsError as `offer` does."""
        return encode(self.offer(timeout_s))

    def changes(self, timeout_s: float = DIGEST_TIMEOUT_S) -> DeltaTotal | None:
        """Return how much changed since the previous version; None where it was not compared, or the next snapshot
        interrupted the comparison.

        Raises:
            WeightsError: not known within `timeout_s`.
        """
        try:
            return None if self._changes is None else self._changes.result(timeout_s)
        except TimeoutError as error:
            raise WeightsError(f"Version {self.version} was not compared within {timeout_s:g} s.") from error
        except CancelledError:
            return None
