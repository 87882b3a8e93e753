"""Whether buckets bring what a destination rank needs: every element of every shard, once, from the right piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.boxes import Ints, first_overlap, gap_in, intersection
from starling.weightsync.expand import Buckets
from starling.weightsync.layout import Box, Layout, Piece, pieces_of
from starling.weightsync.moves import Bucket

_SEVERAL = -2
"""Instead of a number: the names of a source piece lead to several tensors of the destination."""


@dataclass(frozen=True)
class _Corners:
    """Boxes as arrays; those with fewer dims than others have further ones of length 1."""

    begin: Ints
    end: Ints
    num_dims: Ints

    @staticmethod
    def of(boxes: Sequence[Box], num_dims: int) -> _Corners:
        offset = [(*box.offset, *(0,) * (num_dims - len(box.offset))) for box in boxes]
        size = [(*box.size, *(1,) * (num_dims - len(box.size))) for box in boxes]
        begin = np.array(offset, np.int64).reshape(len(boxes), num_dims)
        lengths = np.array(size, np.int64).reshape(len(boxes), num_dims)
        return _Corners(begin, begin + lengths, np.array([len(box.offset) for box in boxes], np.int64))

    def take(self, rows: Ints) -> _Corners:
        return _Corners(self.begin[rows], self.end[rows], self.num_dims[rows])

    def outside(self, outer: _Corners) -> Ints:
        """Return the rows whose box is not inside that of `outer`."""
        inside = (self.begin >= outer.begin).all(axis=1) & (self.end <= outer.end).all(axis=1)
        return np.flatnonzero(~(inside & (self.begin <= self.end).all(axis=1) & (self.num_dims == outer.num_dims)))


def check_buckets(
    buckets: Sequence[Bucket],
    pieces: Mapping[int, Sequence[Piece]],
    destination: Layout,
    rank: int,
    *,
    names: tuple[str, str],
) -> None:
    """Check that `buckets` fill every shard of `rank` of `destination` exactly once.

    Args:
        buckets: what the rank reads.
        pieces: what each source rank holds, in the order of its shards.
        destination: the layout that they are for.
        rank: the destination rank.
        names: of source and destination, for messages.

    Raises:
        WeightsError: naming the tensor and the box at fault.
    """
    wanted = pieces_of(destination, rank)
    source_rank, source_shard, into, part, boxes = _rows(buckets)
    ranks = np.unique(source_rank).tolist()
    for one in ranks:
        if one not in pieces:
            raise WeightsError(f"The plan reads from rank {one} of {names[0]}, which offers nothing.")
    held = [piece for one in ranks for piece in pieces[one]]
    counts = np.array([len(pieces[one]) for one in ranks], np.int64)
    at = np.searchsorted(ranks, source_rank)
    if ((source_shard < 0) | (source_shard >= counts[at]) | (into < 0) | (into >= len(wanted))).any():
        raise WeightsError(f"The plan names a shard that {names[0]} or {names[1]} does not have.")
    taken = source_shard + (np.cumsum(counts) - counts)[at]
    num_dims = max((len(box.offset) for box in (*boxes, *(p.box for p in held), *(p.box for p in wanted))), default=0)
    moved = _Corners.of(boxes, num_dims).take(part)
    sources, targets = (_Corners.of([piece.box for piece in some], num_dims) for some in (held, wanted))
    wrong = np.concatenate(
        [_unlike(held, wanted, taken, into), moved.outside(sources.take(taken)), moved.outside(targets.take(into))]
    )
    if len(wrong):
        row = int(wrong.min())
        piece, filled = held[taken[row]], wanted[into[row]]
        raise WeightsError(
            f"The plan moves {boxes[part[row]]} of {piece.names[0]} ({piece.dtype}, box {piece.box}) "
            f"into {filled.names[0]} ({filled.dtype}, box {filled.box}); plan again."
        )
    _check_cover(wanted, into, moved)


def _rows(buckets: Sequence[Bucket]) -> tuple[Ints, Ints, Ints, Ints, Sequence[Box]]:
    """Return source rank, source shard, destination shard and box number of every transfer, and the boxes."""
    if isinstance(buckets, Buckets):
        rows = buckets.rows
        return rows.source_rank, rows.source_shard, rows.destination_shard, rows.part, rows.boxes
    table = [(b.source_rank, t.source_shard, t.destination_shard) for b in buckets for t in b.transfers]
    columns = np.array(table, np.int64).reshape(-1, 3).T
    boxes = [transfer.box for bucket in buckets for transfer in bucket.transfers]
    return columns[0], columns[1], columns[2], np.arange(len(boxes)), boxes


def _unlike(held: Sequence[Piece], wanted: Sequence[Piece], taken: Ints, into: Ints) -> Ints:
    """Return the rows that move from one tensor into another, or between element types."""
    numbers: dict[tuple[str, ...], int] = {}
    of_wanted = np.array([numbers.setdefault((*p.names, p.dtype), len(numbers)) for p in wanted], np.int64)
    by_name = {(name, key[-1]): number for key, number in numbers.items() for name in key[:-1]}
    of_held = np.zeros(len(held), np.int64)
    for index, piece in enumerate(held):
        found = {by_name.get((name, piece.dtype), -1) for name in piece.names} - {-1}
        of_held[index] = _SEVERAL if len(found) > 1 else found.pop() if found else -1
    differ = np.flatnonzero(of_held[taken] != of_wanted[into])
    unlike = [
        row
        for row in differ.tolist()
        if of_held[taken[row]] != _SEVERAL
        or held[taken[row]].dtype != wanted[into[row]].dtype
        or set(held[taken[row]].names).isdisjoint(wanted[into[row]].names)
    ]
    return np.array(unlike, np.int64)


def _check_cover(wanted: Sequence[Piece], into: Ints, moved: _Corners) -> None:
    """Raise unless the boxes, all inside their shards, are disjoint and make up every shard."""
    overlap = first_overlap(moved.begin, moved.end, into)
    if overlap is not None:
        one, other = (_box(moved, row) for row in overlap)
        raise WeightsError(
            f"Tensor {wanted[into[overlap[0]]].names[0]}: box {intersection(one, other)} would be delivered twice."
        )
    missing = np.array([piece.box.volume for piece in wanted], np.int64)
    np.subtract.at(missing, into, (moved.end - moved.begin).prod(axis=1, dtype=np.int64))
    if missing.any():
        shard = int(np.flatnonzero(missing)[0])
        box, mine = wanted[shard].box, into == shard
        num_dims = len(box.offset)
        gap = gap_in(box, moved.begin[mine, :num_dims], moved.end[mine, :num_dims])
        raise WeightsError(f"Tensor {wanted[shard].names[0]}: box {gap} has no source.")


def _box(corners: _Corners, row: int) -> Box:
    num_dims = int(corners.num_dims[row])
    begin, end = corners.begin[row, :num_dims], corners.end[row, :num_dims]
    return Box(offset=tuple(begin.tolist()), size=tuple((end - begin).tolist()))
