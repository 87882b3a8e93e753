"""What every transport offers a destination: open a snapshot, read buckets of it, confirm that it stood still."""

from __future__ import annotations

from typing import Protocol

from starling.weightsync.execute.deadline import Deadline
from starling.weightsync.execute.regions import BucketRead, Memory
from starling.weightsync.offer import RankOffer


class Reader(Protocol):
    """A connection to one source rank; it lasts over many snapshots. Not thread-safe.

    Every method raises `WeightsError` when it cannot do its duty within the deadline; the reader is then of no further
    use and must be closed.
    """

    def open(self, offer: RankOffer, deadline: Deadline) -> None:
        """Present the token and take a lease on the snapshot, which then stands still until `release`."""

    def read(self, bucket: BucketRead, staging: Memory, deadline: Deadline) -> None:
        """Fill the bucket's destinations in `staging`."""

    def confirm(self, deadline: Deadline) -> None:
        """Make sure that the snapshot was not revoked since `open`."""

    def release(self, deadline: Deadline) -> None:
        """Give the lease back."""

    def close(self) -> None:
        """Free everything; may be called twice and never raises."""
