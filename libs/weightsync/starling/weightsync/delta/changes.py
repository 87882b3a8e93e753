"""Changed elements of a piece, window by window: collected, written as the sections of a delta, and read back.

A window is `WINDOW_BLOCKS` blocks. Positions in a window are counted from its first element. A sparse window keeps the
position of each changed element in its block, a dense one a bit for every element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from starling.weightsync.delta.format import (
    BLOCK,
    CELL,
    CELLS,
    COUNT_TYPE,
    HEADER,
    ITEM_TYPES,
    WIDE_TYPE,
    DeltaHeader,
    DeltaSection,
    Directory,
    Items,
    Kind,
    Memory,
    Numbers,
    choose_kinds,
    num_blocks,
    pack_header,
    padded,
)
from starling.weightsync.delta.parse import ParsedDelta

Mask = npt.NDArray[np.bool_]
BlockPositions = npt.NDArray[np.uint16]
Counts = npt.NDArray[np.uint16]

WINDOW_BLOCKS: Final = 16
"""A window's mask fits the L2 cache, and a window is large enough for call overhead not to matter."""
WINDOW: Final = WINDOW_BLOCKS * BLOCK
"""Elements of a window."""
RUN_CELL: Final = CELL // 2
"""Changes in one cell from which on the runs of a block are counted: with fewer, no runs are worth writing."""


