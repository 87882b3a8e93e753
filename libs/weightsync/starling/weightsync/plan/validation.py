"""Validation of received plans: the form of their columns, and the coverage of a destination by their buckets.

`check_index` and `check_moves` check lengths and ranges: a plan that passes can be expanded without an index error.
`check_buckets` checks that every element of every shard of a rank is delivered once, from the right piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Ints, first_overlap, gap_in, intersection
from starling.weightsync.plan.buckets import Buckets
from starling.weightsync.plan.layout import ITEM_BYTES, Box, Layout, ShardPiece, pieces_of
from starling.weightsync.plan.moves import Bucket, Moves, PieceIndex, column

MAX_RANKS: Final = 1 << 20
MAX_DIMS: Final = 32
MAX_PART_BYTES: Final = 1 << 50
MAX_CLASS_BYTES: Final = 1 << 58
_COLUMNS: Final = tuple(
    name for name in Moves.__struct_fields__ if name not in ("item_bytes", "num_dims", "part_boxes")
)


def check_index(index: PieceIndex, replica: str) -> None:
    """Check the index of one replica's shards.

    Raises:
        WeightsError: naming the replica.
    """
    width = 4 * index.num_ranks
    fits = 0 <= index.num_ranks <= MAX_RANKS and len(index.split_of) % 4 == 0
    fits = fits and (len(index.counts) % width == 0 if width else not index.counts)
    if not fits:
        raise WeightsError(f"The plan's index of {replica} is malformed.")
    counts = np.frombuffer(index.counts, "<i4").reshape(-1, index.num_ranks or 1)
    _check_range(column(index.split_of), len(counts) if width else MAX_RANKS, f"split of {replica}")
    # A count is a number of boxes; the sum over all tensors cannot overflow 8 bytes.
    if counts.min(initial=0) < 0:
        raise WeightsError(f"The plan's index of {replica} has a negative number of shards.")
    for rank, order in index.orders.items():
        _check_range(np.array([rank]), index.num_ranks, f"rank of {replica}")
        num_shards = int(index.first_pieces(rank)[-1])
        if len(order) != 4 * num_shards or not np.array_equal(np.sort(column(order)), np.arange(num_shards)):
            raise WeightsError(f"The plan's order of the shards of rank {rank} of {replica} is not a permutation.")


def check_moves(moves: Moves, source: PieceIndex, destination: PieceIndex) -> None:
    """Check the moves of one class against the indices of both replicas.

    Raises:
        WeightsError: naming the column.
    """
    if moves.item_bytes not in ITEM_BYTES.values() or not 0 <= moves.num_dims <= MAX_DIMS:
        raise WeightsError(f"The plan moves {moves.num_dims} dims of elements of {moves.item_bytes} bytes.")
    for name in _COLUMNS:
        if len(getattr(moves, name)) % 4:
            raise WeightsError(f"The plan's column {name} is cut off.")
    arrays = {name: column(getattr(moves, name)) for name in _COLUMNS}
    num_parts, num_moves = len(arrays["part_sources"]), len(arrays["move_parts"])
    num_holders, num_choices = len(arrays["holder_ranks"]), len(arrays["choice_sets"])
    for name, expected in (
        ("source_tensors", len(arrays["destination_tensors"])),
        ("holder_pieces", num_holders),
        ("move_pieces", num_moves),
        ("choice_sets", num_moves if num_choices else 0),
        ("choice_phases", num_choices),
        ("move_begins", destination.num_ranks + 1),
    ):
        if len(arrays[name]) != expected:
            raise WeightsError(f"The plan's column {name} has {len(arrays[name])} entries, expected {expected}.")
    if len(moves.part_boxes) != 16 * num_parts * moves.num_dims:
        raise WeightsError(f"The plan's boxes take {len(moves.part_boxes)} bytes for {num_parts} parts.")
    _check_parts(moves)
    _check_begins(arrays["holder_begins"], num_holders, "holder_begins")
    _check_begins(arrays["move_begins"], num_moves, "move_begins")
    if np.diff(arrays["holder_begins"]).min(initial=1) < 1:
        raise WeightsError("The plan reads a box that no rank holds.")
    num_sets = 0
    if num_choices:
        _check_begins(arrays["set_begins"], len(arrays["set_positions"]), "set_begins")
        num_sets = len(arrays["set_begins"]) - 1
    for name, end in (
        ("source_tensors", source.num_tensors),
        ("destination_tensors", destination.num_tensors),
        ("part_sources", len(arrays["holder_begins"]) - 1),
        ("holder_ranks", source.num_ranks),
        ("move_parts", num_parts),
        ("choice_sets", num_sets),
        ("choice_phases", 1 << 31),
        ("set_positions", 1 << 31),
    ):
        _check_range(arrays[name], end, name)
    _check_pieces(arrays["holder_pieces"], arrays["holder_ranks"], arrays["source_tensors"], source)
    ranks = np.repeat(np.arange(destination.num_ranks), np.diff(arrays["move_begins"]))
    _check_pieces(arrays["move_pieces"], ranks, arrays["destination_tensors"], destination)
    if num_choices:
        _check_choices(arrays)
    if float(moves.part_bytes[arrays["move_parts"]].sum(dtype=np.float64)) * moves.num_members > MAX_CLASS_BYTES:
        raise WeightsError(f"The plan moves more than {MAX_CLASS_BYTES} bytes for one class of tensors.")


def _check_parts(moves: Moves) -> None:
    boxes = moves.boxes
    volume = boxes[:, 1].astype(np.float64).prod(axis=1) * moves.item_bytes
    if (
        (boxes < 0).any()
        or (boxes[:, 1] < 1).any()
        or (boxes > MAX_PART_BYTES).any()
        or (volume > MAX_PART_BYTES).any()
    ):
        raise WeightsError("The plan moves a box that no tensor has.")


def _check_choices(arrays: dict[str, Ints]) -> None:
    """Check that every member of a set is a holder of each box that chooses from it."""
    begins = arrays["set_begins"]
    sizes = np.diff(begins)
    if (sizes[arrays["choice_sets"]] < 1).any():
        raise WeightsError("The plan chooses from an empty set of copies.")
    furthest = np.array([arrays["set_positions"][a:b].max(initial=0) for a, b in itertools.pairwise(begins)])
    num_holders = np.diff(arrays["holder_begins"])[arrays["part_sources"][arrays["move_parts"]]]
    if (furthest.astype(np.int64)[arrays["choice_sets"]] >= num_holders).any():
        raise WeightsError("The plan chooses a copy that does not exist.")


def _check_pieces(pieces: Ints, ranks: Ints, tensors: Ints, index: PieceIndex) -> None:
    """Check that each rank has the named box of each of the tensors."""
    counts = np.frombuffer(index.counts, "<i4").reshape(-1, index.num_ranks or 1)
    least = counts[np.unique(column(index.split_of)[tensors])].min(axis=0, initial=(1 << 31) - 1)
    if len(tensors) and ((pieces < 0) | (pieces >= least[ranks])).any():
        raise WeightsError("The plan names a shard that does not exist.")


def _check_begins(begins: Ints, count: int, name: str) -> None:
    if not len(begins) or begins[0] or begins[-1] != count or (np.diff(begins) < 0).any():
        raise WeightsError(f"The plan's column {name} does not ascend from 0 to {count}.")


def _check_range(values: Ints, end: int, name: str) -> None:
    if len(values) and (values.min() < 0 or values.max() >= end):
        raise WeightsError(f"The plan's column {name} has {values.min()} to {values.max()}, expected 0 to {end - 1}.")


_SEVERAL = -2
"""In place of a tensor number: the names of a source piece belong to several tensors of the destination."""


@dataclass(frozen=True)
class _Corners:
    """Boxes as arrays; those with fewer dims than others are padded with dims of length 1."""

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
    pieces: Mapping[int, Sequence[ShardPiece]],
    destination: Layout,
    rank: int,
    *,
    names: tuple[str, str],
) -> None:
    """Check that `buckets` fill every shard of `rank` of `destination` exactly once.

    Args:
        buckets: those that the rank reads.
        pieces: pieces of each source rank, in the order of its shards.
        destination: layout of the destination.
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


def _unlike(held: Sequence[ShardPiece], wanted: Sequence[ShardPiece], taken: Ints, into: Ints) -> Ints:
    """Return the rows that copy one tensor into another, or between element types."""
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


def _check_cover(wanted: Sequence[ShardPiece], into: Ints, moved: _Corners) -> None:
    """Raise unless the boxes, all inside their shards, are disjoint and cover every shard."""
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
