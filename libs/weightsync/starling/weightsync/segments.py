"""Segments: which boxes of a bucket travel as they lie, and which are packed together on the way. Pure.

The reader cuts a bucket into segments, runs of its boxes in order. A box that is large and lies in one piece where it
belongs is a segment of its own, received there; all between two such boxes is one segment, received beside and brought
home from there. The source sends a segment from where it lies if it is one box in one piece, else it packs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from starling.weightsync.layout import aligned

DIRECT_BYTES: Final = 64 << 10
"""Smaller boxes are packed together: a message of its own would cost more than the copy."""
BUCKETS_PER_SOURCE: Final = 4
"""Most buckets that one destination rank has under way from one source."""


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a box that is packed."""
    strides = [1] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * size[dim + 1]
    return tuple(strides)


def is_contiguous(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box with these strides, in elements, lies row-major without gaps."""
    expected = 1
    for n, stride in zip(reversed(size), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return 0 in size  # of nothing, everything may be said
        expected *= n
    return True


def cut_segments(direct: Iterable[bool]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Cut a bucket, given which of its boxes are received where they belong.

    Returns:
        How many boxes each segment has, and which segments are received where they belong.
    """
    counts: list[int] = []
    kinds: list[bool] = []
    for one in direct:
        if one or not kinds or kinds[-1]:
            counts.append(1)
            kinds.append(one)
        else:
            counts[-1] += 1
    return tuple(counts), tuple(kinds)


def payload_bytes(sizes: Sequence[int]) -> int:
    """Return the length of a payload of blocks of these sizes: no padding after the last."""
    return sum(map(aligned, sizes[:-1])) + sizes[-1] if sizes else 0


def packed_bytes(sizes: Sequence[int], counts: Sequence[int], direct: Sequence[bool]) -> int:
    """Return the room for all segments but the direct ones.

    Args:
        sizes: of each box, in bytes.
        counts: how many boxes each segment has.
        direct: the segments that need no room.
    """
    total = first = 0
    for count, one in zip(counts, direct, strict=True):
        if not one:
            total += aligned(payload_bytes(sizes[first : first + count]))
        first += count
    return total


def most_at_once(rooms: Iterable[int], num_buckets: int) -> int:
    """Return the most that buckets with these `rooms` take while `num_buckets` of them are under way."""
    return sum(sorted(rooms, reverse=True)[:num_buckets])
