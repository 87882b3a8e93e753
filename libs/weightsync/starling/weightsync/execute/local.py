"""Reading from the same host: map the source's arena and copy straight into staging. One copy, no packing.

A source that dies or stops while it is read does not disturb the reader, which has the memory itself.
"""

from __future__ import annotations

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.execute.arena import Mapping
from starling.weightsync.execute.deadline import Deadline
from starling.weightsync.execute.regions import BucketRead, Memory, view
from starling.weightsync.offer import RankOffer


class LocalReader:
    """A `Reader` through shared memory."""

    def __init__(self, address: str) -> None:
        self._mapping = Mapping(address)
        self._memory: Memory | None = None

    def open(self, offer: RankOffer, deadline: Deadline) -> None:
        """See `Reader.open`."""
        deadline.check(f"opening snapshot {offer.snapshot}")
        self._memory = self._mapping.open(offer.snapshot, offer.token)

    def read(self, bucket: BucketRead, staging: Memory, deadline: Deadline) -> None:
        """See `Reader.read`."""
        assert self._memory is not None
        for source, destination in zip(bucket.sources, bucket.destinations, strict=True):
            deadline.check("copying from shared memory")
            np.copyto(view(staging, destination), view(self._memory, source))
        self.confirm(deadline)

    def confirm(self, deadline: Deadline) -> None:
        """See `Reader.confirm`."""
        if not self._mapping.valid():
            raise WeightsError("The snapshot was revoked while it was read: too slow; pull a newer version.")

    def release(self, deadline: Deadline) -> None:
        """See `Reader.release`."""
        self._memory = None
        self._mapping.release()

    def close(self) -> None:
        """See `Reader.close`."""
        self._memory = None
        self._mapping.close()
