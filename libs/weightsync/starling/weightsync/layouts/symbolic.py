"""Layouts of models that exist only as a configuration, for a parallelism in words.

`fsdp256`, `hsdp4x64`, `tp8 x16`, `ep64 fsdp4`, `pp4 tp8`: axes of a mesh, the first one outermost, and the number of
replicas. A tensor is described once, not once per rank: a few hundred patterns describe millions of shards.

| axis | places |
|---|---|
| `dp N` | all tensors, replicated |
| `fsdp N` | each tensor by dim 0 |
| `hsdp R x S` | each tensor by dim 0 over S ranks, R times |
| `tp N` | rows or columns of projections, vocabularies, heads (shared by neighbours if there are fewer than N) |
| `ep N` | whole routed experts; for other tensors it is joined with `fsdp` if there is one, and otherwise `dp` |
| `tep N` | whole routed experts; for other tensors it is `tp` |
| `pp N` | layers |
| `x N` | number of replicas |
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, cast

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.layouts.parallelism import even_stages, expert_parallel, pipeline_parallel, tensor_parallel
from starling.weightsync.layouts.placements import (
    REPLICATE,
    Placement,
    Sharded,
    coordinate_of,
    held_boxes,
    local_shape,
    split_of_mesh,
)
from starling.weightsync.layouts.weights import Config, Model, Weight
from starling.weightsync.plan.compact import CompactLayout, TensorSplit, make_tensor_split
from starling.weightsync.plan.layout import Layout, Place, RankLayout, Shard, TensorSpec, item_bytes

Axis: TypeAlias = Literal["dp", "fsdp", "tp", "ep", "tep", "pp"]

MAX_DIGITS: Final = 5
"""Of a size; a layout of a million ranks would take hours to plan."""
_WORD: Final = re.compile(r"(?:(dp|fsdp|tp|ep|tep|pp)(\d+)|hsdp(\d+)x(\d+)|x(\d+))")


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """Parallelism of one replica, and the number of replicas."""

    axes: tuple[tuple[Axis, int], ...]
    """Names and lengths, the outermost first."""
    num_replicas: int = 1

    @property
    def mesh(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return math.prod(self.mesh)


class SymbolicTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor and its placements on the mesh of its replica."""

    spec: TensorSpec
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    """One per axis of the mesh. A tied tensor uses those of its owner."""


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tensors as one replica holds them, and the number of equal replicas."""

    model: Model
    parallelism: Parallelism
    tensors: tuple[SymbolicTensor, ...]


def parse_parallelism(text: str) -> Parallelism:
    """Read words such as `hsdp4x64` or `pp4 tp8 x16`.

    Raises:
        WeightsError: an unknown word, a repeated axis, or a size of zero.
    """
    axes: list[tuple[Axis, int]] = []
    num_replicas = 0
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None:
            raise WeightsError(
                f"{word!r} in {text!r} is not a parallelism; use dp2, fsdp8, hsdp4x8, tp8, ep8, tep8, pp4, x16."
            )
        axis, size, copies, shares, replicas = found.groups()
        if any(len(number) > MAX_DIGITS for number in (size, copies, shares, replicas) if number):
            raise WeightsError(
                f"{word[:20]!r} in {text[:40]!r} has a size of more than {MAX_DIGITS} digits; give less."
            )
        if replicas:
            if num_replicas:
                raise WeightsError(f"The number of replicas is repeated in {text!r}.")
            num_replicas = int(replicas)
        elif axis:
            axes.append((cast(Axis, axis), int(size)))
        else:
            axes += [("dp", int(copies)), ("fsdp", int(shares))]
        if "0" in (size, copies, shares, replicas) or (replicas and not num_replicas):
            raise WeightsError(f"{word!r} in {text!r} has a size of zero.")
    names = [axis for axis, _ in axes]
    doubled = next((axis for axis in names if names.count(axis) > 1), None)
    if doubled or {"tp", "tep"} <= set(names) or {"ep", "tep"} <= set(names):
        raise WeightsError(
            f"{text!r} names an axis twice; each of dp, fsdp, tp, ep and pp may occur once, tep for tp and ep."
        )
    return Parallelism(axes=tuple(axes) or (("dp", 1),), num_replicas=num_replicas or 1)


def model_layout(
    config: Config,
    parallelism: str,
    *,
    dtype: str = "",
    vocabulary_multiple: int = 1,
    layers_of_stages: Sequence[int] = (),
) -> ModelLayout:
    """Describe the layout of a model, from its configuration and a parallelism in words.

    Args:
        config: contents of the model's `config.json`.
        parallelism: as `parse_parallelism` reads it.
        dtype: element type of the weights; by default the configuration's, else bfloat16.
        vocabulary_multiple: rows of embeddings are padded to a multiple of this, 64 for vLLM.
        layers_of_stages: layers of each pipeline stage; by default by `even_stages`.

    Raises:
        WeightsError: an unknown family, unknown words, or sizes that do not fit the model.
    """
    model, spread = model_of(config, dtype), parse_parallelism(parallelism)
    sizes = dict(spread.axes)
    stages = tuple(layers_of_stages) or even_stages(model.num_layers, sizes.get("pp", 1))
    if len(stages) != sizes.get("pp", 1) or sum(stages) != model.num_layers:
        raise WeightsError(f"Stages of {stages} layers do not fit {model.num_layers} layers on {parallelism!r}.")
    _check_axes(spread, parallelism, vocabulary_multiple)
    known: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Placement, ...]]] = {}
    tensors: list[SymbolicTensor] = []
    for weight in model.weights:
        # Computed once per key: tens of thousands of experts share a few hundred.
        key = (weight.spec.shape, weight.cut, weight.units, weight.blocks, weight.stage, weight.layer, weight.expert)
        if key not in known:
            known[key] = _place(weight, model, spread, stages, vocabulary_multiple)
        mesh, placements = known[key]
        tensors.append(SymbolicTensor(spec=weight.spec, mesh=mesh, placements=placements))
    return ModelLayout(model=model, parallelism=spread, tensors=tuple(tensors))


def compact_layout(layout: ModelLayout, replica: str, places: Sequence[Place] = ()) -> CompactLayout:
    """Return one replica of `layout` in compact form: one split per distinct shape and placement.

    Args:
        layout: from `model_layout`.
        replica: name of the replica.
        places: place of each rank; unknown if empty.
    """
    splits: list[TensorSplit] = []
    known: dict[object, int] = {}
    split_of: list[int] = []
    for tensor in layout.tensors:
        shape = tensor.spec.shape
        key = (shape, tensor.spec.same_as != "", tensor.mesh, tensor.placements)
        if key not in known:
            known[key] = len(splits)
            if tensor.spec.same_as:
                splits.append(make_tensor_split(shape, (), (), ()))
            else:
                splits.append(split_of_mesh(shape, tensor.mesh, tensor.placements))
        split_of.append(known[key])
    return CompactLayout(
        replica=replica,
        tensors=tuple(tensor.spec for tensor in layout.tensors),
        places=tuple(places) or (Place(),) * layout.parallelism.num_ranks,
        splits=tuple(splits),
        split_of=np.array(split_of, np.int64),
    )


def shard_layout(layout: ModelLayout, replica: str, places: Sequence[Place] = ()) -> Layout:
    """Return one replica of `layout` shard by shard, each tensor in row-major memory of its own name.

    For small models: there is one object per shard. Arguments as `compact_layout`.
    """
    ranks: list[RankLayout] = []
    for rank in range(layout.parallelism.num_ranks):
        shards: list[Shard] = []
        for index, tensor in enumerate(layout.tensors):
            if tensor.spec.same_as:
                continue
            at = coordinate_of(rank, tensor.mesh)
            strides = contiguous(local_shape(tensor.spec.shape, tensor.mesh, at, tensor.placements))
            for held in held_boxes(tensor.spec.shape, tensor.mesh, at, tensor.placements):
                elements = sum(i * stride for i, stride in zip(held.origin, strides, strict=True))
                shards.append(
                    Shard(
                        tensor=index,
                        box=held.box,
                        storage=tensor.spec.name,
                        offset_bytes=elements * item_bytes(tensor.spec),
                        strides=strides,
                    )
                )
        ranks.append(RankLayout(place=places[rank] if places else Place(), shards=tuple(shards)))
    tensors = tuple(tensor.spec for tensor in layout.tensors)
    return Layout(replica=replica, tensors=tensors, ranks=tuple(ranks))


def _check_axes(spread: Parallelism, text: str, vocabulary_multiple: int) -> None:
    names = [axis for axis, _ in spread.axes]
    if "ep" in names and "fsdp" in names and abs(names.index("ep") - names.index("fsdp")) != 1:
        raise WeightsError(
            f"In {text!r} ep and fsdp are not adjacent, but split the tensors outside experts together; join them."
        )
    if vocabulary_multiple > 1 and "fsdp" in names:
        raise WeightsError(f"{text!r} has an axis fsdp: trainers do not pad vocabularies, so the multiple must be 1.")


def _place(
    weight: Weight, model: Model, spread: Parallelism, stages: tuple[int, ...], vocabulary_multiple: int
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Return the mesh of one weight and its placement along each axis.

    `ep` and an adjacent `fsdp` are one axis for tensors that are not of routed experts.
    """
    routed = weight.expert >= 0
    axes = list(spread.axes)
    names = [axis for axis, _ in axes]
    if not routed and "ep" in names and "fsdp" in names:
        first = min(names.index("ep"), names.index("fsdp"))
        axes[first : first + 2] = [("fsdp", axes[first][1] * axes[first + 1][1])]
    placements: list[Placement] = []
    factor = 1  # number of shares of dim 0 by the inner axes, each of which fsdp cuts
    for axis, size in reversed(axes):
        placement: Placement = REPLICATE
        if axis == "pp":
            placement = pipeline_parallel(weight, model, stages)
        elif routed and axis in ("ep", "tep"):
            placement = expert_parallel(weight, model.num_experts, size)
        elif axis in ("tp", "tep"):
            placement = tensor_parallel(weight, size, vocabulary_multiple=vocabulary_multiple)
            if isinstance(placement, Sharded) and placement.dim == 0:
                factor = size // placement.copies * placement.factor
        elif axis == "fsdp" and weight.spec.shape:
            placement = Sharded(dim=0, factor=factor)
        placements.append(placement)
    return tuple(size for _, size in axes), tuple(reversed(placements))
