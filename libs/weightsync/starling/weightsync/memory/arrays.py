"""Flat memory and arrays in it, without torch: the data that every transport moves.

An element is an unsigned integer of its size: only bits travel. Where several boxes travel as one payload they lie
row-major, each at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.plan.buckets import packed_bytes, payload_bytes
from starling.weightsync.plan.layout import ITEM_BYTES, Box, ShardPiece, aligned, packed_offsets

Memory = npt.NDArray[np.uint8]
"""Flat memory, one byte per element."""
Array = npt.NDArray[Any]
"""A box of elements as unsigned integers, any strides."""

T = TypeVar("T")

CHUNK_BYTES: Final = 1 << 20
"""Chunk size for copies and digests: a chunk stays in a core's cache from one step to the next."""


def allocate(size_bytes: int) -> Memory:
    """Return private memory whose pages are all present: none is first touched during a transfer.

    Raises:
        WeightsError: it cannot be allocated.
    """
    if not size_bytes:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as error:
        raise WeightsError(f"No {size_bytes} bytes of memory: {error.strerror}.") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and size_bytes >= 1 << 21:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: only slower
    flat: Memory = np.frombuffer(memory, np.uint8)
    flat[::4096] = 0
    return flat


def packed_arrays(pieces: Sequence[ShardPiece], memory: Memory) -> tuple[Array, ...]:
    """Return each piece as an array inside `memory`, at `packed_offsets` of the pieces."""
    offsets, _ = packed_offsets(piece.size_bytes for piece in pieces)
    return tuple(
        np.ndarray(piece.box.size, f"u{ITEM_BYTES[piece.dtype]}", memory, offset)
        if piece.size_bytes
        else np.empty(piece.box.size, f"u{ITEM_BYTES[piece.dtype]}")
        for piece, offset in zip(pieces, offsets, strict=True)
    )


def same_arrays(some: Sequence[Array | None], others: Sequence[Array | None]) -> bool:
    """Return whether arrays are, one by one, the same elements in the same memory."""
    return len(some) == len(others) and all(map(_same_array, some, others))


def _same_array(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape or one.strides != other.strides:
        return False
    return one.ctypes.data == other.ctypes.data or not one.size


def part_of(array: Array, box: Box, part: Box) -> Array:
    """Return `part` of an array that holds `box`, as a view."""
    if part == box:
        return array
    return array[
        tuple(
            slice(begin - origin, begin - origin + n)
            for origin, begin, n in zip(box.offset, part.offset, part.size, strict=True)
        )
    ]


def flat_bytes(array: Array) -> Memory:
    """Return the bytes of a contiguous array as flat memory that it shares."""
    memory: Memory = array.reshape(-1).view(np.uint8)
    return memory


def blocks_of(payload: Memory, arrays: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield each array with its place in the payload, an array of the same shape."""
    offsets, _ = packed_offsets(array.nbytes for array in arrays)
    for array, offset in zip(arrays, offsets, strict=True):
        yield array, np.ndarray(array.shape, array.dtype, payload, offset) if array.size else array


def grouped(items: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Cut `items` into runs of these lengths."""
    groups: list[Sequence[T]] = []
    first = 0
    for count in counts:
        groups.append(items[first : first + count])
        first += count
    return groups


def is_direct(group: Sequence[Array]) -> bool:
    """Return whether a segment is one contiguous box, which needs no packing."""
    return len(group) == 1 and group[0].flags.c_contiguous


def packing_bytes(groups: Sequence[Sequence[Array]], is_in_place: Callable[[Sequence[Array]], bool] = is_direct) -> int:
    """Return the buffer size needed to pack the segments that cannot be sent from where they are."""
    sizes = [array.nbytes for group in groups for array in group]
    return packed_bytes(sizes, [len(group) for group in groups], [is_in_place(group) for group in groups])


def _copy(_index: int, place: Array, array: Array) -> None:
    np.copyto(place, array)


def pack(
    groups: Sequence[Sequence[Array]],
    buffer: Memory,
    is_in_place: Callable[[Sequence[Array]], bool] = is_direct,
    copy: Callable[[int, Array, Array], None] = _copy,
) -> list[Memory]:
    """Return each segment as flat memory: in place, or packed into `buffer`.

    `copy` is called with the index of a box among all, its place in the buffer, and the box.
    """
    segments: list[Memory] = []
    begin = first = 0
    for group in groups:
        first += len(group)
        if is_in_place(group):
            segments.append(flat_bytes(group[0]))
            continue
        size = payload_bytes([array.nbytes for array in group])
        segments.append(buffer[begin : begin + size])
        for index, (array, place) in enumerate(blocks_of(segments[-1], group), first - len(group)):
            copy(index, place, array)
        begin += aligned(size)
    return segments


def chunks_of(array: Array, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[Any, ...]]:
    """Yield indices that cut an array, in row-major order, into parts of about `chunk_bytes` (one row at least)."""
    if array.nbytes <= chunk_bytes or array.ndim == 0:
        yield (...,)
        return
    row_bytes = array.nbytes // array.shape[0]
    if row_bytes > chunk_bytes and array.ndim > 1:
        for index in range(array.shape[0]):
            for inner in chunks_of(array[index], chunk_bytes):
                yield (index, *inner)
        return
    rows = max(1, chunk_bytes // row_bytes)
    for begin in range(0, array.shape[0], rows):
        yield (slice(begin, begin + rows),)
