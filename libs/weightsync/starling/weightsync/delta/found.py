"""What changed in a piece, as it is found: one window of elements after the other.

A window is `WINDOW_BLOCKS` blocks. Positions in a window are counted from its first element. A window in which little
changed keeps the place of each changed element within its block, one in which much changed a bit for every element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from starling.weightsync.delta.form import (
    BLOCK,
    CELL,
    CELLS,
    WIDE_TYPE,
    Directory,
    Kind,
    Numbers,
    choose_kinds,
    num_blocks,
)
from starling.weightsync.delta.header import Items, Memory

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.uint16]
Counts = npt.NDArray[np.uint16]

WINDOW_BLOCKS: Final = 16
"""So many that a window's mask stays in the processor's second cache, and the cost of a call does not matter."""
WINDOW: Final = WINDOW_BLOCKS * BLOCK
"""Elements of a window."""
RUN_CELL: Final = CELL // 2
"""Runs are looked for only in blocks with a cell of which so many elements changed: others have none worth writing."""


@dataclass(frozen=True)
class Sparse:
    """A window in which little changed."""

    places: Places
    """Of each changed element in its block."""
    values: Items | None
    """Of each changed element, if they were kept."""

    def gather(self, items: Items, counts: Numbers) -> tuple[Places, Items]:
        """Return the place of each changed element in its block, and its value.

        Args:
            items: the window's elements.
            counts: changed elements of each of its blocks.
        """
        if self.values is not None:
            return self.places, self.values
        positions = np.repeat(np.arange(0, len(counts) * BLOCK, BLOCK), counts)
        positions += self.places
        return self.places, items.take(positions)

    def bitmap(self, block: int, counts: Numbers) -> Memory:
        """Return the bits of one block of the window."""
        first = int(counts[:block].sum())
        mask = np.zeros(BLOCK, np.bool_)
        mask[self.places[first : first + int(counts[block])]] = True
        return np.packbits(mask, bitorder="little")


@dataclass(frozen=True)
class Crowded:
    """A window in which much changed."""

    bits: Memory

    def gather(self, items: Items, counts: Numbers) -> tuple[Places, Items]:
        """As that of a sparse window."""
        positions = np.unpackbits(self.bits, bitorder="little").view(np.bool_).nonzero()[0]
        return positions.astype(WIDE_TYPE), items.take(positions)

    def bitmap(self, block: int, counts: Numbers) -> Memory:
        """Return the bits of one block of the window."""
        return self.bits[block * BLOCK // 8 : (block + 1) * BLOCK // 8]


class Found:
    """Collects what changed in one piece."""

    def __init__(self, num_elements: int, item_bytes: int) -> None:
        """Begin with a piece of so many elements of so many bytes."""
        self.num_elements = num_elements
        self.item_bytes = item_bytes
        self.num_changed = 0
        self.cells: Counts = np.zeros(num_blocks(num_elements) * CELLS, np.uint16)
        """Changed elements of each cell, as if the last block were whole."""
        self.windows: list[Sparse | Crowded] = []
        self._runs: dict[int, int] = {}

    def add(self, mask: Mask, items: Items | None = None) -> None:
        """Add the next window.

        Args:
            mask: True where an element changed; padded with False to whole cells.
            items: the elements of the window, if those that changed shall be kept now, while the processor has them at
                hand. Where much changed they are not: the piece may yet turn out not to be worth a delta.
        """
        start = len(self.windows) * WINDOW
        # Most of a mask is 0: find the words of 8 bytes that are not, then the bytes in those.
        words = mask.view(np.uint64)
        touched = (words != 0).nonzero()[0]
        counts: Counts
        if 2 * len(touched) > len(words):
            bits = np.packbits(mask, bitorder="little")
            self.windows.append(Crowded(bits))
            counts = _cell_counts(bits)
        else:
            inside = words.take(touched).view(np.bool_).nonzero()[0]
            positions = touched.take(inside >> 3)
            positions <<= 3
            inside &= 7
            positions += inside
            self.windows.append(Sparse(positions.astype(WIDE_TYPE), None if items is None else items.take(positions)))
            counts = np.bincount(positions >> 8, minlength=len(mask) // CELL).astype(np.uint16)
        self.cells[start // CELL : start // CELL + len(counts)] = counts
        self.num_changed += int(counts.sum(dtype=np.int64))
        if counts.max() >= RUN_CELL:
            self._count_runs(start // BLOCK, mask, counts)

    def _count_runs(self, first_block: int, mask: Mask, counts: Counts) -> None:
        for cell in range(0, len(counts), CELLS):
            if counts[cell : cell + CELLS].max() >= RUN_CELL:
                block = mask[cell * CELL : (cell + CELLS) * CELL]
                runs = int(block[0]) + int(np.count_nonzero(block[1:] > block[:-1]))
                self._runs[first_block + cell // CELLS] = runs

    def directory(self) -> Directory:
        """Return the blocks with their kinds, once all windows were added."""
        by_block = self.cells.reshape(-1, CELLS)
        counts = by_block.sum(axis=1, dtype=np.int64)
        runs = counts.copy()
        for block, num_runs in self._runs.items():
            runs[block] = num_runs
        kinds = choose_kinds(self.num_elements, counts, by_block.max(axis=1).astype(np.int64), runs)
        return Directory(self.num_elements, self.item_bytes, kinds, counts, np.where(kinds == Kind.RUNS, runs, 0))


def window_starts(num_elements: int) -> range:
    """Return the first element of each window."""
    return range(0, num_elements, WINDOW)


def make_mask(num_elements: int) -> Mask:
    """Return a mask for the windows of a piece, all False."""
    return np.zeros(-(-min(num_elements, WINDOW) // CELL) * CELL, np.bool_)


def cells_of(mask: Mask, num_elements: int) -> Mask:
    """Return the whole cells of a mask that hold its first `num_elements`, and clear what lies in them behind those."""
    part = mask[: -(-num_elements // CELL) * CELL]
    part[num_elements:] = False
    return part


def _cell_counts(bits: Memory) -> Counts:
    """Return how many bits each cell has."""
    words = np.bitwise_count(bits.view(np.uint64)).astype(np.uint16).reshape(-1, CELL // 64)
    # Four strided sums: four times as fast as `sum` over so short a dim.
    counts: Counts = words[:, 0] + words[:, 1] + words[:, 2] + words[:, 3]
    return counts
