"""The wire form of a delta: what its bytes mean, how large they are, and which form each block takes.

An encoded piece is a header of 64 bytes and, by its form, nothing (`same`: no element changed), the bytes of the piece
(`dense`), or a `delta`: sections one after the other, each padded with zeros to 8 bytes, all numbers little-endian:

    directory   u32 per block of 65,536 elements: kind << 24 | number of changed elements
    run counts  u32 per block of kind RUNS: how many runs of changed elements it has
    runs        u16 start, u16 length - 1, per run
    wide        u16 per changed element of the blocks of kind WIDE: its place in the block
    cells       u8 per cell of 256 elements of the blocks of kind NARROW: how many of them changed
    narrow      u8 per changed element of the blocks of kind NARROW: its place in the cell
    bitmaps     1 bit per element of the blocks of kind BITMAP, the lowest bit first
    values      the changed elements in order of position

Within every section blocks come in order. The last block of a piece may be short: it has only the cells and the bitmap
bytes that it needs. Elements are opaque bits: nothing here knows numbers, so NaN and -0.0 are bits like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from starling.weightsync.delta.header import HEADER, check_items

Numbers = npt.NDArray[np.int64]

BLOCK: Final = 65536
CELL: Final = 256
CELLS: Final = BLOCK // CELL
WIDE_TYPE: Final = np.dtype("<u2")
COUNT_TYPE: Final = np.dtype("<u4")


class Kind(IntEnum):
    """How the positions of one block are written."""

    SAME = 0
    RUNS = 1
    WIDE = 2
    NARROW = 3
    BITMAP = 4


CHANGED_KINDS: Final = (Kind.RUNS, Kind.WIDE, Kind.NARROW, Kind.BITMAP)
"""Of blocks in which something changed."""


class Section(NamedTuple):
    """Where a section lies, in bytes from the start of the encoded form."""

    offset: int
    size: int


class Sections(NamedTuple):
    """Where everything lies in a delta, and where it ends."""

    directory: Section
    run_counts: Section
    runs: Section
    wide: Section
    cells: Section
    narrow: Section
    bitmaps: Section
    values: Section
    size_bytes: int


@dataclass(frozen=True)
class Directory:
    """The blocks of one piece: their kinds and counts, from which every offset follows."""

    num_elements: int
    item_bytes: int
    kinds: Numbers
    """`Kind` of each block."""
    counts: Numbers
    """Changed elements of each block."""
    run_counts: Numbers
    """Runs of each block of kind RUNS, 0 for the others."""

    @cached_property
    def first(self) -> Numbers:
        """Changed elements in blocks of each kind before each block, shape (kinds, blocks + 1)."""
        of_kind = np.where(self.kinds == np.arange(len(Kind))[:, None], self.counts, 0)
        return sums_before(of_kind)

    @cached_property
    def first_run(self) -> Numbers:
        """Runs before each block."""
        return sums_before(self.run_counts)

    @cached_property
    def first_cell(self) -> Numbers:
        """Cells of NARROW blocks before each block."""
        return sums_before(np.where(self.kinds == Kind.NARROW, -(-block_sizes(self.num_elements) // CELL), 0))

    @cached_property
    def first_bitmap_byte(self) -> Numbers:
        """Bytes of bitmaps before each block."""
        return sums_before(np.where(self.kinds == Kind.BITMAP, -(-block_sizes(self.num_elements) // 8), 0))

    @cached_property
    def first_value(self) -> Numbers:
        """Changed elements before each block."""
        return sums_before(self.counts)

    @cached_property
    def sections(self) -> Sections:
        """Where everything lies."""
        changed = self.first[:, -1].tolist()
        sizes = (
            COUNT_TYPE.itemsize * len(self.kinds),
            COUNT_TYPE.itemsize * int(np.count_nonzero(self.kinds == Kind.RUNS)),
            4 * int(self.first_run[-1]),
            WIDE_TYPE.itemsize * changed[Kind.WIDE],
            int(self.first_cell[-1]),
            changed[Kind.NARROW],
            int(self.first_bitmap_byte[-1]),
            self.item_bytes * self.num_changed,
        )
        offsets = np.cumsum((HEADER.size, *map(padded, sizes))).tolist()
        parts = (Section(offset, size) for offset, size in zip(offsets[:-1], sizes, strict=True))
        return Sections._make((*parts, offsets[-1]))

    @property
    def num_changed(self) -> int:
        """Changed elements of all blocks."""
        return int(self.first_value[-1])


def sums_before(numbers: npt.NDArray[Any]) -> Numbers:
    """Return, along the last dim, the sum of the numbers before each, and of all of them."""
    sums = np.zeros((*numbers.shape[:-1], numbers.shape[-1] + 1), np.int64)
    np.cumsum(numbers, axis=-1, out=sums[..., 1:])
    return sums


def padded(size: int) -> int:
    """Return `size` rounded up to 8 bytes."""
    return -(-size // 8) * 8


def num_blocks(num_elements: int) -> int:
    """Return how many blocks a piece has."""
    return -(-num_elements // BLOCK)


def block_sizes(num_elements: int) -> Numbers:
    """Return the number of elements of each block: all are whole but perhaps the last."""
    sizes = np.full(num_blocks(num_elements), BLOCK, np.int64)
    if num_elements % BLOCK:
        sizes[-1] = num_elements % BLOCK
    return sizes


def choose_kinds(num_elements: int, counts: Numbers, largest_cells: Numbers, runs: Numbers) -> Numbers:
    """Return the kind of each block that takes the fewest bytes.

    Args:
        num_elements: of the piece.
        counts: changed elements of each block.
        largest_cells: changed elements of the fullest cell of each block; 256 of them do not fit a NARROW count.
        runs: runs of each block; at least `counts` where nobody looked for them.
    """
    sizes = block_sizes(num_elements)
    costs = np.empty((len(Kind), len(counts)), np.int64)
    costs[Kind.SAME] = np.where(counts == 0, -1, 4 * BLOCK)
    costs[Kind.RUNS] = 4 + 4 * runs
    costs[Kind.WIDE] = 2 * counts
    costs[Kind.NARROW] = np.where(largest_cells < CELL, -(-sizes // CELL) + counts, 4 * BLOCK)
    costs[Kind.BITMAP] = -(-sizes // 8)
    kinds: Numbers = costs.argmin(axis=0)
    return kinds


def max_encoded_bytes(num_elements: int, item_bytes: int) -> int:
    """Return how many bytes any encoded form of a piece takes at most, composed ones included.

    That is the piece, a bit per element, 4 bytes per block, the header and padding. `encode` never writes more than
    the header and the piece; only a composed delta, which has no piece to fall back to, can need the rest.
    """
    check_items(num_elements, item_bytes)
    blocks = num_blocks(num_elements)
    return HEADER.size + padded(num_elements * item_bytes) + padded(-(-num_elements // 8)) + 4 * blocks + 7 * 8
