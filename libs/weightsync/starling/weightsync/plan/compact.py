"""Compact layouts: the columnar form that the planner computes with.

A model has many tensors but few ways in which they are split among the ranks: a *split* is one such way, as arrays, and
each tensor of a `CompactLayout` refers to one. A layout of shards (`layout.Layout`) is converted by `splits_of`; one
that follows from a model and a parallelism alone is made in this form directly, so that its size depends on the number
of patterns and not on the number of shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.layout import ALIGNMENT, Box, Layout, Place, TensorSpec, check_specs, encode, item_bytes


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """The boxes of a tensor that each rank holds. Rows are in the order of the ranks' shards."""

    shape: tuple[int, ...]
    rank: Ints
    """Rank that holds the box, ascending; shape (boxes,)."""
    offset: Ints
    """First element per dim; shape (boxes, dims)."""
    size: Ints
    """Elements per dim; shape (boxes, dims)."""

    @cached_property
    def key(self) -> bytes:
        """Key that is equal for equal splits only."""
        columns = (np.array(self.shape, np.int64), self.rank, self.offset, self.size)
        return b"".join(column.astype("<i8").tobytes() for column in (np.array([len(self.shape)]), *columns))

    @cached_property
    def volume(self) -> Ints:
        """Number of elements of each box."""
        volume: Ints = self.size.prod(axis=1, dtype=np.int64)
        return volume

    @cached_property
    def piece(self) -> Ints:
        """Number of each box among its rank's boxes of this tensor, from 0."""
        piece: Ints = np.arange(len(self.rank)) - np.searchsorted(self.rank, self.rank, side="left")
        return piece

    def counts(self, num_ranks: int) -> Ints:
        """Return the number of boxes of each rank."""
        return np.bincount(self.rank, minlength=num_ranks)

    def box(self, row: int) -> Box:
        """Return one box."""
        return Box(offset=tuple(self.offset[row].tolist()), size=tuple(self.size[row].tolist()))


