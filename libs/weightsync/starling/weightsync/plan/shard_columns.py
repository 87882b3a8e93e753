"""Columns of the shards of a layout, by which a million of them are checked at once.

A peer may send any numbers in a layout, and each check of one shard takes microseconds of the controller's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NO_TENSOR: Final = -1
"""In place of a number of dims: of a tensor that may have no shards."""


class BoxNumbers(Protocol):
    """The numbers of a `layout.Box`."""

    @property
    def offset(self) -> tuple[int, ...]:
        """First element per dim."""

    @property
    def size(self) -> tuple[int, ...]:
        """Elements per dim."""


class ShardNumbers(Protocol):
    """The numbers of a `layout.Shard`."""

    @property
    def tensor(self) -> int:
        """Index of its tensor."""

    @property
    def box(self) -> BoxNumbers:
        """Its box."""

    @property
    def offset_bytes(self) -> int:
        """Of its first element."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Per dim, in elements."""


@dataclass(frozen=True, eq=False)
class ShardColumns:
    """The shards of tensors with equally many dims, in the order of the ranks."""

    row: Ints
    """Number of the shard among all of the layout; shape (shards,)."""
    tensor: Ints
    """Shape (shards,)."""
    offset: Ints
    """Shape (shards, dims), as `size` and `strides`."""
    size: Ints
    strides: Ints
    offset_bytes: Ints
    """Shape (shards,)."""

    def unsound(self, shapes: Sequence[tuple[int, ...]], item_bytes: Ints, most_bytes: int) -> Ints:
        """Return the rows of the shards that may leave their tensor, or end beyond `most_bytes` of their storage."""
        extent = self._of_tensors(shapes)
        items = item_bytes[self.tensor]
        outside = (self.offset < 0) | (self.offset > extent) | (self.size < 0) | (self.size > extent - self.offset)
        outside |= (self.strides < 0) | (self.strides > most_bytes)
        # In floats, which do not overflow, and are exact up to sizes that are refused.
        span = (np.maximum(self.size - 1, 0).astype(np.float64) * self.strides).sum(axis=1)
        broken = (self.offset_bytes < 0) | (self.offset_bytes % items != 0)
        broken |= self.offset_bytes + span * items > most_bytes
        rows: Ints = self.row[outside.any(axis=1) | broken]
        return rows

    def volumes(self, num_tensors: int) -> npt.NDArray[np.float64]:
        """Return the elements of the boxes of each tensor, in floats; shape (tensors,)."""
        volume = self.size.prod(axis=1, dtype=np.float64)
        return np.bincount(self.tensor, volume, minlength=num_tensors).astype(np.float64)

    def digest_cost(
        self, shapes: Sequence[tuple[int, ...]], item_bytes: Ints, min_run_bytes: int
    ) -> npt.NDArray[np.float64]:
        """Return the bytes of each box, of which each contiguous run counts as `min_run_bytes` at least."""
        whole = np.ones(self.size.shape, np.bool_)  # whether all later dims of the box are those of its tensor
        whole[:, :-1] = (self.size == self._of_tensors(shapes))[:, 1:]
        whole = np.logical_and.accumulate(whole[:, ::-1], axis=1)[:, ::-1]
        run = np.where(whole, self.size, 1).prod(axis=1, dtype=np.float64)
        num_runs = np.where(whole, 1, self.size).prod(axis=1, dtype=np.float64) * (run > 0)
        cost: npt.NDArray[np.float64] = num_runs * np.maximum(run * item_bytes[self.tensor], min_run_bytes)
        return cost

    def distinct(self) -> Ints:
        """Return the indices of the distinct boxes of each tensor, each once."""
        columns = np.column_stack([self.size, self.offset, self.tensor])
        order = np.lexsort(columns.T)
        first = np.ones(len(order), np.bool_)
        first[1:] = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
        indices: Ints = order[first]
        return indices

    def _of_tensors(self, shapes: Sequence[tuple[int, ...]]) -> Ints:
        """Return the shape of the tensor of each shard; shape (shards, dims)."""
        held, index = np.unique(self.tensor, return_inverse=True)  # few tensors, perhaps, of a peer's many
        of_held = [shapes[tensor] for tensor in held.tolist()]
        extents: Ints = np.array(of_held, np.int64).reshape(len(held), self.offset.shape[1])[index]
        return extents


def shard_columns(shards: Sequence[ShardNumbers], num_dims: Ints) -> Iterator[ShardColumns]:
    """Yield shards by their number of dims, which `dims_of` returns, without those of `NO_TENSOR`.

    Raises:
        OverflowError: a number of 2^63 or more.
    """
    boxes = [shard.box for shard in shards]
    for dims in np.unique(num_dims[num_dims != NO_TENSOR]).tolist():
        row = np.flatnonzero(num_dims == dims)
        every = len(row) == len(shards)
        mine = shards if every else [shards[number] for number in row.tolist()]
        held = boxes if every else [boxes[number] for number in row.tolist()]
        yield ShardColumns(
            row,
            np.fromiter([shard.tensor for shard in mine], np.int64, len(mine)),
            _table([box.offset for box in held], dims),
            _table([box.size for box in held], dims),
            _table([shard.strides for shard in mine], dims),
            np.fromiter([shard.offset_bytes for shard in mine], np.int64, len(mine)),
        )


def dims_of(shards: Sequence[ShardNumbers], of_tensors: Sequence[int]) -> Ints:
    """Return the number of dims of each shard, by those of the tensors; `NO_TENSOR` where the shard has others."""
    num = len(of_tensors)
    dims = np.fromiter(
        [of_tensors[shard.tensor] if 0 <= shard.tensor < num else NO_TENSOR for shard in shards], np.int64, len(shards)
    )
    for lengths in (
        [len(shard.box.offset) for shard in shards],
        [len(shard.box.size) for shard in shards],
        [len(shard.strides) for shard in shards],
    ):
        dims[dims != np.fromiter(lengths, np.int64, len(shards))] = NO_TENSOR
    return dims


def _table(rows: Sequence[tuple[int, ...]], num_dims: int) -> Ints:
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * num_dims)
    return numbers.reshape(len(rows), num_dims)
