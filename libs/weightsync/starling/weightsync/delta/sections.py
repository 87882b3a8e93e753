"""The sections of a delta: written from what was found, and read back one window at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from starling.weightsync.delta.form import (
    BLOCK,
    CELL,
    CELLS,
    COUNT_TYPE,
    WIDE_TYPE,
    Directory,
    Kind,
    Numbers,
    Section,
    padded,
)
from starling.weightsync.delta.found import WINDOW_BLOCKS, Counts, Crowded, Places, Sparse
from starling.weightsync.delta.header import HEADER, ITEM_TYPES, Header, Items, Memory, pack_header
from starling.weightsync.delta.parse import Delta


def head_of(directory: Directory, header: Header) -> Memory:
    """Return the header, the directory and the run counts: all that comes before the runs."""
    found = directory.sections
    head = np.zeros(found.runs.offset, np.uint8)
    head[: HEADER.size] = np.frombuffer(pack_header(header), np.uint8)
    numbers = (directory.kinds << 24 | directory.counts, directory.run_counts[directory.kinds == Kind.RUNS])
    for section, values in zip((found.directory, found.run_counts), numbers, strict=True):
        head[section.offset : section.offset + section.size].view(COUNT_TYPE)[:] = values
    return head


class Writer:
    """Writes a delta, one window after the other."""

    def __init__(self, directory: Directory, header: Header, out: Memory) -> None:
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

        def part(section: Section) -> Memory:
            return out[section.offset : section.offset + section.size]

        self._runs = part(found.runs).view(WIDE_TYPE).reshape(-1, 2)
        self._wide = part(found.wide).view(WIDE_TYPE)
        self._cells = part(found.cells)
        self._narrow = part(found.narrow)
        self._bitmaps = part(found.bitmaps)
        self._values = part(found.values).view(ITEM_TYPES[directory.item_bytes])

    def write(self, start: int, window: Sparse | Crowded, cells: Counts, items: Items) -> None:
        """Write one window.

        Args:
            start: its first element.
            window: what changed in it.
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

    def _of_kind(self, kind: int, places: Places, blocks: range, counts: Numbers) -> Places:
        chosen = self._directory.kinds[blocks.start : blocks.stop] == kind
        return places if chosen.all() else places[np.repeat(chosen, counts)]

    def _write_cells(self, blocks: range, cells: Counts) -> None:
        first = self._directory.first_cell
        for block in blocks:
            begin, end = first[block : block + 2].tolist()
            self._cells[begin:end] = cells[block * CELLS : block * CELLS + end - begin]

    def _write_bitmaps(self, blocks: range, window: Sparse | Crowded, counts: Numbers) -> None:
        first = self._directory.first_bitmap_byte
        for block in blocks:
            begin, end = first[block : block + 2].tolist()
            if begin < end:
                self._bitmaps[begin:end] = window.bitmap(block - blocks.start, counts)[: end - begin]

    def _write_runs(self, blocks: range, places: Places) -> None:
        directory = self._directory
        begin, end = directory.first_run[[blocks.start, blocks.stop]].tolist()
        first = directory.first[Kind.RUNS]
        starts_run = np.empty(len(places) + 1, np.bool_)
        starts_run[1:-1] = np.diff(places.astype(np.int64)) != 1
        # No run goes on into the next block; and the last one ends.
        starts_run[first[blocks.start : blocks.stop + 1] - first[blocks.start]] = True
        starts = np.flatnonzero(starts_run)
        self._runs[begin:end, 0] = places[starts[:-1]]
        self._runs[begin:end, 1] = np.diff(starts) - 1


def changes(delta: Delta, start: int) -> Iterator[tuple[Numbers, Items]]:
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


def _run_positions(delta: Delta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first_run
    runs = delta.runs[first[blocks.start] : first[blocks.stop]]
    starts = np.repeat(chosen * BLOCK, delta.directory.run_counts[blocks][chosen]) + runs[:, 0]
    lengths = runs[:, 1].astype(np.int64) + 1
    ends = np.cumsum(lengths)
    positions: Numbers = np.repeat(starts - (ends - lengths), lengths)
    positions += np.arange(len(positions))
    return positions


def _wide_positions(delta: Delta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first[Kind.WIDE]
    positions: Numbers = np.repeat(chosen * BLOCK, counts)
    positions += delta.wide[first[blocks.start] : first[blocks.stop]]
    return positions


def _narrow_positions(delta: Delta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first, first_cell = delta.directory.first[Kind.NARROW], delta.directory.first_cell
    cells = delta.cells[first_cell[blocks.start] : first_cell[blocks.stop]]
    starts = (chosen[:, None] * BLOCK + _CELL_STARTS).reshape(-1)
    # The last block may have fewer cells.
    positions: Numbers = np.repeat(starts[: len(cells)], cells)
    positions += delta.narrow[first[blocks.start] : first[blocks.stop]]
    return positions


def _bitmap_positions(delta: Delta, blocks: slice, chosen: Numbers, counts: Numbers) -> Numbers:
    first = delta.directory.first_bitmap_byte
    bitmaps = delta.bitmaps[first[blocks.start] : first[blocks.stop]]
    positions: Numbers = np.unpackbits(bitmaps, bitorder="little").view(np.bool_).nonzero()[0]
    # Blocks of this kind lie side by side in the section; each goes back to its place in the window.
    positions += np.repeat((chosen - np.arange(len(chosen))) * BLOCK, counts)
    return positions


_CELL_STARTS: Final = np.arange(0, BLOCK, CELL)
_POSITIONS: Final[dict[int, Callable[[Delta, slice, Numbers, Numbers], Numbers]]] = {
    Kind.RUNS: _run_positions,
    Kind.WIDE: _wide_positions,
    Kind.NARROW: _narrow_positions,
    Kind.BITMAP: _bitmap_positions,
}
