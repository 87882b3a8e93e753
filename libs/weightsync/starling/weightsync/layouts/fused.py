"""Fused parameters: canonical tensors concatenated, stacked and renamed by the table of a family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from starling.weightsync.layouts.families import Fusion, family_of, model_of
from starling.weightsync.layouts.parameters import Parameter, ParameterPart, Table, shards_of
from starling.weightsync.layouts.placements import Held
from starling.weightsync.layouts.weights import Config, Weight
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, TensorSpec


class LocalWeight(msgspec.Struct, frozen=True, kw_only=True):
    """One canonical tensor as a rank holds it."""

    weight: Weight
    shape: tuple[int, ...]
    """Of the rank's local tensor, with padding."""
    held: tuple[Held, ...]


def transformers_table(config: Config, dtype: str = "") -> Table:
    """List the parameters and persistent buffers of the transformers class of a configuration.

    In their full shapes: the sharding comes from the live tensors. Arguments and errors as `model_of`.
    """
    family, model = family_of(config), model_of(config, dtype)
    weights = (
        LocalWeight(weight=weight, shape=weight.spec.shape, held=(_everything(weight.spec),))
        for weight in model.weights
    )
    parameters = fused_parameters(weights, family.transformers, family.transformers_prefixes)
    return Table(tensors=tuple(weight.spec for weight in model.weights), parameters=parameters)


def fused_parameters(
    weights: Iterable[LocalWeight], fusions: Sequence[Fusion], prefixes: Sequence[tuple[str, str]] = ()
) -> tuple[Parameter, ...]:
    """Combine the tensors of a rank into the parameters of its module.

    Args:
        weights: in the order of the model, in which they are stacked.
        fusions: the table; a tensor that is not in it is a parameter of its own.
        prefixes: prefixes of names and their replacements; the first match applies.
    """
    groups: dict[str, list[tuple[LocalWeight, Fusion | None]]] = {}
    for local in weights:
        name, fusion = _target(local.weight, fusions)
        groups.setdefault(name, []).append((local, fusion))
    made: list[Parameter] = []
    for name, group in groups.items():
        members, fusion = [local for local, _ in group], group[0][1]
        if fusion is None or len(members) % len(fusion.members):
            made += [_parameter(local.weight.spec.name, [local], 0, prefixes) for local in members]
        else:
            made.append(_parameter(name, members, len(fusion.members) if fusion.stacked else 0, prefixes))
    return tuple(made)


def _target(weight: Weight, fusions: Sequence[Fusion]) -> tuple[str, Fusion | None]:
    """Return the name of the parameter that contains `weight`, and the fusion that applies."""
    owner, _, kind = weight.spec.name.rpartition(".")
    module, _, member = owner.rpartition(".")
    for fusion in fusions:
        if member in fusion.members and fusion.stacked == (weight.expert >= 0):
            if fusion.stacked:
                return f"{module.rpartition('.')[0]}.{fusion.name}", fusion
            return f"{module}.{fusion.name}.{kind}", fusion
    return weight.spec.name, None


def _parameter(
    name: str, members: Sequence[LocalWeight], num_stacked: int, prefixes: Sequence[tuple[str, str]]
) -> Parameter:
    """Concatenate `members` along dim 0; with `num_stacked`, that many at each index of a new first dim."""
    parts: list[ParameterPart] = []
    row = 0
    for index, local in enumerate(members):
        layer, row = (index // num_stacked, row if index % num_stacked else 0) if num_stacked else (0, row)
        dims = tuple(range(1, len(local.shape) + 1)) if num_stacked else tuple(range(len(local.shape)))
        spec = local.weight.spec
        for held in local.held:
            inside = (row + held.origin[0], *held.origin[1:]) if held.origin else ()
            offset = (layer, *inside) if num_stacked else inside
            parts.append(ParameterPart(tensor=spec.same_as or spec.name, box=held.box, offset=offset, dims=dims))
        row += local.shape[0] if local.shape else 0
    shape = (row, *members[0].shape[1:]) if members[0].shape else ()
    if num_stacked:
        shape = (len(members) // num_stacked, *shape)
    for begin, instead in prefixes:
        if name.startswith(begin):
            name = instead + name[len(begin) :]
            break
    return Parameter(name=name, shape=shape, dtype=members[0].weight.spec.dtype, parts=tuple(parts))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def layout_of_parameters(
    replica: str, specs: Sequence[TensorSpec], ranks: Sequence[Sequence[Parameter]], places: Sequence[Place] = ()
) -> Layout:
    """Make the layout of ranks that hold whole `Parameter`s, each in row-major memory of its own name.

    Args:
        replica: name of the replica.
        specs: every canonical tensor, with the tied ones.
        ranks: the parameters of each rank.
        places: place of each rank; unknown if empty.
    """
    index = {spec.name: i for i, spec in enumerate(specs)}
    held = tuple(
        RankLayout(
            place=places[rank] if places else Place(),
            shards=tuple(
                shard
                for parameter in parameters
                for shard in shards_of(parameter, index, storage=parameter.name, strides=contiguous(parameter.shape))
            ),
        )
        for rank, parameters in enumerate(ranks)
    )
    return Layout(replica=replica, tensors=tuple(specs), ranks=held)


def _everything(spec: TensorSpec) -> Held:
    origin = (0,) * len(spec.shape)
    return Held(box=Box(offset=origin, size=spec.shape), origin=origin)
