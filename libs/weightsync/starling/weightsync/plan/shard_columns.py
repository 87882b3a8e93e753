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
        held, index = np.unique(self.tensor, return_inverse=True)  # few tensors, perhaps, of a peer's many
        extents = [shapes[tensor] for tensor in held.tolist()]
        extent = np.array(extents, np.int64).reshape(len(held), self.offset.shape[1])[index]
        items = item_bytes[self.tensor]
        outside = (self.offset < 0) | (self.offset > extent) | (self.size < 0) | (self.size > extent - self.offset)
        outside |= (self.strides < 0) | (self.strides > most_bytes)
        # In floats, which do not overflow, and are exact up to sizes that are refused.
        span = (np.maximum(self.size - 1, 0).astype(np.float64) * self.strides).sum(axis=1)
        broken = (self.offset_bytes < 0) | (self.offset_bytes % items != 0)
        broken |= self.offset_bytes + span * items > most_bytes
        rows: Ints = self.row[outside.any(axis=1) | broken]
        return rows

    def volumes(self, num_tensors: int, *, distinct_of: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float64]:
        """Return the elements of the boxes of each tensor, in floats; shape (tensors,).

        Args:
            num_tensors: of the layout.
            distinct_of: whether only the distinct boxes of each tensor count; shape (tensors,). Without it, all boxes.
        """
        rows = np.arange(len(self.tensor))
        if distinct_of is not None:
            rows = np.flatnonzero(distinct_of[self.tensor])
            columns = np.column_stack([self.size[rows], self.offset[rows], self.tensor[rows]])
            order = np.lexsort(columns.T)
            differs = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
            rows = rows[order[np.concatenate([[True], differs])]] if len(rows) else rows
        volume = self.size[rows].prod(axis=1, dtype=np.float64)
        return np.bincount(self.tensor[rows], volume, minlength=num_tensors).astype(np.float64)


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
