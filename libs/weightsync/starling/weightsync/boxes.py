"""Geometry of boxes: intersection, disjointness and cutting. Pure numbers; the planner's arithmetic.

`BoxIndex` answers which of many boxes meet a given one by a sweep: the boxes are sorted by their offset along the dim
that splits them most, so that a query touches a short run of neighbours and never all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from starling.weightsync.layout import Box


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box common to `a` and `b`, or None when they share no element."""
    offset: list[int] = []
    size: list[int] = []
    for a0, an, b0, bn in zip(a.offset, a.size, b.offset, b.size, strict=True):
        begin = max(a0, b0)
        n = min(a0 + an, b0 + bn) - begin
        if n <= 0:
            return None
        offset.append(begin)
        size.append(n)
    return Box(offset=tuple(offset), size=tuple(size))


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` is one of `outer`."""
    if len(outer.offset) != len(inner.offset) or len(inner.size) != len(outer.size):
        return False
    return all(
        o0 <= i0 and i0 + n <= o0 + on
        for o0, on, i0, n in zip(outer.offset, outer.size, inner.offset, inner.size, strict=True)
    )


def cut(box: Box, max_volume: int) -> Iterator[Box]:
    """Cut `box` into near-equal boxes of at most `max_volume` elements (>= 1), in row-major order.

    The outermost dim that is longer than 1 is cut first, so the parts of a dense tensor are contiguous.
    """
    if box.volume <= max_volume:
        yield box
        return
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    length = box.size[dim]
    rows = max(1, max_volume * length // box.volume)
    num_parts = -(-length // rows)
    for part in range(num_parts):
        begin = part * length // num_parts
        end = (part + 1) * length // num_parts
        offset = (*box.offset[:dim], box.offset[dim] + begin, *box.offset[dim + 1 :])
        size = (*box.size[:dim], end - begin, *box.size[dim + 1 :])
        yield from cut(Box(offset=offset, size=size), max_volume)


def first_gap(box: Box, covers: Sequence[Box]) -> Box | None:
    """Return a part of `box` that none of `covers` meets, or None when they cover it wholly."""
    for index, cover in enumerate(covers):
        shared = intersection(box, cover)
        if shared is None:
            continue
        for part in _around(box, shared):
            gap = first_gap(part, covers[index + 1 :])
            if gap is not None:
                return gap
        return None
    return box if box.volume else None


def _around(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes that make up `box` without `hole`, which lies inside it."""
    offset, size = list(box.offset), list(box.size)
    for dim, (begin, length) in enumerate(zip(hole.offset, hole.size, strict=True)):
        end = offset[dim] + size[dim]
        for part_begin, part_end in ((offset[dim], begin), (begin + length, end)):
            if part_begin < part_end:
                yield Box(
                    offset=(*offset[:dim], part_begin, *offset[dim + 1 :]),
                    size=(*size[:dim], part_end - part_begin, *size[dim + 1 :]),
                )
        offset[dim], size[dim] = begin, length


class BoxIndex:
    """Distinct, non-empty boxes of one tensor, ready to be asked which of them meet another box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        num_dims = len(boxes[0].offset) if boxes else 0
        splits = [len({box.offset[dim] for box in boxes}) for dim in range(num_dims)]
        self._dim = splits.index(max(splits)) if splits else 0
        self.boxes = tuple(sorted(boxes, key=self._position))
        """The boxes in the order of the sweep."""
        shape = (len(boxes), num_dims)
        begins: npt.NDArray[np.int64] = np.array([box.offset for box in self.boxes], np.int64).reshape(shape)
        ends = begins + np.array([box.size for box in self.boxes], np.int64).reshape(shape)
        self._begins, self._ends = begins, ends
        # The furthest end so far: boxes before the first one that passes a query's begin cannot meet the query.
        self._reach = np.maximum.accumulate(ends[:, self._dim]) if num_dims and boxes else None

    def _position(self, box: Box) -> tuple[int, ...]:
        return (box.offset[self._dim] if box.offset else 0, *box.offset, *box.size)

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index into `boxes` of each box that shares elements with `box`, and the shared box."""
        if self._reach is None:  # scalars: every box is the same single element
            yield from ((index, box) for index in range(len(self.boxes)))
            return
        first = int(np.searchsorted(self._reach, box.offset[self._dim], side="right"))
        end = box.offset[self._dim] + box.size[self._dim]
        last = int(np.searchsorted(self._begins[:, self._dim], end, side="left"))
        if last - first <= 4:
            near = range(first, last)
        else:
            low = np.maximum(self._begins[first:last], box.offset)
            high = np.minimum(self._ends[first:last], np.add(box.offset, box.size))
            near = (np.flatnonzero((high > low).all(axis=1)) + first).tolist()
        for index in near:
            shared = intersection(self.boxes[index], box)
            if shared is not None:
                yield index, shared

    def first_overlap(self) -> Box | None:
        """Return a box that two of the boxes share, or None when they are disjoint."""
        for index, box in enumerate(self.boxes):
            for other, shared in self.meeting(box):
                if other != index:
                    return shared
        return None
