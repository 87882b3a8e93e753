"""Peaks: the memory that a publisher and a destination take beside their tensors, known before anything moves. Pure.

A publisher has two snapshots, and at their side what it packs for its readers; a destination has staging, unless it
pulls in place, and scratch for what is on its way to another place than where it arrived. The executor takes what these
functions say, so the two cannot disagree. Whoever has no layouts but only a plan finds a bound in `Plan.peak_bytes`.
A relay is a destination that packs for its own readers besides, as a publisher does.

Deltas come on top, as large as what changed: at the publisher at most one snapshot, for the versions that it remembers;
at the destination at most what `Plan.peak_bytes` states for a pull in place, and only while they are on their way, but
for a relay, which keeps what it passes on until the next version.

Not counted is what grows neither with the model nor with the buckets: code, the stacks of threads, the transport's own
buffers (of sockets, in the kernel; of UCX, a few MiB), and about a kilobyte of objects for each box of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from starling.weightsync.layout import ITEM_BYTES, Layout, Piece, aligned, packed_offsets, pieces_of
from starling.weightsync.moves import Bucket
from starling.weightsync.offer import DIGEST_BYTES, Transport
from starling.weightsync.plan import Plan
from starling.weightsync.segments import (
    BUCKETS_PER_SOURCE,
    DIRECT_BYTES,
    cut_segments,
    is_contiguous,
    most_at_once,
    packed_bytes,
    row_major,
)

NUM_SNAPSHOTS: Final = 2
"""One to be read while the next is written."""
PAGE_BYTES: Final = 4096
MAX_PACKING_BYTES: Final = 256 << 20
"""Most that a source over UCX packs at once, for all its readers; a single request may need more, and then is alone."""


class PublisherPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Most memory of one source rank beside its tensors."""

    snapshots_bytes: int
    """Shared with readers on the same host; it counts here and not there."""
    packing_bytes: int
    """What is packed for readers."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.snapshots_bytes + self.packing_bytes


class DestinationPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Most memory of one destination rank beside its tensors."""

    staging_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.staging_bytes + self.scratch_bytes


def slot_bytes(pieces: Sequence[Piece]) -> int:
    """Return the room of one snapshot: the pieces, then their digests, in whole pages."""
    _, extent_bytes = packed_offsets(piece.size_bytes for piece in pieces)
    return -(-(extent_bytes + DIGEST_BYTES * len(pieces)) // PAGE_BYTES) * PAGE_BYTES


def publisher_peak(
    source: Layout,
    rank: int,
    plan: Plan,
    destination: Layout,
    transport: Transport,
    *,
    in_place: bool = False,
    on_device: bool = False,
    num_replicas: int = 1,
) -> PublisherPeak:
    """Return what source rank `rank` takes while all ranks of its destinations read from it at one time.

    Args:
        source: what the publisher's replica holds.
        rank: which of its ranks.
        plan: made from `source` and `destination`.
        destination: the layout of one destination replica.
        transport: ``tcp`` packs one bucket for each reader at a time, ``ucx`` all that are under way, each in a room
            that holds the largest; nothing is packed for readers over ``local``.
        in_place: whether the destinations pull into their live tensors.
        on_device: whether these are where only torch can write, such as on a GPU.
        num_replicas: how many such replicas there are.
    """
    pieces = pieces_of(source, rank)
    at_once = min(BUCKETS_PER_SOURCE, plan.buckets_in_flight) if transport == "ucx" else 1
    packing = largest = 0
    for reader in plan.ranks if transport != "local" else ():
        rooms = [
            _packing_bytes(bucket, pieces, destination, in_place=in_place, on_device=on_device)
            for bucket in plan.of_destination(reader)
            if bucket.source_rank == rank
        ]
        packing += max(rooms, default=0) * min(at_once, sum(map(bool, rooms))) * num_replicas
        largest = max(largest, *rooms, 0)
    if transport == "ucx":
        packing = min(packing, max(MAX_PACKING_BYTES, largest))
    return PublisherPeak(snapshots_bytes=PAGE_BYTES + NUM_SNAPSHOTS * slot_bytes(pieces), packing_bytes=packing)


def destination_peak(
    plan: Plan,
    destination: Layout,
    rank: int,
    transport: Transport,
    *,
    in_place: bool = False,
    on_device: bool = False,
) -> DestinationPeak:
    """Return what destination rank `rank` takes while it pulls.

    Args:
        plan: the whole plan or this rank's part.
        destination: the layout that the plan is for.
        rank: which of its ranks.
        transport: ``local`` copies from the publisher's memory to where a box belongs; the others need scratch for
            what does not lie there in one piece.
        in_place: whether it pulls into its live tensors.
        on_device: whether these are where only torch can write, such as on a GPU.
    """
    rooms = []
    for bucket in plan.of_destination(rank):
        sizes, counts, direct = _received(bucket, destination, in_place=in_place, on_device=on_device)
        if transport != "local":
            rooms.append(packed_bytes(sizes, counts, direct))
        elif in_place and on_device:
            rooms.append(sum(map(aligned, sizes)))
    _, extent_bytes = packed_offsets(piece.size_bytes for piece in pieces_of(destination, rank))
    return DestinationPeak(
        staging_bytes=0 if in_place else extent_bytes,
        scratch_bytes=most_at_once(rooms, plan.buckets_in_flight),
    )


def _received(
    bucket: Bucket, destination: Layout, *, in_place: bool, on_device: bool
) -> tuple[list[int], tuple[int, ...], tuple[bool, ...]]:
    """Return the size of each box of a bucket, and its segments as `cut_segments` gives them."""
    shards = destination.ranks[bucket.destination_rank].shards
    sizes: list[int] = []
    direct: list[bool] = []
    for transfer in bucket.transfers:
        shard, box = shards[transfer.destination_shard], transfer.box
        sizes.append(box.volume * ITEM_BYTES[destination.tensors[shard.tensor].dtype])
        strides = shard.strides if in_place else row_major(shard.box.size)
        reachable = not (in_place and on_device)
        direct.append(reachable and sizes[-1] >= DIRECT_BYTES and is_contiguous(box.size, strides))
    return sizes, *cut_segments(direct)


def _packing_bytes(
    bucket: Bucket, pieces: Sequence[Piece], destination: Layout, *, in_place: bool, on_device: bool
) -> int:
    """Return the room that a source needs to pack a bucket from a snapshot of `pieces`."""
    sizes, counts, _ = _received(bucket, destination, in_place=in_place, on_device=on_device)
    whole: list[bool] = []
    first = 0
    for count in counts:
        moved = bucket.transfers[first]
        first += count
        strides = row_major(pieces[moved.source_shard].box.size)
        whole.append(count == 1 and is_contiguous(moved.box.size, strides))
    return packed_bytes(sizes, counts, whole)
