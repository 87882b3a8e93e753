"""Relay: lets other replicas read the version that a puller receives, while it still arrives.

The puller's staging is an arena of one slot. A reader that requests a box which has not arrived yet waits for it; when
the pull fails the snapshot is revoked, and readers turn to another source. The relay forwards the digests of its own
sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starling.weightsync.memory.arena import Arena
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.digests import DigestCache, DigestMode
from starling.weightsync.offers.offer import Offer, holds_of, make_offer
from starling.weightsync.plan.layout import ShardPiece
from starling.weightsync.publisher.delta_history import ForwardedDeltas
from starling.weightsync.puller.deadline import Deadline
from starling.weightsync.puller.fetch import ReceivedDelta
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.source import PendingBoxes, SnapshotSource

CLOSE_TIMEOUT_S: Final = 5.0


class Relay:
    """Serves the staging of one rank."""

    def __init__(self, pieces: Sequence[ShardPiece], rank: int, serving: ServingOptions) -> None:
        self._rank, self._pieces = rank, pieces
        self._holds = holds_of(pieces)
        self._arena = Arena(pieces, num_slots=1)
        self._source = SnapshotSource(self._arena, pieces)
        self._cache = DigestCache()
        self._source.deltas = self._deltas = ForwardedDeltas()
        self._digests: DigestMode = "full"
        self._salt = 0
        try:
            self._serving = serve(self._source, serving.transport, serving.host, encrypted=serving.encrypt)
        except BaseException:  # whatever it is: free the arena, and re-raise
            self._arena.close()
            raise

    @property
    def memory(self) -> Memory:
        """The staging memory."""
        return self._arena.slots[0]

    def begin(
        self,
        offer: Offer,
        schedule: ReadSchedule,
        digests: DigestMode,
        deadline: Deadline,
        announce: Callable[[Offer], None] | None,
        bases: Sequence[int],
    ) -> None:
        """Revoke the last version, and offer the one that will arrive."""
        slot = self._arena.claim(deadline.check("waiting for readers of the last version"), "revoke")
        self._source.pending = PendingBoxes(
            (shard, box.box) for read in schedule.reads for shard, box in zip(read.shards, read.boxes, strict=True)
        )
        snapshot, secret = self._arena.commit(slot)
        self._cache = self._source.cache(snapshot)
        self._deltas.begin(snapshot, tuple(sorted({base for base in bases if base >= 0})))
        self._digests, self._salt = digests, offer.version if digests == "sampled" else 0
        rank = self._serving.offer(
            rank=self._rank, snapshot=snapshot, secret=secret, holds=self._holds, root=offer.root
        )
        if announce is not None:
            announce(make_offer(offer.version, [rank]))

    def expect_whole(self, read: BucketRead) -> None:
        """Tell readers that a bucket, which has been requested, will arrive without deltas."""
        self._deltas.expect_whole((shard, box.box) for shard, box in zip(read.shards, read.boxes, strict=True))
        self._serving.server.wake()

    def arrived(self, read: BucketRead, digests: Sequence[bytes], deltas: Sequence[ReceivedDelta]) -> None:
        """Make a bucket that has arrived readable, with its digests and deltas."""
        for index, base, data in deltas:
            self._deltas.put(read.shards[index], read.boxes[index].box, base, data)
        for shard, box, digest in zip(read.shards, read.boxes, digests, strict=True):
            if digest:
                self._cache.put((self._pieces[shard].names[0], box.box, self._digests, self._salt), digest)
            self._source.pending.arrived(shard, box.box)
        self._serving.server.wake()

    def revoke(self) -> None:
        """Revoke the snapshot of a failed pull."""
        self._arena.revoke_all()

    def close(self) -> None:
        """End serving. Raises WeightsError when a thread does not end."""
        try:
            self._serving.server.close(CLOSE_TIMEOUT_S)
        finally:
            self._arena.close()
