"""Read schedule of one destination rank: the boxes to request for a plan, how they travel, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Array, part_of
from starling.weightsync.plan.boxes import contains, first_gap
from starling.weightsync.plan.buckets import DIRECT_BYTES, cut_segments, packed_bytes
from starling.weightsync.plan.layout import Box, Layout, ShardPiece, aligned, pieces_of
from starling.weightsync.plan.moves import Bucket
from starling.weightsync.plan.planner import Plan


@dataclass(frozen=True)
class BucketRead:
    """One bucket, ready to execute."""

    source_rank: int
    boxes: tuple[ShardPiece, ...]
    """The boxes to request."""
    shards: tuple[int, ...]
    """The destination shard of each box."""
    arrays: tuple[Array | None, ...]
    """The array that each box fills; None where only torch can write, on a device."""
    segments: tuple[int, ...]
    direct: tuple[bool, ...]
    """For each segment, whether it is received in place."""
    size_bytes: int

    def buffer_bytes(self, *, scatters: bool) -> int:
        """Return the size of the buffer that the bucket needs, with a transport that `scatters` or not."""
        sizes = [box.size_bytes for box in self.boxes]
        if scatters:
            return sum(aligned(size) for size, array in zip(sizes, self.arrays, strict=True) if array is None)
        return packed_bytes(sizes, self.segments, self.direct)


@dataclass(frozen=True)
class ReadSchedule:
    """The reads of one destination rank for any version of the same layout."""

    plan: Plan
    reads: tuple[BucketRead, ...]
    total_bytes: int

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The source ranks that the plan reads."""
        return tuple(sorted({read.source_rank for read in self.reads}))


def make_schedule(plan: Plan, layout: Layout, rank: int, arrays: Sequence[Array | None]) -> ReadSchedule:
    """Return the reads of destination rank `rank`, which fill `arrays`, one for each of its shards.

    Raises:
        WeightsError: the plan does not deliver every element of every shard exactly once.
    """
    wanted = pieces_of(layout, rank)
    buckets = plan.of_destination(rank)
    _check_delivery(plan, buckets, wanted)
    reads = tuple(_read(bucket, wanted, arrays) for bucket in buckets)
    return ReadSchedule(plan, reads, sum(read.size_bytes for read in reads))


def _check_delivery(plan: Plan, buckets: Sequence[Bucket], wanted: Sequence[ShardPiece]) -> None:
    delivered: list[list[Box]] = [[] for _ in wanted]
    for bucket in buckets:
        for transfer in bucket.transfers:
            shard = transfer.destination_shard
            if not 0 <= shard < len(wanted) or not contains(wanted[shard].box, transfer.box):
                raise WeightsError(
                    f"The plan delivers {transfer.box} to shard {shard}, which {plan.destination} does not have; "
                    "plan again."
                )
            delivered[shard].append(transfer.box)
    for piece, boxes in zip(wanted, delivered, strict=True):
        _check_cover(piece.names[0], piece.box, boxes)


def _check_cover(name: str, box: Box, covers: Sequence[Box]) -> None:
    """Raise unless `box` is the disjoint union of `covers`, which all lie in it."""
    gap = first_gap(box, covers)
    if gap is not None:
        raise WeightsError(f"Tensor {name}: box {gap} has no source; plan again.")
    if sum(cover.volume for cover in covers) != box.volume:
        raise WeightsError(f"Tensor {name}: a part of box {box} would be delivered twice; plan again.")


def with_deltas(read: BucketRead, sizes: Sequence[int]) -> BucketRead:
    """Return the bucket with some boxes replaced by their deltas of these sizes; 0 where the box itself travels.

    A delta arrives in a buffer, as a box of bytes.
    """
    deltas = (Box(offset=(0,), size=(size,)) for size in sizes)
    boxes = [
        ShardPiece(names=box.names, dtype="uint8", box=delta) if size else box
        for box, size, delta in zip(read.boxes, sizes, deltas, strict=True)
    ]
    arrays = [None if size else array for array, size in zip(read.arrays, sizes, strict=True)]
    return _arrange(read.source_rank, boxes, read.shards, arrays)


def with_tensors(read: BucketRead, direct: Sequence[bool]) -> BucketRead:
    """Return the bucket with segments of their own for boxes that are `direct`: received straight on a device."""
    return _arrange(read.source_rank, read.boxes, read.shards, read.arrays, direct)


def _read(bucket: Bucket, wanted: Sequence[ShardPiece], arrays: Sequence[Array | None]) -> BucketRead:
    boxes: list[ShardPiece] = []
    targets: list[Array | None] = []
    for transfer in bucket.transfers:
        shard = wanted[transfer.destination_shard]
        array = arrays[transfer.destination_shard]
        boxes.append(ShardPiece(names=shard.names, dtype=shard.dtype, box=transfer.box))
        targets.append(None if array is None else part_of(array, shard.box, transfer.box))
    shards = tuple(transfer.destination_shard for transfer in bucket.transfers)
    return _arrange(bucket.source_rank, boxes, shards, targets)


def _arrange(
    source_rank: int,
    boxes: Sequence[ShardPiece],
    shards: tuple[int, ...],
    targets: Sequence[Array | None],
    on_device: Sequence[bool] = (),
) -> BucketRead:
    in_place = [
        target is not None and target.nbytes >= DIRECT_BYTES and target.flags.c_contiguous for target in targets
    ]
    segments, direct = cut_segments([host or bool(there) for host, there in zip_longest(in_place, on_device)])
    return BucketRead(
        source_rank=source_rank,
        boxes=tuple(boxes),
        shards=shards,
        arrays=tuple(targets),
        segments=segments,
        direct=direct,
        size_bytes=sum(box.size_bytes for box in boxes),
    )