@dataclass(frozen=True, eq=False)
class CompactLayout:
    """All shards of a replica: a rank's shards are its boxes of the first tensor, then those of the second, and so on.

    If a rank keeps them in another order, `orders` has it.
    """

    replica: str
    tensors: tuple[TensorSpec, ...]
    places: tuple[Place, ...]
    """Location of each rank."""
    splits: tuple[TensorSplit, ...]
    split_of: Ints
    """Index into `splits` of each tensor; a tied tensor that owns no memory has a split without boxes."""
    orders: Mapping[int, Ints] = field(default_factory=dict)
    """For some ranks, the shard index of each box in the order above."""
    base: str = ""
    """As in `Layout`."""

    @cached_property
    def item_bytes(self) -> Ints:
        """Bytes of one element of each tensor."""
        return np.array([item_bytes(spec) for spec in self.tensors], np.int64)

    @cached_property
    def counts(self) -> Ints:
        """Number of boxes that each rank holds of a tensor of each split; shape (splits, ranks)."""
        counts = np.zeros((len(self.splits), len(self.places)), np.int64)
        for index, split in enumerate(self.splits):
            counts[index] = split.counts(len(self.places))
        return counts

    @cached_property
    def piece_bytes(self) -> Ints:
        """Size of all pieces of each rank, each padded to a multiple of `ALIGNMENT`; shape (ranks,)."""
        kinds, members = np.unique(np.stack([self.split_of, self.item_bytes]), axis=1, return_counts=True)
        total = np.zeros(len(self.places), np.int64)
        for (index, size), count in zip(kinds.T.tolist(), members.tolist(), strict=True):
            split = self.splits[index]
            np.add.at(total, split.rank, -(-split.volume * size // ALIGNMENT) * ALIGNMENT * count)
        return total

    @cached_property
    def digest(self) -> str:
        """Digest, equal for layouts with the same boxes of the same tensors at the same places in the same order."""
        state = xxhash.xxh3_128(self.base.encode())
        for spec in self.tensors:
            state.update(repr((spec.name, spec.shape, spec.dtype, spec.same_as)).encode())
        for place in self.places:
            state.update(encode(place))
        for split in self.splits:
            state.update(split.key)
        state.update(self.split_of.astype("<i8").tobytes())
        for rank in sorted(self.orders):
            state.update(repr(rank).encode() + self.orders[rank].astype("<i8").tobytes())
        return state.hexdigest()


def to_compact(layout: Layout) -> CompactLayout:
    """Convert `layout`, which must pass `check_layout`, to columnar form."""
    entries: list[tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]] = [
        ([], [], []) for _ in layout.tensors
    ]
    orders: dict[int, Ints] = {}
    for rank, held in enumerate(layout.ranks):
        last, ordered = 0, True
        for shard in held.shards:
            ranks, offsets, sizes = entries[shard.tensor]
            ranks.append(rank)
            offsets.append(shard.box.offset)
            sizes.append(shard.box.size)
            ordered, last = ordered and shard.tensor >= last, shard.tensor
        if not ordered:
            orders[rank] = np.argsort([shard.tensor for shard in held.shards], kind="stable")
    known: dict[object, int] = {}
    splits: list[TensorSplit] = []
    split_of = np.zeros(len(layout.tensors), np.int64)
    for index, (spec, (ranks, offsets, sizes)) in enumerate(zip(layout.tensors, entries, strict=True)):
        key = (spec.shape, tuple(ranks), tuple(offsets), tuple(sizes))
        if key not in known:
            known[key] = len(splits)
            splits.append(make_tensor_split(spec.shape, ranks, offsets, sizes))
        split_of[index] = known[key]
    places = tuple(held.place for held in layout.ranks)
    return CompactLayout(layout.replica, layout.tensors, places, tuple(splits), split_of, orders, layout.base)


def make_tensor_split(shape: tuple[int, ...], ranks: object, offsets: object, sizes: object) -> TensorSplit:
    """Make a split from any array-likes; `ranks` ascend."""
    rank: Ints = np.array(ranks, np.int64).reshape(-1)
    dims = (len(rank), len(shape))
    return TensorSplit(shape, rank, np.array(offsets, np.int64).reshape(dims), np.array(sizes, np.int64).reshape(dims))


def check_compact(layout: CompactLayout) -> None:
    """Check a compact layout as `check_layout` checks a layout of shards.

    Raises:
        WeightsError: naming the replica and the tensor.
    """
    check_specs(layout.replica, layout.tensors)
    if len(layout.split_of) != len(layout.tensors):
        raise WeightsError(
            f"{layout.replica} has {len(layout.tensors)} tensors but {len(layout.split_of)} entries in split_of."
        )
    sound: set[int] = set()
    for spec, index in zip(layout.tensors, layout.split_of.tolist(), strict=True):
        if not 0 <= index < len(layout.splits):
            raise WeightsError(f"Tensor {spec.name} of {layout.replica} has split {index} of {len(layout.splits)}.")
        split = layout.splits[index]
        if split.shape != spec.shape:
            raise WeightsError(
                f"Tensor {spec.name} of {layout.replica} has shape {spec.shape}, its split {split.shape}."
            )
        if spec.same_as and len(split.rank):
            raise WeightsError(f"Tensor {spec.name} of {layout.replica} is tied and may have no shards.")
        if index not in sound:
            _check_split(layout, spec, split)
            sound.add(index)


def _check_split(layout: CompactLayout, spec: TensorSpec, split: TensorSplit) -> None:
    rank = split.rank
    if len(rank) and (rank[0] < 0 or rank[-1] >= len(layout.places) or (np.diff(rank) < 0).any()):
        raise WeightsError(
            f"The ranks that hold {spec.name} of {layout.replica} do not ascend below {len(layout.places)}."
        )
    outside = (split.offset < 0) | (split.size < 0) | (split.offset + split.size > np.array(split.shape, np.int64))
    rows = np.flatnonzero(outside.any(axis=1))
    if len(rows):
        row = int(rows[0])
        raise WeightsError(
            f"Tensor {spec.name} of rank {rank[row]} of {layout.replica}: box {split.box(row)} leaves shape "
            f"{spec.shape}."
        )
