"""Buckets: the transfers of one destination rank in order, and the segments in which a bucket is sent. Pure.

A plan stores the moves once per class of tensors; `expand` makes one row per transfer of them, in arrays, and buckets
are ranges of rows. `Buckets` makes the objects only on access.

The reader cuts a bucket into segments, runs of its boxes in order. A large box that is contiguous at its destination is
a segment of its own, received in place; all boxes between two such boxes are one segment, received in a buffer and
copied from there. The source sends a segment without copying if it is one contiguous box, else it packs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Bools, Ints, cut
from starling.weightsync.plan.layout import ALIGNMENT, Box, aligned
from starling.weightsync.plan.moves import MAX_TRANSFERS, Bucket, Moves, PieceIndex, Transfer, column

DIRECT_BYTES: Final = 64 << 10
"""Smaller boxes are packed together: a separate message would cost more than the copy."""
BUCKETS_PER_SOURCE: Final = 4
"""Maximum number of buckets in flight from one source to one destination rank."""
MAX_ROWS: Final = 1 << 26
"""Maximum number of transfers into one rank."""
MAX_BOXES: Final = 1 << 20
"""Maximum number of distinct boxes among them."""


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a packed box."""
    strides = [1] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * size[dim + 1]
    return tuple(strides)


def is_contiguous(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box with these strides, in elements, is row-major without gaps."""
    expected = 1
    for n, stride in zip(reversed(size), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return 0 in size  # an empty box is contiguous
        expected *= n
    return True


def cut_segments(direct: Iterable[bool]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Cut a bucket into segments, given which of its boxes are received in place.

    Returns:
        Number of boxes of each segment, and which segments are received in place.
    """
    counts: list[int] = []
    kinds: list[bool] = []
    for one in direct:
        if one or not kinds or kinds[-1]:
            counts.append(1)
            kinds.append(one)
        else:
            counts[-1] += 1
    return tuple(counts), tuple(kinds)


def payload_bytes(sizes: Sequence[int]) -> int:
    """Return the length of a payload of blocks of these sizes, without padding after the last."""
    return sum(map(aligned, sizes[:-1])) + sizes[-1] if sizes else 0


def packed_bytes(sizes: Sequence[int], counts: Sequence[int], direct: Sequence[bool]) -> int:
    """Return the buffer size for all segments except the direct ones.

    Args:
        sizes: of each box, in bytes.
        counts: number of boxes of each segment.
        direct: the segments that need no buffer.
    """
    total = first = 0
    for count, one in zip(counts, direct, strict=True):
        if not one:
            total += aligned(payload_bytes(sizes[first : first + count]))
        first += count
    return total


def most_at_once(sizes: Iterable[int], num_buckets: int) -> int:
    """Return the most memory that buckets of these `sizes` take while `num_buckets` of them are in flight."""
    return sum(sorted(sizes, reverse=True)[:num_buckets])


@dataclass(frozen=True, eq=False)
class Rows:
    """All transfers into one destination rank, ordered by source rank, then by destination shard and offset."""

    source_rank: Ints
    source_shard: Ints
    destination_shard: Ints
    part: Ints
    """Index into `boxes`."""
    size_bytes: Ints
    alone: Bools
    """Whether the transfer has its own bucket: parts of a box larger than a bucket do, to keep their alignment."""
    boxes: tuple[Box, ...]


class Buckets(Sequence[Bucket]):
    """The buckets of one destination rank, in the order in which it reads them."""

    def __init__(self, rows: Rows, rank: int, begins: Ints, ends: Ints) -> None:
        self.rows, self.rank, self.begins, self.ends = rows, rank, begins, ends
        self._sizes = np.concatenate([[0], np.cumsum(rows.size_bytes)])
        self._extents = np.concatenate([[0], np.cumsum(aligned_sizes(rows.size_bytes))])

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, index: int) -> Bucket: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Bucket, ...]: ...
    def __getitem__(self, index: int | slice) -> Bucket | tuple[Bucket, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        begin, end = int(self.begins[index]), int(self.ends[index])
        rows, boxes = self.rows, self.rows.boxes
        return Bucket(
            source_rank=int(rows.source_rank[begin]),
            destination_rank=self.rank,
            transfers=tuple(
                Transfer(source_shard=source, destination_shard=destination, box=boxes[part])
                for source, destination, part in zip(
                    rows.source_shard[begin:end].tolist(),
                    rows.destination_shard[begin:end].tolist(),
                    rows.part[begin:end].tolist(),
                    strict=True,
                )
            ),
            size_bytes=int(self._sizes[end] - self._sizes[begin]),
            extent_bytes=int(self._extents[end] - self._extents[begin]),
        )

    @property
    def source_ranks(self) -> Ints:
        """Source rank of each bucket."""
        ranks: Ints = self.rows.source_rank[self.begins]
        return ranks

    @property
    def size_bytes(self) -> Ints:
        """Payload of each bucket."""
        sizes: Ints = self._sizes[self.ends] - self._sizes[self.begins]
        return sizes


def aligned_sizes(sizes: Ints) -> Ints:
    """Round sizes in bytes up to multiples of `ALIGNMENT`."""
    return -(-sizes // ALIGNMENT) * ALIGNMENT


def expand(classes: Sequence[Moves], source: PieceIndex, destination: PieceIndex, rank: int, limit: int) -> Buckets:
    """Return the buckets of destination rank `rank`, each of at most `limit` bytes.

    Buckets are ordered round-robin over the sources, and each destination rank begins with another source.

    Raises:
        WeightsError: more transfers than `MAX_ROWS`.
    """
    rows = _rows(classes, source, destination, rank, limit)
    begins = _bucket_begins(rows, limit)
    ends = np.append(begins[1:], len(rows.part))
    sources = rows.source_rank[begins] if len(begins) else begins
    turn = np.arange(len(begins)) - np.searchsorted(sources, sources, side="left")
    order = np.lexsort(((sources - rank) % source.num_ranks, turn))
    return Buckets(rows, rank, begins[order], ends[order])


def _rows(classes: Sequence[Moves], source: PieceIndex, destination: PieceIndex, rank: int, limit: int) -> Rows:
    boxes: list[Box] = []
    blocks: list[tuple[Ints, ...]] = []
    first_destination = destination.first_pieces(rank)
    num_rows = num_boxes = 0
    for moves in classes:
        first, last = column(moves.move_begins)[rank : rank + 2].tolist()
        members = np.arange(moves.num_members)[:, None]
        num_cuts = int((moves.part_bytes[column(moves.move_parts)[first:last]] // limit + 1).sum())
        num_rows, num_boxes = num_rows + len(members) * num_cuts, num_boxes + num_cuts
        if num_rows > MAX_ROWS or num_boxes > MAX_BOXES:
            raise WeightsError(
                f"Rank {rank} would take {num_rows} transfers of {num_boxes} boxes, more than {MAX_ROWS} of "
                f"{MAX_BOXES}; use larger buckets."
            )
        if first == last or not len(members):
            continue
        origin, whole = _cut_parts(moves, np.arange(first, last), limit, boxes)
        part = np.arange(len(boxes) - len(origin), len(boxes))
        volume = np.array([box.volume for box in boxes[len(boxes) - len(origin) :]], np.int64)
        holders = moves.holders(origin[None, :], members)
        shape = holders.shape
        pieces = first_destination[column(moves.destination_tensors)][:, None] + column(moves.move_pieces)[origin]
        columns = (
            column(moves.holder_ranks)[holders],
            column(moves.source_tensors)[:, None],
            column(moves.holder_pieces)[holders],
            pieces,
            part,
            volume * moves.item_bytes,
            ~whole,
        )
        blocks.append(tuple(np.broadcast_to(values, shape).reshape(-1) for values in columns))
    if not blocks:
        none = np.zeros(0, np.int64)
        return Rows(none, none, none, none, none, none.astype(bool), ())
    source_rank, tensor, piece, into, part, size_bytes, alone = map(np.concatenate, zip(*blocks, strict=True))
    into = destination.shards(rank, into)
    order = np.lexsort((into, source_rank))
    source_rank = source_rank[order]
    shard = piece[order]
    tensor = tensor[order]
    ranks, begins = np.unique(source_rank, return_index=True)
    for one, begin, end in zip(ranks.tolist(), begins, [*begins[1:], len(order)], strict=True):
        pieces = source.first_pieces(one)[tensor[begin:end]] + shard[begin:end]
        shard[begin:end] = source.shards(one, pieces)
    return Rows(
        source_rank, shard, into[order], part[order], size_bytes[order], alone[order].astype(bool), tuple(boxes)
    )


def _cut_parts(moves: Moves, indices: Ints, limit: int, boxes: list[Box]) -> tuple[Ints, Bools]:
    """Append the boxes of each move to `boxes`, cut to `limit` bytes; return the move of each, and if it is uncut."""
    origin: list[int] = []
    whole: list[bool] = []
    parts = column(moves.move_parts)[indices]
    for index, (offset, size) in zip(indices.tolist(), moves.boxes[parts].tolist(), strict=True):
        before = len(boxes)
        boxes.extend(cut(Box(offset=tuple(offset), size=tuple(size)), limit // moves.item_bytes))
        num_parts = len(boxes) - before
        origin += [index] * num_parts
        whole += [num_parts == 1] * num_parts
    return np.array(origin, np.int64), np.array(whole, bool)


def _bucket_begins(rows: Rows, limit: int) -> Ints:
    """Fill buckets in order, and return the first row of each."""
    if not len(rows.part):
        return np.zeros(0, np.int64)
    ends = np.cumsum(aligned_sizes(rows.size_bytes))
    # A bucket ends at the next change of source, and before and after a transfer that has its own bucket.
    barrier = np.zeros(len(ends) + 1, bool)
    barrier[1:-1] = np.diff(rows.source_rank) != 0
    barrier[:-1] |= rows.alone
    barrier[1:] |= rows.alone
    barrier[-1] = True
    walls = np.flatnonzero(barrier)
    begins: list[int] = []
    begin, filled, wall = 0, 0, 0
    while begin < len(ends):
        begins.append(begin)
        while walls[wall] <= begin:
            wall += 1
        end = min(int(walls[wall]), begin + MAX_TRANSFERS, int(np.searchsorted(ends, filled + limit, side="right")))
        begin, filled = end, int(ends[end - 1])
    return np.array(begins, np.int64)
