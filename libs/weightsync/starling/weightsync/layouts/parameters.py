"""Parameters of a module or engine, and the canonical tensors that they consist of.

Engines fuse projections, stack experts and rename; checkpoints do not. A `Parameter` maps boxes of canonical tensors to
positions in it, so that the planner only sees boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.layouts.placements import Held
from starling.weightsync.plan.boxes import intersection
from starling.weightsync.plan.layout import ITEM_BYTES, Box, Shard, TensorSpec


class ParameterPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Position of one box of one canonical tensor in a parameter."""

    tensor: str
    """The tensor's canonical name."""
    box: Box
    offset: tuple[int, ...]
    """Index of the box's first element in the parameter, per dim of the parameter."""
    dims: tuple[int, ...]
    """Dim of the parameter for each dim of the tensor; the parameter may have more dims."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a module, with the module's own name and shape, and its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[ParameterPart, ...]
    """Disjoint. Elements that no part covers are padding."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The canonical tensors of a model, and the parameters of a module that consist of them."""

    tensors: tuple[TensorSpec, ...]
    """Canonical tensors of the whole model, with the tied names."""
    parameters: tuple[Parameter, ...]
    """With the module's own names. A tied name is a parameter too, with parts of its owner: some ranks hold a copy."""


def in_terms_of(table: Table, other: Table) -> Table:
    """Return `table` with its parameters expressed in parts of the parameters of `other`, not of canonical tensors.

    A publisher of a module's parameters under the module's own names needs no table; a destination with other
    parameters, such as an engine's workers, then refers to those. Parts that are adjacent in both become one part: one
    for all stacked experts, not one for each.

    Args:
        table: of the same model; each of its tensors is in some parameter of `other`.
        other: its parameters become the tensors. Of parameters with the same tensors the first owns them.

    Raises:
        WeightsError: a stacked parameter of `other` that is not stacked in `table`.
    """
    homes: dict[str, list[tuple[str, ParameterPart]]] = {}
    owners: dict[str, str] = {}
    specs = []
    for parameter in other.parameters:
        owner = owners.setdefault(parameter.parts[0].tensor, parameter.name)
        tie = "" if owner == parameter.name else owner
        specs.append(TensorSpec(name=parameter.name, shape=parameter.shape, dtype=parameter.dtype, same_as=tie))
        for part in () if tie else parameter.parts:
            homes.setdefault(part.tensor, []).append((parameter.name, part))
    parameters = []
    for parameter in table.parameters:
        parts = (
            _moved(part, home, name, len(parameter.shape))
            for part in parameter.parts
            for name, home in homes.get(part.tensor, ())
        )
        merged = _merged(part for part in parts if part is not None)
        parameters.append(msgspec.structs.replace(parameter, parts=merged))
    return Table(tensors=tuple(specs), parameters=tuple(parameters))


def _moved(part: ParameterPart, home: ParameterPart, name: str, num_dims: int) -> ParameterPart | None:
    """Return the part of `part` from `home`, a part of parameter `name`; `num_dims` of the filled parameter."""
    shared = intersection(part.box, home.box)
    if shared is None:
        return None
    unused = [dim for dim in range(num_dims) if dim not in part.dims]
    start, size = list(home.offset), [1] * len(home.offset)
    dims: dict[int, int] = {}
    for at, (there, here) in enumerate(zip(home.dims, part.dims, strict=True)):
        start[there] += shared.offset[at] - home.box.offset[at]
        size[there], dims[there] = shared.size[at], here
    for there in range(len(size)):
        if there not in dims:  # a single index of the stack
            if not unused:
                raise WeightsError(f"{name} stacks {part.tensor}, but the parameter that it fills does not.")
            dims[there] = unused.pop(0)
    offset = list(part.offset)
    for at, here in enumerate(part.dims):
        offset[here] += shared.offset[at] - part.box.offset[at]
    box = Box(offset=tuple(start), size=tuple(size))
    return ParameterPart(
        tensor=name, box=box, offset=tuple(offset), dims=tuple(dims[there] for there in range(len(size)))
    )


def _merged(parts: Iterable[ParameterPart]) -> tuple[ParameterPart, ...]:
    """Join parts that are adjacent along the first dim, both in their tensor and in the parameter."""
    made: list[ParameterPart] = []
    last: dict[tuple[object, ...], int] = {}
    for part in parts:
        if not part.dims:
            made.append(part)
            continue
        along, box = part.dims[0], part.box
        beside = (*part.offset[:along], *part.offset[along + 1 :])
        key = (part.tensor, part.dims, box.offset[1:], box.size[1:], beside)
        before = made[last[key]] if key in last else None
        step = before.box.size[0] if before else 0
        if before and (box.offset[0], part.offset[along]) == (before.box.offset[0] + step, before.offset[along] + step):
            longer = Box(offset=before.box.offset, size=(step + box.size[0], *box.size[1:]))
            made[last[key]] = msgspec.structs.replace(before, box=longer)
        else:
            last[key] = len(made)
            made.append(part)
    return tuple(made)


def whole(name: str, shape: Sequence[int], dtype: str) -> Parameter:
    """Return the parameter that consists of one canonical tensor of the same name and shape."""
    box = Box(offset=(0,) * len(shape), size=tuple(shape))
    part = ParameterPart(tensor=name, box=box, offset=box.offset, dims=tuple(range(len(shape))))
    return Parameter(name=name, shape=tuple(shape), dtype=dtype, parts=(part,))


def region(part: ParameterPart, num_dims: int) -> Box:
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
    """Return the shards of a rank in the memory of one parameter.

    Args:
        parameter: the whole parameter and its parts.
        tensors: index of each canonical tensor in the layout, by name.
        storage: name of the memory, which begins with the first element of the rank's local tensor.
        strides: elements of memory from one index to the next, per dim of the local tensor.
        held: the boxes of the parameter in the local tensor; by default all of it.
    """

    def shard(part: ParameterPart, box: Box, index: Sequence[int]) -> Shard:
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