@dataclass(frozen=True)
class SparseWindow:
    """A window with few changes."""

    places: BlockPositions
    """Position of each changed element in its block."""
    values: Items | None
    """Value of each changed element, if they were kept."""

    def gather(self, items: Items, counts: Numbers) -> tuple[BlockPositions, Items]:
        """Return the position of each changed element in its block, and its value.

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
class DenseWindow:
    """A window with many changes."""

    bits: Memory

    def gather(self, items: Items, counts: Numbers) -> tuple[BlockPositions, Items]:
        """As `SparseWindow.gather`."""
        positions = np.unpackbits(self.bits, bitorder="little").view(np.bool_).nonzero()[0]
        return positions.astype(WIDE_TYPE), items.take(positions)

    def bitmap(self, block: int, counts: Numbers) -> Memory:
        """Return the bits of one block of the window."""
        return self.bits[block * BLOCK // 8 : (block + 1) * BLOCK // 8]


class ChangedElements:
    """The changed elements of one piece, collected window by window."""

    def __init__(self, num_elements: int, item_bytes: int) -> None:
        """Begin with a piece of `num_elements` elements of `item_bytes` bytes each."""
        self.num_elements = num_elements
        self.item_bytes = item_bytes
        self.num_changed = 0
        self.cells: Counts = np.zeros(num_blocks(num_elements) * CELLS, np.uint16)
        """Number of changed elements of each cell; the last block is padded to a whole one."""
        self.windows: list[SparseWindow | DenseWindow] = []
        self._runs: dict[int, int] = {}

    def add(self, mask: Mask, items: Items | None = None) -> None:
        """Add the next window.

        Args:
            mask: True where an element changed; padded with False to whole cells.
            items: the elements of the window, to keep the changed ones now, while they are in the cache. In a dense
                window they are not kept: the piece may turn out not to be worth a delta.
        """
        start = len(self.windows) * WINDOW
        # Most of a mask is 0: find the nonzero words of 8 bytes, then the nonzero bytes in them.
        words = mask.view(np.uint64)
        touched = (words != 0).nonzero()[0]
        counts: Counts
        if 2 * len(touched) > len(words):
            bits = np.packbits(mask, bitorder="little")
            self.windows.append(DenseWindow(bits))
            counts = _cell_counts(bits)
        else:
            inside = words.take(touched).view(np.bool_).nonzero()[0]
            positions = touched.take(inside >> 3)
            positions <<= 3
            inside &= 7
            positions += inside
            self.windows.append(
                SparseWindow(positions.astype(WIDE_TYPE), None if items is None else items.take(positions))
            )
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
        """Return the directory, after all windows were added."""
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
    """Return the whole cells of a mask that contain its first `num_elements`, with the elements after these cleared."""
    part = mask[: -(-num_elements // CELL) * CELL]
    part[num_elements:] = False
    return part


def _cell_counts(bits: Memory) -> Counts:
    """Return the number of set bits of each cell."""
    words = np.bitwise_count(bits.view(np.uint64)).astype(np.uint16).reshape(-1, CELL // 64)
    # Four strided sums: four times as fast as `sum` over a short dim.
    counts: Counts = words[:, 0] + words[:, 1] + words[:, 2] + words[:, 3]
    return counts


def head_of(directory: Directory, header: DeltaHeader) -> Memory:
    """Return the part of a delta before the runs: header, directory and run counts."""
    found = directory.sections
    head = np.zeros(found.runs.offset, np.uint8)
    head[: HEADER.size] = np.frombuffer(pack_header(header), np.uint8)
    numbers = (directory.kinds << 24 | directory.counts, directory.run_counts[directory.kinds == Kind.RUNS])
    for section, values in zip((found.directory, found.run_counts), numbers, strict=True):
        head[section.offset : section.offset + section.size].view(COUNT_TYPE)[:] = values
    return head


class DeltaWriter:
    """Writes a delta, window by window."""

    def __init__(self, directory: Directory, header: DeltaHeader, out: Memory) -> None:
        """Write the header and the directory.

        Args:
            directory: of the piece.
            header: of the delta.
            out: `directory.sections.size_bytes` bytes.
        """
        self._directory = directory
        self._kinds: list[int] = directory.kinds.tolist()
        found = directory.sections
        head = head_of(directory, header)
        out[: len(head)] = head
        for section in found[2:-1]:
            out[section.offset + section.size : section.offset + padded(section.size)] = 0

        def part(section: DeltaSection) -> Memory:
            return out[section.offset : section.offset + section.size]

        self._runs = part(found.runs).view(WIDE_TYPE).reshape(-1, 2)
        self._wide = part(found.wide).view(WIDE_TYPE)
        self._cells = part(found.cells)
        self._narrow = part(found.narrow)
        self._bitmaps = part(found.bitmaps)
        self._values = part(found.values).view(ITEM_TYPES[directory.item_bytes])

    def write(self, start: int, window: SparseWindow | DenseWindow, cells: Counts, items: Items) -> None:
        """Write one window.

        Args:
            start: its first element.
            window: its changed elements.
            cells: changed elements of each cell of the piece.
            items: the window's elements, of which the changed ones are read.
        """
        directory = self._directory
        blocks = range(start // BLOCK, min(start // BLOCK + WINDOW_BLOCKS, len(self._kinds)))
        kinds = {self._kinds[block] for block in blocks} - {Kind.SAME}
        if not kinds:
            return
        counts = directory.counts[blocks.start : blocks.stop]
        first, last = directory.first_value[[blocks.start, blocks.stop]].tolist()
        places, self._values[first:last] = window.gather(items, counts)
        for kind in kinds:
            if kind == Kind.BITMAP:
                self._write_bitmaps(blocks, window, counts)
                continue
            of_kind = self._of_kind(kind, places, blocks, counts)
            first, last = directory.first[kind, [blocks.start, blocks.stop]].tolist()
            if kind == Kind.WIDE:
                self._wide[first:last] = of_kind
            elif kind == Kind.NARROW:
                self._narrow[first:last] = of_kind
                self._write_cells(blocks, cells)
            else:
                self._write_runs(blocks, of_kind)

    def _of_kind(self, kind: int, places: BlockPositions, blocks: range, counts: Numbers) -> BlockPositions:
        chosen = self._directory.kinds[blocks.start : blocks.stop] == kind
        return places if chosen.all() else places[np.repeat(chosen, counts)]

    def _write_cells(self, blocks: range, cells: Counts) -> None:
        first = self._directory.first_cell
        for block in blocks:
            begin, end = first[block : block + 2].tolist()
            self._cells[begin:end] = cells[block * CELLS : block * CELLS + end - begin]

    def _write_bitmaps(self, blocks: range, window: SparseWindow | DenseWindow, counts: Numbers) -> None:
        first = self._directory.first_bitmap_byte
        for block in blocks:
            begin, end = first[block : block + 2].tolist()
            if begin < end:
                self._bitmaps[begin:end] = window.bitmap(block - blocks.start, counts)[: end - begin]

    def _write_runs(self, blocks: range, places: BlockPositions) -> None:
        directory = self._directory
        begin, end = directory.first_run[[blocks.start, blocks.stop]].tolist()
        first = directory.first[Kind.RUNS]
        starts_run = np.empty(len(places) + 1, np.bool_)
        starts_run[1:-1] = np.diff(places.astype(np.int64)) != 1
        # No run continues into the next block; and the last one ends.
        starts_run[first[blocks.start : blocks.stop + 1] - first[blocks.start]] = True
        starts = np.flatnonzero(starts_run)
        self._runs[begin:end, 0] = places[starts[:-1]]
        self._runs[begin:end, 1] = np.diff(starts) - 1


def changes(delta: ParsedDelta, start: int) -> Iterator[tuple[Numbers, Items]]:
    """Yield, for each kind of block in the window at element `start`, the positions that changed and their values."""
    directory = delta.directory
    blocks = slice(start // BLOCK, min(start // BLOCK + WINDOW_BLOCKS, len(directory.kinds)))
    first, last = directory.first_value[[blocks.start, blocks.stop]].tolist()
    if first == last:
        return
    kinds, counts = directory.kinds[blocks], directory.counts[blocks]
    values = delta.values[first:last]
    present = set(kinds.tolist()) - {Kind.SAME}
    for kind in present:
        of_kind = kinds == kind
        part = values if len(present) == 1 else values[np.repeat(of_kind, counts)]
        chosen = of_kind.nonzero()[0]
        yield _POSITIONS[kind](delta, blocks, chosen, counts[chosen]), part


def _run_positions(delta: ParsedDelta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first_run
    runs = delta.runs[first[blocks.start] : first[blocks.stop]]
    starts = np.repeat(chosen * BLOCK, delta.directory.run_counts[blocks][chosen]) + runs[:, 0]
    lengths = runs[:, 1].astype(np.int64) + 1
    ends = np.cumsum(lengths)
    positions: Numbers = np.repeat(starts - (ends - lengths), lengths)
    positions += np.arange(len(positions))
    return positions


def _wide_positions(delta: ParsedDelta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first[Kind.WIDE]
    positions: Numbers = np.repeat(chosen * BLOCK, counts)
    positions += delta.wide[first[blocks.start] : first[blocks.stop]]
    return positions


def _narrow_positions(delta: ParsedDelta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first, first_cell = delta.directory.first[Kind.NARROW], delta.directory.first_cell
    cells = delta.cells[first_cell[blocks.start] : first_cell[blocks.stop]]
    starts = (chosen[:, None] * BLOCK + _CELL_STARTS).reshape(-1)
    # The last block may have fewer cells.
    positions: Numbers = np.repeat(starts[: len(cells)], cells)
    positions += delta.narrow[first[blocks.start] : first[blocks.stop]]
    return positions


def _bitmap_positions(delta: ParsedDelta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first_bitmap_byte
    bitmaps = delta.bitmaps[first[blocks.start] : first[blocks.stop]]
    positions: Numbers = np.unpackbits(bitmaps, bitorder="little").view(np.bool_).nonzero()[0]
    # Blocks of this kind are adjacent in the section; each gets its offset in the window back.
    positions += np.repeat((chosen - np.arange(len(chosen))) * BLOCK, counts)
    return positions


_CELL_STARTS: Final = np.arange(0, BLOCK, CELL)
_POSITIONS: Final[dict[int, Callable[[ParsedDelta, slice, Numbers, Numbers], Numbers]]] = {
    Kind.RUNS: _run_positions,
    Kind.WIDE: _wide_positions,
    Kind.NARROW: _narrow_positions,
    Kind.BITMAP: _bitmap_positions,
}
