"""Strided views of row-major tensors, as boxes.

A view of a tensor addresses its elements by an offset and one stride for each of its dims, whatever chain of slices,
transpositions and reshapes led to it. `boxes_of` expresses a copy from such a view into strided memory as boxes of the
tensor and their places in the memory, which is what a `Shard` says. The number of boxes depends on the view, not on the
number of elements: a slice or a permutation is one box, rows that are interleaved with others are one box for each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box

MAX_BOXES: Final = 4096
"""Of one copy. A view that needs more is a permutation of single elements or short runs, which no plan should have."""


class IrregularViewError(WeightsError):
    """A view that is not a moderate number of boxes."""


class Strided(NamedTuple):
    """Strided memory: the index of its first element, and the distance from one index to the next for each dim."""

    offset: int
    strides: tuple[int, ...]


class BoxCopy(NamedTuple):
    """A box of a tensor, and its place in strided memory. Dims of one element have the stride 0."""

    box: Box
    place: Strided


class _Dim(NamedTuple):
    """One dim of a view: its length, and its strides in the tensor and in the memory that is filled."""

    length: int
    stride: int
    to: int


class _Part(NamedTuple):
    """A part of a view that is not divided into boxes yet."""

    offset: int
    to: int
    dims: tuple[_Dim, ...]


def boxes_of(shape: Sequence[int], sizes: Sequence[int], view: Strided, to: Strided) -> list[BoxCopy]:
    """Return the boxes that a copy of a view consists of.

    Args:
        shape: of the row-major tensor that is viewed.
        sizes: of the view, and of the memory that it is copied into.
        view: the view, in elements of the tensor.
        to: the memory, in its elements.

    Raises:
        IrregularViewError: the copy needs more than `MAX_BOXES` boxes.
    """
    if 0 in sizes:
        return []
    dims = tuple(
        _Dim(length, stride, other)
        for length, stride, other in zip(sizes, view.strides, to.strides, strict=True)
        if length > 1
    )
    weights = row_major(shape)
    found: list[BoxCopy] = []
    left = [_Part(view.offset, to.offset, dims)]
    while left:
        part = left.pop()
        smaller = _divided(part, shape, weights)
        if smaller is None:
            found.append(_box(part, shape, weights))
        else:
            left += smaller
        if len(found) + len(left) > MAX_BOXES:
            raise IrregularViewError(
                f"A view of {tuple(sizes)} of a tensor of shape {tuple(shape)} has too many boxes."
            )
    return found


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _digits(offset: int, shape: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Return the index, per dim of the tensor, of the element at `offset`."""
    return [offset // weight % length for weight, length in zip(weights, shape, strict=True)]


def _home(stride: int, shape: Sequence[int], weights: Sequence[int]) -> int:
    """Return the dim of the tensor along which a step of `stride` leads; -1 for a step of 0."""
    homes = (dim for dim, weight in enumerate(weights) if shape[dim] > 1 and 0 < weight <= stride)
    return next(homes, -1)


def _divided(part: _Part, shape: Sequence[int], weights: Sequence[int]) -> list[_Part] | None:
    """Divide `part` further; None if it is one box."""
    groups: dict[int, list[int]] = {}
    for index, dim in enumerate(part.dims):
        home = _home(dim.stride, shape, weights)
        if home < 0 or dim.stride % weights[home]:
            return _single(part, index)
        groups.setdefault(home, []).append(index)
    digits = _digits(part.offset, shape, weights)
    for home, members in groups.items():
        steps = {index: part.dims[index].stride // weights[home] for index in members}
        span = sum(steps[index] * (part.dims[index].length - 1) for index in members)
        if digits[home] + span >= shape[home]:
            return _at_the_end_of_a_row(part, home, steps, digits[home], shape, weights)
    for home, members in groups.items():
        breaking = _breaks_run(part, members, weights[home])
        if breaking is not None:
            return _single(part, breaking)
    return None


def _at_the_end_of_a_row(
    part: _Part, home: int, steps: dict[int, int], digit: int, shape: Sequence[int], weights: Sequence[int]
) -> list[_Part]:
    """Divide a part that continues beyond the end of dim `home` in the next index of a dim outside.

    Args:
        part: the part.
        home: the dim.
        steps: by index into the dims of the part, the distance along `home`.
        digit: where the part begins in `home`.
        shape: as for `boxes_of`.
        weights: `row_major` of it.
    """
    index = max(steps, key=lambda index: steps[index] * (part.dims[index].length - 1))
    dim, step = part.dims[index], steps[index]
    row = weights[home] * shape[home]  # the distance from one index of the dim outside to the next
    if row % dim.stride == 0 and dim.length > (inner := row // dim.stride):
        whole = dim.length // inner * inner
        if whole == dim.length:
            outside = _Dim(dim.length // inner, row, dim.to * inner)
            dims = (*part.dims[:index], outside, _Dim(inner, dim.stride, dim.to), *part.dims[index + 1 :])
            return [_Part(part.offset, part.to, tuple(one for one in dims if one.length > 1))]
        if digit == 0:
            return _cut(part, index, whole)
    others = sum(steps[other] * (part.dims[other].length - 1) for other in steps if other != index)
    fitting = (shape[home] - 1 - digit - others) // step + 1
    return _cut(part, index, min(max(fitting, 1), dim.length - 1))


def _breaks_run(part: _Part, members: Sequence[int], weight: int) -> int | None:
    """Return the first of some dims of `part` that does not continue the run of those inside; None if all do.

    Args:
        part: the part.
        members: indices of the dims that lead along the same dim of the tensor.
        weight: stride of this dim.
    """
    run, stride = 1, 0
    for index in sorted(members, key=lambda index: part.dims[index].stride):
        dim = part.dims[index]
        if dim.stride != run * weight or (run > 1 and dim.to != stride * run):
            return index
        stride = stride if run > 1 else dim.to
        run *= dim.length
    return None


def _cut(part: _Part, index: int, at: int) -> list[_Part]:
    """Divide a dim of `part` into the indices before `at` and the others."""
    dim = part.dims[index]
    parts = []
    for begin, length in ((0, at), (at, dim.length - at)):
        kept = (dim._replace(length=length),) if length > 1 else ()
        dims = (*part.dims[:index], *kept, *part.dims[index + 1 :])
        parts.append(_Part(part.offset + begin * dim.stride, part.to + begin * dim.to, dims))
    return parts


def _single(part: _Part, index: int) -> list[_Part]:
    """Divide a dim of `part` into its single indices."""
    dim, dims = part.dims[index], (*part.dims[:index], *part.dims[index + 1 :])
    if dim.length > MAX_BOXES:
        raise IrregularViewError(f"A view has {dim.length} single indices along one of its dims.")
    return [_Part(part.offset + i * dim.stride, part.to + i * dim.to, dims) for i in range(dim.length)]


def _box(part: _Part, shape: Sequence[int], weights: Sequence[int]) -> BoxCopy:
    size, strides = [1] * len(shape), [0] * len(shape)
    for dim in sorted(part.dims, key=lambda dim: dim.stride):
        home = _home(dim.stride, shape, weights)
        if size[home] == 1:
            strides[home] = dim.to
        size[home] *= dim.length
    offset = tuple(_digits(part.offset, shape, weights))
    return BoxCopy(Box(offset=offset, size=tuple(size)), Strided(part.to, tuple(strides)))


def merged(copies: Iterable[BoxCopy]) -> list[BoxCopy]:
    """Join copies of one tensor into one memory that are adjacent in both, dim by dim."""
    left = list(copies)
    num_dims = len(left[0].box.offset) if left else 0
    for dim in reversed(range(num_dims)):
        left = _merged_along(dim, left)
    return sorted(left, key=lambda copy: (copy.place.offset, copy.box.offset))


def _merged_along(dim: int, copies: Sequence[BoxCopy]) -> list[BoxCopy]:
    beside: dict[tuple[object, ...], list[BoxCopy]] = {}
    for copy in sorted(copies, key=lambda copy: copy.box.offset[dim]):
        box, strides = copy.box, copy.place.strides
        others = tuple(i for i in range(len(box.size)) if i != dim)
        key = tuple((box.offset[i], box.size[i], strides[i]) for i in others)
        rows = beside.setdefault(key, [])
        joined = _joined(rows[-1], copy, dim) if rows else None
        if joined is None:
            rows.append(copy)
        else:
            rows[-1] = joined
    return [copy for rows in beside.values() for copy in rows]


def _joined(first: BoxCopy, second: BoxCopy, dim: int) -> BoxCopy | None:
    """Return two copies as one if the second follows the first along `dim`, in its tensor and in memory."""
    length, more = first.box.size[dim], second.box.size[dim]
    distance = second.place.offset - first.place.offset
    if second.box.offset[dim] != first.box.offset[dim] + length or distance <= 0 or distance % length:
        return None
    stride = distance // length
    for copy in (first, second):
        if copy.box.size[dim] > 1 and copy.place.strides[dim] != stride:
            return None
    size = (*first.box.size[:dim], length + more, *first.box.size[dim + 1 :])
    strides = (*first.place.strides[:dim], stride, *first.place.strides[dim + 1 :])
    return BoxCopy(Box(offset=first.box.offset, size=size), Strided(first.place.offset, strides))
