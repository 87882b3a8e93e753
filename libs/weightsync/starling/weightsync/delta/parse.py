"""Parser of untrusted encoded pieces: applying a parsed piece never writes outside the piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.delta.format import (
    BLOCK,
    CELL,
    COUNT_TYPE,
    HEADER,
    ITEM_TYPES,
    WIDE_TYPE,
    Data,
    DeltaHeader,
    DeltaSection,
    Directory,
    Items,
    Kind,
    Memory,
    Numbers,
    block_sizes,
    bytes_of,
    num_blocks,
    padded,
    sums_before,
    unpack_header,
)


@dataclass(frozen=True)
class Dense:
    """All bytes of a piece."""

    header: DeltaHeader
    payload: Memory


@dataclass(frozen=True)
class Same:
    """An unchanged piece."""

    header: DeltaHeader


@dataclass(frozen=True)
class ParsedDelta:
    """The changed elements of a piece: views into the encoded bytes."""

    header: DeltaHeader
    directory: Directory
    runs: npt.NDArray[np.uint16]
    """Shape (runs, 2): start, length - 1."""
    wide: npt.NDArray[np.uint16]
    cells: Memory
    narrow: Memory
    bitmaps: Memory
    values: Items


Parsed = Same | ParsedDelta | Dense


def parse(data: Data) -> Parsed:
    """Parse and check a whole encoded piece, so that applying it cannot fail half way.

    Raises:
        WeightsError: it is truncated, malformed, or names an element that the piece does not have.
    """
    memory = bytes_of(data, "an encoded piece")
    header = unpack_header(memory)
    if header.form != "delta" and header.num_changed:
        raise _malformed(f"{header.num_changed} changed elements in the form {header.form!r}")
    if header.form == "same":
        _check_size(memory, HEADER.size)
        return Same(header)
    if header.form == "dense":
        _check_size(memory, HEADER.size + header.num_elements * header.item_bytes)
        return Dense(header, memory[HEADER.size :])
    delta = _parse_delta(memory, header)
    _check_runs(delta)
    _check_wide(delta)
    _check_narrow(delta)
    _check_bitmaps(delta)
    return delta


def _parse_delta(memory: Memory, header: DeltaHeader) -> ParsedDelta:
    blocks = num_blocks(header.num_elements)
    # Before anything is allocated, the number of elements must be one that these bytes can describe.
    after_directory = HEADER.size + padded(COUNT_TYPE.itemsize * blocks)
    if len(memory) < after_directory:
        raise _malformed(f"{len(memory)} bytes, too few for {header.num_elements} elements")
    words = memory[HEADER.size : HEADER.size + COUNT_TYPE.itemsize * blocks].view(COUNT_TYPE).astype(np.int64)
    kinds, counts = words >> 24, words & 0xFFFFFF
    if (kinds > max(Kind)).any() or (counts > block_sizes(header.num_elements)).any():
        raise _malformed("a block of an unknown kind or with more changed elements than it has")
    if ((kinds == Kind.SAME) != (counts == 0)).any() or counts.sum() != header.num_changed or not header.num_changed:
        raise _malformed(f"counts of changed elements that do not add up to {header.num_changed}")
    run_counts = np.zeros_like(counts)
    of_runs = kinds == Kind.RUNS
    size = COUNT_TYPE.itemsize * int(np.count_nonzero(of_runs))
    if len(memory) < after_directory + size:
        raise _malformed(f"{len(memory)} bytes, too few for its run counts")
    run_counts[of_runs] = memory[after_directory : after_directory + size].view(COUNT_TYPE)
    if (run_counts > counts).any() or (of_runs != (run_counts > 0)).any():
        raise _malformed("a block with more runs than changed elements, or with none")
    directory = Directory(header.num_elements, header.item_bytes, kinds, counts, run_counts)
    found = directory.sections
    _check_size(memory, found.size_bytes)

    def part(section: DeltaSection) -> Memory:
        return memory[section.offset : section.offset + section.size]

    return ParsedDelta(
        header=header,
        directory=directory,
        runs=part(found.runs).view(WIDE_TYPE).reshape(-1, 2),
        wide=part(found.wide).view(WIDE_TYPE),
        cells=part(found.cells),
        narrow=part(found.narrow),
        bitmaps=part(found.bitmaps),
        values=part(found.values).view(ITEM_TYPES[header.item_bytes]),
    )


def _check_runs(delta: ParsedDelta) -> None:
    if not len(delta.runs):
        return
    directory = delta.directory
    blocks = np.flatnonzero(directory.kinds == Kind.RUNS)
    first = directory.first_run[blocks]
    starts, lengths = delta.runs[:, 0].astype(np.int64), delta.runs[:, 1].astype(np.int64) + 1
    ends = starts + lengths
    if (ends > np.repeat(block_sizes(directory.num_elements)[blocks], directory.run_counts[blocks])).any():
        raise _malformed("a run that ends outside its block")
    if not _ascending(starts[1:] > ends[:-1], first):
        raise _malformed("runs that are not in order")
    if (np.add.reduceat(lengths, first) != directory.counts[blocks]).any():
        raise _malformed("runs that do not add up to the count of their block")


def _check_wide(delta: ParsedDelta) -> None:
    if not len(delta.wide):
        return
    directory = delta.directory
    if directory.kinds[-1] == Kind.WIDE and delta.wide[-1] >= _size_of_last(directory.num_elements, BLOCK):
        raise _malformed(f"a position beyond its {directory.num_elements} elements")
    firsts = directory.first[Kind.WIDE][np.flatnonzero(directory.kinds == Kind.WIDE)]
    if not _ascending(delta.wide[1:] > delta.wide[:-1], firsts):
        raise _malformed("positions that are not in order")


def _check_narrow(delta: ParsedDelta) -> None:
    if not len(delta.cells):
        return
    directory = delta.directory
    blocks = np.flatnonzero(directory.kinds == Kind.NARROW)
    sums = np.add.reduceat(delta.cells, directory.first_cell[blocks], dtype=np.int64)
    if (sums != directory.counts[blocks]).any():
        raise _malformed("cells that do not add up to the count of their block")
    last = directory.kinds[-1] == Kind.NARROW and delta.cells[-1] > 0
    if last and delta.narrow[-1] >= _size_of_last(directory.num_elements, CELL):
        raise _malformed(f"a position beyond its {directory.num_elements} elements")
    if not _ascending(delta.narrow[1:] > delta.narrow[:-1], sums_before(delta.cells)):
        raise _malformed("positions that are not in order")


def _check_bitmaps(delta: ParsedDelta) -> None:
    if not len(delta.bitmaps):
        return
    directory = delta.directory
    blocks = np.flatnonzero(directory.kinds == Kind.BITMAP)
    bits = np.bitwise_count(delta.bitmaps)
    if (np.add.reduceat(bits, directory.first_bitmap_byte[blocks], dtype=np.int64) != directory.counts[blocks]).any():
        raise _malformed("bitmaps that do not add up to the count of their block")
    if directory.kinds[-1] == Kind.BITMAP and int(delta.bitmaps[-1]) >> _size_of_last(directory.num_elements, 8):
        raise _malformed(f"a position beyond its {directory.num_elements} elements")


def _ascending(steps: npt.NDArray[np.bool_], firsts: Numbers) -> bool:
    """Whether every step ascends except those to the first element of a block or cell."""
    allowed = np.empty(len(steps) + 2, np.bool_)
    allowed[1:-1] = steps
    allowed[firsts] = True
    return bool(allowed[1:-1].all())


def _size_of_last(num_elements: int, size: int) -> int:
    """Return the number of elements of the last group of `size`."""
    return (num_elements - 1) % size + 1


def _check_size(memory: Memory, size: int) -> None:
    if len(memory) != size:
        raise _malformed(f"{len(memory)} bytes where its header describes {size}")


def _malformed(what: str) -> WeightsError:
    return WeightsError(f"The encoded piece has {what}: fetch it again, or ask for the dense form.")
