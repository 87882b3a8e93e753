"""Parameters and the tensors inside them: how canonical tensors lie in an engine's or a module's own parameters.

Engines fuse projections, stack experts and rename; checkpoints do not. A `Parameter` says which box of which canonical
tensor lies where in it, so that fusion is settled here, once, and whoever plans sees only boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from starling.weightsync.boxes import intersection
from starling.weightsync.layout import ITEM_BYTES, Box, Shard, TensorSpec
from starling.weightsync.layouts.placements import Held


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one box of one canonical tensor lies in a parameter."""

    tensor: str
    """The tensor's canonical name."""
    box: Box
    offset: tuple[int, ...]
    """Index of the box's first element in the parameter, per dim of the parameter."""
    dims: tuple[int, ...]
    """The dim of the parameter along which each dim of the tensor runs; the parameter may have more."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a module, in the module's own name and shape, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    """Disjoint. Elements that no part covers are padding."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The canonical tensors of a model, and the parameters that a module makes of them."""

    tensors: tuple[TensorSpec, ...]
    """Of the whole model, with the tied names."""
    parameters: tuple[Parameter, ...]
    """In the module's own names. A tied name is a parameter too, made of its owner: some ranks hold a copy."""


def whole(name: str, shape: Sequence[int], dtype: str) -> Parameter:
    """Return the parameter that is one canonical tensor of the same name and shape."""
    box = Box(offset=(0,) * len(shape), size=tuple(shape))
    part = Part(tensor=name, box=box, offset=box.offset, dims=tuple(range(len(shape))))
    return Parameter(name=name, shape=tuple(shape), dtype=dtype, parts=(part,))


def region(part: Part, num_dims: int) -> Box:
    """Return the box of the parameter, of `num_dims` dims, that `part` fills."""
    size = [1] * num_dims
    for dim, length in zip(part.dims, part.box.size, strict=True):
        size[dim] = length
    return Box(offset=part.offset, size=tuple(size))


def shards_of(
    parameter: Parameter,
    tensors: Mapping[str, int],
    *,
    storage: str,
    strides: Sequence[int],
    held: Iterable[Held] | None = None,
) -> tuple[Shard, ...]:
    """Return the shards that a rank keeps in the memory of one parameter.

    Args:
        parameter: the whole parameter and its parts.
        tensors: index of each canonical tensor in the layout, by name.
        storage: name of the memory, which begins with the first element of the rank's local tensor.
        strides: elements of memory from one index to the next, per dim of the local tensor.
        held: the boxes of the parameter that the local tensor is made of; by default all of it.
    """

    def shard(part: Part, box: Box, index: Sequence[int]) -> Shard:
        elements = sum(i * stride for i, stride in zip(index, strides, strict=True))
        return Shard(
            tensor=tensors[part.tensor],
            box=box,
            storage=storage,
            offset_bytes=elements * ITEM_BYTES[parameter.dtype],
            strides=tuple(strides[dim] for dim in part.dims),
        )

    if held is None:
        return tuple(shard(part, part.box, part.offset) for part in parameter.parts)
    shards: list[Shard] = []
    for mine in held:
        for part in parameter.parts:
            shared = intersection(region(part, len(parameter.shape)), mine.box)
            if shared is None:
                continue
            index = tuple(
                origin + begin - first
                for origin, begin, first in zip(mine.origin, shared.offset, mine.box.offset, strict=True)
            )
            offset = tuple(
                first + shared.offset[dim] - part.offset[dim]
                for first, dim in zip(part.box.offset, part.dims, strict=True)
            )
            shards.append(shard(part, Box(offset=offset, size=tuple(shared.size[dim] for dim in part.dims)), index))
    return tuple(shards)
