"""Geometry of boxes: intersection, disjointness and cutting. Pure.

Many boxes are two arrays of shape (number of boxes, number of dims): their first elements, and the first elements after
their ends. Intersecting pairs are found by a sweep along one dim: sorted by offset, each box is compared with a short
run of neighbours, never with all boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CHUNK: Final = 1 << 22
"""Maximum number of pairs of neighbours that are compared at once, which bounds the memory of a sweep."""
MAX_PAIRS: Final = 1 << 22
"""Maximum number of pairs of neighbours of one plan, about a second for each million. A trillion parameters in 384
experts, from 1,024 ranks to 64, have half a million."""


class PairBudget:
    """How many pairs of boxes may still be compared for one plan: a peer may send boxes that all cross each other."""

    def __init__(self) -> None:
        self.num_left = MAX_PAIRS

    def take(self, num: int) -> None:
        """Take `num` pairs. Raises WeightsError when there are not so many left."""
        self.num_left -= num
        if self.num_left < 0:
            raise WeightsError(
                f"The boxes of the two layouts cross each other {MAX_PAIRS - self.num_left} times or more, expected at "
                f"most {MAX_PAIRS}."
            )


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box common to `a` and `b`, or None if they share no element."""
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
    """Return a part of `box` that no box of `covers` intersects, or None if they cover it."""
    begin = np.array([cover.offset for cover in covers], np.int64).reshape(len(covers), len(box.offset))
    end = begin + np.array([cover.size for cover in covers], np.int64).reshape(begin.shape)
    return gap_in(box, begin, end)


def gap_in(box: Box, begin: Ints, end: Ints) -> Box | None:
    """Return the first part of `box`, in row-major order, that no box of `begin` and `end` intersects, or None."""
    if not box.volume:
        return None
    if not box.offset:
        return None if len(begin) else box
    low, high = box.offset[0], box.offset[0] + box.size[0]
    edges = np.unique(np.clip(np.concatenate([[low, high], begin[:, 0], end[:, 0]]), low, high)).tolist()
    inner = Box(offset=box.offset[1:], size=box.size[1:])
    for first, last in itertools.pairwise(edges):
        inside = (begin[:, 0] <= first) & (end[:, 0] >= last)
        gap = gap_in(inner, begin[inside, 1:], end[inside, 1:])
        if gap is not None:
            return Box(offset=(first, *gap.offset), size=(last - first, *gap.size))
    return None


def intersecting_pairs(
    begin: Ints, end: Ints, other_begin: Ints, other_end: Ints, pairs: PairBudget
) -> tuple[Ints, Ints]:
    """Return the pairs of boxes that share an element, as two index arrays, sorted by the first, then the second.

    Empty boxes intersect nothing. Scalars (no dims) all intersect. Raises WeightsError if more than `pairs` are
    neighbours.
    """
    if not begin.shape[1]:
        pairs.take(len(begin) * len(other_begin))
        first, second = np.indices((len(begin), len(other_begin))).reshape(2, -1)
        return first.astype(np.int64), second.astype(np.int64)
    dim = _sweep_dim(other_begin)
    found: list[tuple[Ints, Ints]] = []
    for i, j in _neighbours(begin[:, dim], end[:, dim], other_begin[:, dim], other_end[:, dim], pairs):
        shared = (np.maximum(begin[i], other_begin[j]) < np.minimum(end[i], other_end[j])).all(axis=1)
        found.append((i[shared], j[shared]))
    i, j = _concatenated(found)
    order = np.lexsort((j, i))
    return i[order], j[order]


def first_overlap(
    begin: Ints, end: Ints, group: Ints | None = None, *, pairs: PairBudget | None = None
) -> tuple[int, int] | None:
    """Return two boxes that share an element, as indices in ascending order, or None if all are disjoint.

    With `group`, only boxes of equal group (numbers from 0) are compared. Raises WeightsError if more than `pairs` are
    neighbours.
    """
    num_boxes, num_dims = begin.shape
    if group is None:
        group = np.zeros(num_boxes, np.int64)
    if not num_dims:
        begin, end, num_dims = group[:, None], group[:, None] + 1, 1
    dim = _sweep_dims(begin, group)
    rows = np.arange(num_boxes)
    # One axis for all groups: the dense coordinates of each group follow those of the group before.
    edges, dense = np.unique(np.concatenate([begin[rows, dim], end[rows, dim]]), return_inverse=True)
    low = group * (len(edges) + 1) + dense[:num_boxes]
    high = group * (len(edges) + 1) + dense[num_boxes:]
    for i, j in _neighbours(low, high, low, high, pairs):
        later = i < j
        i, j = i[later], j[later]
        shared = (np.maximum(begin[i], begin[j]) < np.minimum(end[i], end[j])).all(axis=1)
        if shared.any():
            at = int(np.flatnonzero(shared)[0])
            return int(i[at]), int(j[at])
    return None


def _sweep_dim(begin: Ints) -> int:
    """Return the dim with the most distinct offsets."""
    return int(np.argmax([len(np.unique(begin[:, dim])) for dim in range(begin.shape[1])]))


def _sweep_dims(begin: Ints, group: Ints) -> Ints:
    """Return for each box the dim with the most distinct offsets in its group."""
    if not len(begin):
        return np.zeros(0, np.int64)
    counts = np.zeros((begin.shape[1], int(group.max()) + 1), np.int64)
    for dim in range(begin.shape[1]):
        order = np.lexsort((begin[:, dim], group))
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(begin[order, dim]) != 0) | (np.diff(group[order]) != 0)
        counts[dim] = np.bincount(group[order][new], minlength=counts.shape[1])
    best: Ints = counts.argmax(axis=0)[group]
    return best


def _neighbours(
    low: Ints, high: Ints, other_low: Ints, other_high: Ints, pairs: PairBudget | None
) -> Iterator[tuple[Ints, Ints]]:
    """Yield, in chunks, the pairs of intervals that may intersect; all that do are among them."""
    order = np.argsort(other_low, kind="stable")
    # The furthest end so far: intervals before the first one that passes `low` cannot intersect it.
    reach = np.maximum.accumulate(other_high[order])
    first = np.searchsorted(reach, low, side="right")
    count = np.maximum(np.searchsorted(other_low[order], high, side="left") - first, 0)
    total = np.concatenate([[0], np.cumsum(count)])
    if pairs is not None:
        pairs.take(int(total[-1]))
    start = 0
    while start < len(low):
        stop = max(start + 1, int(np.searchsorted(total, total[start] + _CHUNK, side="right")) - 1)
        i = np.repeat(np.arange(start, stop), count[start:stop])
        j = np.arange(total[start], total[stop]) - total[i] + first[i]
        yield i, order[j]
        start = stop


def _concatenated(parts: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    none = np.zeros(0, np.int64)
    return (
        np.concatenate([none, *(first for first, _ in parts)]),
        np.concatenate([none, *(second for _, second in parts)]),
    )


class BoxIndex:
    """Index of distinct, non-empty boxes of one tensor, for queries of the boxes that intersect another box."""

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
        # The furthest end so far: boxes before the first one that passes a query's begin cannot intersect the query.
        self._reach = np.maximum.accumulate(ends[:, self._dim]) if num_dims and boxes else None

    def _position(self, box: Box) -> tuple[int, ...]:
        return (box.offset[self._dim] if box.offset else 0, *box.offset, *box.size)

    def intersecting(self, box: Box) -> Iterator[tuple[int, Box]]:
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
