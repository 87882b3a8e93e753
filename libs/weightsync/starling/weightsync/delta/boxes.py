"""Deltas of boxes: cut out of the delta of a larger box, and applied to a box with any strides.

A source compares whole pieces once; each destination requests its own boxes. Row-major order within a part is the order
within the whole, so the changes of a part are a subset of those of the whole, in the same order, renumbered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.delta.changes import (
    WINDOW,
    ChangedElements,
    DeltaWriter,
    cells_of,
    changes,
    make_mask,
    window_starts,
)
from starling.weightsync.delta.codec import Encoded, apply_parsed, check_base
from starling.weightsync.delta.format import (
    HEADER,
    ITEM_TYPES,
    DeltaHeader,
    DeltaMetrics,
    Items,
    Memory,
    Numbers,
    pack_header,
)
from starling.weightsync.delta.parse import Dense, Parsed, ParsedDelta, parse
from starling.weightsync.plan.layout import Box

Array = npt.NDArray[Any]


def cut(parsed: Parsed, box: Box, part: Box) -> Encoded:
    """Return the delta of `part` of a box, from the delta of the `box`.

    The digests of the whole do not apply to a part: it has none.

    Raises:
        WeightsError: the whole is dense, or not a delta of `box`.
    """
    header = parsed.header
    if isinstance(parsed, Dense) or header.num_elements != box.volume:
        raise WeightsError(f"A delta of {header.num_elements} elements ({header.form}) cannot be cut as box {box}.")
    num, item_bytes = part.volume, header.item_bytes
    positions, values = _inside(parsed, box, part) if isinstance(parsed, ParsedDelta) else _nothing(item_bytes)
    if not len(positions):
        same = np.frombuffer(pack_header(DeltaHeader("same", num, item_bytes, 0, None, None)), np.uint8)
        return Encoded(same, DeltaMetrics("same", num, item_bytes, num, 0, HEADER.size))
    found = ChangedElements(num, item_bytes)
    mask = make_mask(num)
    edges = np.searchsorted(positions, [*window_starts(num), num]).tolist()
    for index, start in enumerate(window_starts(num)):
        mask[:] = False
        mask[positions[edges[index] : edges[index + 1]] - start] = True
        found.add(cells_of(mask, min(WINDOW, num - start)))
    directory = found.directory()
    size = directory.sections.size_bytes
    memory = np.empty(size, np.uint8)
    writer = DeltaWriter(directory, DeltaHeader("delta", num, item_bytes, len(positions), None, None), memory)
    items = np.empty(len(mask), ITEM_TYPES[item_bytes])
    for index, (start, window) in enumerate(zip(window_starts(num), found.windows, strict=True)):
        first, last = edges[index], edges[index + 1]
        items[positions[first:last] - start] = values[first:last]  # only these are read
        writer.write(start, window, found.cells, items)
    return Encoded(memory, DeltaMetrics("delta", num, item_bytes, num, len(positions), size))


def apply_box(data: Memory, array: Array) -> None:
    """Turn an array that holds the base of a box into its new version. Nothing is written unless `data` is valid.

    Args:
        data: the encoded box.
        array: its elements as unsigned integers, with any strides.

    Raises:
        WeightsError: `data` is malformed, or for a box of another size.
    """
    parsed = parse(data)
    if parsed.header.item_bytes != array.itemsize:
        raise WeightsError(f"A delta of elements of {parsed.header.item_bytes} bytes is not one of {array.itemsize}.")
    if array.flags.c_contiguous:
        apply_parsed(parsed, array)
        return
    check_base(parsed.header, array.size, None)
    if isinstance(parsed, Dense):
        array[...] = parsed.payload.view(array.dtype).reshape(array.shape)
    elif isinstance(parsed, ParsedDelta):
        for start in window_starts(array.size):
            for positions, values in changes(parsed, start):
                array[np.unravel_index(positions + start, array.shape)] = values


def _nothing(item_bytes: int) -> tuple[Numbers, Items]:
    return np.empty(0, np.int64), np.empty(0, ITEM_TYPES[item_bytes])


def _inside(delta: ParsedDelta, box: Box, part: Box) -> tuple[Numbers, Items]:
    """Return the changed elements of `part`, numbered within it in ascending order, and their values."""
    begin = [inner - outer for inner, outer in zip(part.offset, box.offset, strict=True)]
    if not part.volume:
        return _nothing(delta.header.item_bytes)
    # Only elements numbered from the part's first to its last can be in it.
    end = [b + n - 1 for b, n in zip(begin, part.size, strict=True)]
    first, last = (int(np.ravel_multi_index(corner, box.size)) if corner else 0 for corner in (begin, end))
    contiguous = last - first + 1 == part.volume
    numbers: list[Numbers] = []
    values: list[Items] = []
    for start in range(first // WINDOW * WINDOW, last + 1, WINDOW):
        found = list(changes(delta, start))
        if not found:
            continue
        positions = np.concatenate([positions for positions, _ in found]) + start
        items = np.concatenate([values for _, values in found])
        if len(found) > 1:  # several kinds of blocks, each in order
            order = positions.argsort()
            positions, items = positions[order], items[order]
        if contiguous:
            chosen = slice(*np.searchsorted(positions, [first, last + 1]).tolist())
            numbers.append(positions[chosen] - first)
            values.append(items[chosen])
            continue
        places = np.stack(np.unravel_index(positions, box.size), axis=1) - begin
        inside = ((places >= 0) & (places < part.size)).all(axis=1)
        numbers.append(np.ravel_multi_index(tuple(places[inside].T), part.size))
        values.append(items[inside])
    if not numbers:
        return _nothing(delta.header.item_bytes)
    return np.concatenate(numbers), np.concatenate(values)
