"""Moves: what a plan consists of, once per class of tensors, and the transfers and buckets that follow from them.

Tensors of one shape and element size, with one split at the source and one at the destination, form a class: all of
them move alike. A class is stored once, as `Moves`, in columns of raw little-endian integers, so that a plan is small,
is compared and sent as it is, and becomes arrays without copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final, Literal

import msgspec
import numpy as np

from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.layout import Box

MAX_TRANSFERS: Final = 1024
"""Maximum number of transfers in one bucket, which bounds the request for it."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One box that is copied from a source shard into a destination shard."""

    source_shard: int
    """Index into the source rank's shards."""
    destination_shard: int
    """Index into the destination rank's shards."""
    box: Box
    """In elements of the canonical tensor; inside both shards' boxes."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Transfers between one pair of ranks that travel together."""

    source_rank: int
    destination_rank: int
    transfers: tuple[Transfer, ...]
    size_bytes: int
    """Payload, without padding."""
    extent_bytes: int
    """Size of the bucket in a buffer, where each transfer starts at a multiple of `ALIGNMENT`."""


class Moves(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """The moves of every tensor of one class. Each bytes field is a column of 4-byte integers."""

    item_bytes: int
    """Size of one element."""
    num_dims: int
    source_tensors: bytes
    """The tensors of the class, by their index in the source's layout."""
    destination_tensors: bytes
    """The same tensors in the destination's layout, ascending."""
    part_boxes: bytes
    """Offset and size of each distinct box that moves: `num_dims` integers of 8 bytes each."""
    part_sources: bytes
    """Index of the source box that contains each part."""
    holder_begins: bytes
    """First holder of each source box, and the number of holders."""
    holder_ranks: bytes
    """Source ranks that hold a box, ascending within it."""
    holder_pieces: bytes
    """Number of the box among the rank's boxes of the tensor."""
    move_begins: bytes
    """First move into each destination rank, and the number of moves."""
    move_parts: bytes
    """Part of each move, ordered by destination rank and piece, and by offset within a piece."""
    move_pieces: bytes
    """Number of the filled box among the destination rank's boxes of the tensor."""
    choice_sets: bytes
    """Set of copies that each move chooses from. Empty if each source box has one holder."""
    choice_phases: bytes
    """Member of its set that serves each move of the first tensor; tensor n of the class takes the n-th after it."""
    set_begins: bytes
    """First member of each set, and the total number of members."""
    set_positions: bytes
    """The copies of each set, as positions among the holders of the box."""

    @cached_property
    def num_members(self) -> int:
        """Number of tensors of the class."""
        return len(self.destination_tensors) // 4

    @cached_property
    def boxes(self) -> Ints:
        """Offset and size of each part; shape (parts, 2, dims)."""
        return column(self.part_boxes, 8).reshape(len(self.part_sources) // 4, 2, self.num_dims)

    @cached_property
    def part_bytes(self) -> Ints:
        """Size of each part in bytes."""
        sizes: Ints = self.boxes[:, 1].prod(axis=1, dtype=np.int64) * self.item_bytes
        return sizes

    def holders(self, moves: Ints, members: Ints) -> Ints:
        """Return the holder that serves each move of each member of the class.

        Args:
            moves: indices of moves; any shape.
            members: positions of tensors in the class; broadcast against `moves`.
        """
        parts = column(self.move_parts)[moves]
        first = column(self.holder_begins)[column(self.part_sources)[parts]]
        if not self.choice_sets:
            return np.broadcast_to(first, np.broadcast_shapes(first.shape, members.shape))
        sets, begins = column(self.choice_sets)[moves], column(self.set_begins)
        turn = (column(self.choice_phases)[moves] + members) % (begins[sets + 1] - begins[sets])
        holders: Ints = first + column(self.set_positions)[begins[sets] + turn]
        return holders

    @cached_property
    def destination_ranks(self) -> Ints:
        """Destination rank of each move."""
        counts = np.diff(column(self.move_begins))
        return np.repeat(np.arange(len(counts)), counts)

    def filled(self) -> tuple[Ints, Ints]:
        """Return rank and size in bytes of each box that the moves of one tensor fill."""
        ranks, pieces = self.destination_ranks, column(self.move_pieces)
        first = np.ones(len(ranks), bool)
        first[1:] = (np.diff(ranks) != 0) | (np.diff(pieces) != 0)
        begins = np.flatnonzero(first)
        sizes = self.part_bytes[column(self.move_parts)]
        return ranks[begins], np.add.reduceat(sizes, begins) if len(begins) else sizes

    def sent(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield source rank and bytes of every move over all members, for each position in the sets of copies."""
        sizes = self.part_bytes[column(self.move_parts)]
        first = column(self.holder_begins)[column(self.part_sources)[column(self.move_parts)]]
        ranks = column(self.holder_ranks)
        if not self.choice_sets:
            yield ranks[first], sizes * self.num_members
            return
        sets, begins, positions = column(self.choice_sets), column(self.set_begins), column(self.set_positions)
        num_copies = np.diff(begins)[sets]
        phases = column(self.choice_phases)
        each, rest = self.num_members // num_copies, self.num_members % num_copies
        for turn in range(int(num_copies.max(initial=0))):
            counts = np.where(turn < num_copies, each + ((turn - phases) % num_copies < rest), 0)
            at = positions[begins[sets] + np.minimum(turn, num_copies - 1)]
            yield ranks[first + at], sizes * counts

    def into(self, rank: int) -> Moves:
        """Return the moves into one destination rank, renumbered."""
        begins = column(self.move_begins)
        some = slice(*begins[rank : rank + 2].tolist())
        parts, move_parts = np.unique(column(self.move_parts)[some], return_inverse=True)
        boxes, part_sources = np.unique(column(self.part_sources)[parts], return_inverse=True)
        holders, holder_begins = _ranges(column(self.holder_begins), boxes)
        sets, choice_sets = np.unique(column(self.choice_sets)[some], return_inverse=True)
        positions, set_begins = _ranges(column(self.set_begins), sets)
        return msgspec.structs.replace(
            self,
            part_boxes=packed(self.boxes[parts], 8),
            part_sources=packed(part_sources),
            holder_begins=packed(holder_begins),
            holder_ranks=packed(column(self.holder_ranks)[holders]),
            holder_pieces=packed(column(self.holder_pieces)[holders]),
            move_begins=packed(np.clip(begins - begins[rank], 0, len(move_parts))),
            move_parts=packed(move_parts),
            move_pieces=packed(column(self.move_pieces)[some]),
            choice_sets=packed(choice_sets),
            choice_phases=packed(column(self.choice_phases)[some]),
            set_begins=packed(set_begins) if self.choice_sets else b"",
            set_positions=packed(column(self.set_positions)[positions]),
        )


class PieceIndex(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """Positions of the boxes of each tensor among the shards of each rank of one replica."""

    num_ranks: int
    split_of: bytes
    """Split of each tensor."""
    counts: bytes
    """Number of boxes that a rank holds of a tensor with this split: a row per split, a column per rank."""
    orders: dict[int, bytes]
    """For some ranks, the shard index of each box in the order of the tensors; the others keep that order."""

    @cached_property
    def num_tensors(self) -> int:
        """Number of tensors of the layout."""
        return len(self.split_of) // 4

    def first_pieces(self, rank: int) -> Ints:
        """Return the number of boxes that `rank` holds of the tensors before each tensor, and last of all tensors."""
        held = column(self.counts).reshape(-1, self.num_ranks)[:, rank]
        return np.concatenate([[0], np.cumsum(held[column(self.split_of)], dtype=np.int64)])

    def shards(self, rank: int, pieces: Ints) -> Ints:
        """Return the shard indices of boxes of `rank`, numbered in the order of the tensors."""
        order = self.orders.get(rank)
        return pieces if order is None else column(order)[pieces]


def _ranges(begins: Ints, selected: Ints) -> tuple[Ints, Ints]:
    """Return the indices in the selected ranges between `begins`, and the new begin of each range."""
    if not len(selected):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    counts = begins[selected + 1] - begins[selected]
    ends = np.cumsum(counts)
    indices = np.arange(ends[-1]) + np.repeat(begins[selected] - (ends - counts), counts)
    return indices, np.concatenate([[0], ends])


def column(data: bytes, width: Literal[4, 8] = 4) -> Ints:
    """Return a column as an array of 8-byte integers."""
    return np.frombuffer(data, f"<i{width}").astype(np.int64, copy=False)


def packed(values: Ints, width: Literal[4, 8] = 4) -> bytes:
    """Return an array as a column."""
    return values.astype(f"<i{width}").tobytes()
