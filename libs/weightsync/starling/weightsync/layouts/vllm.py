"""Layouts of vLLM workers, from the model's configuration and the sizes of the parallel groups.

Ranks are numbered as in vLLM: pipeline stages outside, tensor parallelism inside. The arithmetic is that of
vLLM's own layers: fused projections, key-value heads shared by neighbouring ranks where there are fewer heads than
ranks, embeddings padded to a multiple of 64 rows, stacked experts. The parameters are those that loading fills; a
backend that repacks them keeps its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.layouts.families import Family, family_of, model_of
from starling.weightsync.layouts.fused import LocalWeight, fused_parameters, layout_of_parameters
from starling.weightsync.layouts.parallelism import even_stages, expert_parallel, pipeline_parallel, tensor_parallel
from starling.weightsync.layouts.parameters import Parameter, Table
from starling.weightsync.layouts.placements import REPLICATE, Held, Only, Placement, Sharded, held_boxes, local_shape
from starling.weightsync.layouts.weights import Config, Model, Weight
from starling.weightsync.plan.layout import Layout, Place

VOCABULARY_MULTIPLE: Final = 64
"""Embeddings and heads are padded to a multiple of this number of rows."""


def worker_table(
    config: Config,
    rank: int,
    *,
    tp: int = 1,
    pp: int = 1,
    whole_experts: bool = False,
    whole_tower: bool = False,
    layers_of_stages: Sequence[int] = (),
    dtype: str = "",
) -> Table:
    """List the parameters of one worker, in their local shapes, and the canonical boxes that fill them.

    Args:
        config: contents of the model's `config.json`.
        rank: of the worker, stage by stage.
        tp: size of tensor parallelism.
        pp: number of pipeline stages.
        whole_experts: whether whole experts are distributed over the `tp` ranks (expert parallelism).
        whole_tower: whether each rank has the whole vision tower and images are distributed (data parallelism).
        layers_of_stages: layers of each stage; by default as in vLLM.
        dtype: as for `model_of`.

    Raises:
        WeightsError: an unknown family, or sizes that do not fit the model.
    """
    model = model_of(config, dtype)
    groups = _groups(model, tp, pp, layers_of_stages, whole_experts, whole_tower)
    parameters = _parameters(family_of(config), model, rank, groups)
    return Table(tensors=tuple(weight.spec for weight in model.weights), parameters=parameters)


def worker_layout(
    config: Config,
    replica: str,
    *,
    tp: int = 1,
    pp: int = 1,
    whole_experts: bool = False,
    whole_tower: bool = False,
    layers_of_stages: Sequence[int] = (),
    dtype: str = "",
    places: Sequence[Place] = (),
) -> Layout:
    """Make the layout of a whole engine; arguments and errors as `worker_table`.

    Storages have the names of the workers' parameters and are assumed to be row-major.

    Args:
        replica: name of the engine, for messages and plans.
        places: place of each worker; unknown if empty.
    """
    model, family = model_of(config, dtype), family_of(config)
    groups = _groups(model, tp, pp, layers_of_stages, whole_experts, whole_tower)
    ranks = [_parameters(family, model, rank, groups) for rank in range(tp * pp)]
    return layout_of_parameters(replica, [weight.spec for weight in model.weights], ranks, places)


class _Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel groups of an engine."""

    tp: int
    layers_of_stages: tuple[int, ...]
    whole_experts: bool
    whole_tower: bool


def _groups(model: Model, tp: int, pp: int, given: Sequence[int], whole_experts: bool, whole_tower: bool) -> _Groups:
    stages = tuple(given) or even_stages(model.num_layers, pp)
    if tp < 1 or len(stages) != pp or sum(stages) != model.num_layers:
        raise WeightsError(
            f"Stages of {stages} layers do not fit a model of {model.num_layers} layers on {pp} x {tp} workers."
        )
    return _Groups(tp=tp, layers_of_stages=stages, whole_experts=whole_experts, whole_tower=whole_tower)


def _parameters(family: Family, model: Model, rank: int, groups: _Groups) -> tuple[Parameter, ...]:
    if not 0 <= rank < groups.tp * len(groups.layers_of_stages):
        raise WeightsError(f"There is no worker {rank} among {len(groups.layers_of_stages)} x {groups.tp}.")
    stage, index = divmod(rank, groups.tp)
    held: list[LocalWeight] = []
    for weight in model.weights:
        if weight.spec.same_as or not _is_held(weight, family, model, stage, groups):
            continue
        placement = _placement(weight, model, groups)
        if isinstance(placement, Only) and index not in placement.indices:
            continue
        held.append(_local(weight, groups.tp, index, placement))
    return fused_parameters(held, family.vllm, family.vllm_prefixes)


def _is_held(weight: Weight, family: Family, model: Model, stage: int, groups: _Groups) -> bool:
    """Whether a pipeline stage has `weight`: vLLM makes some in all stages, and uses them in one."""
    if weight.tower or (family.vllm_repeats_ends and weight.stage != "layer"):
        return True
    lives = pipeline_parallel(weight, model, groups.layers_of_stages)
    return not isinstance(lives, Only) or stage in lives.indices


def _placement(weight: Weight, model: Model, groups: _Groups) -> Placement:
    if groups.whole_tower and weight.tower:
        return REPLICATE
    if groups.whole_experts and weight.expert >= 0:
        return expert_parallel(weight, model.num_experts, groups.tp)
    if weight.cut in ("rows", "columns") and weight.spec.shape[1 if weight.cut == "columns" else 0] % groups.tp:
        raise WeightsError(
            f"vLLM cannot share {weight.spec.name} of shape {weight.spec.shape} evenly over {groups.tp} ranks."
        )
    return tensor_parallel(weight, groups.tp, vocabulary_multiple=VOCABULARY_MULTIPLE)


def _local(weight: Weight, tp: int, index: int, placement: Placement) -> LocalWeight:
    shape = weight.spec.shape
    mine = REPLICATE if isinstance(placement, Only) else placement
    extent, held = _share(shape, tp, index, mine)
    if weight.cut == "vocabulary":  # the local tensor includes the padding
        padded = mine.chunk if isinstance(mine, Sharded) else -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        extent = (padded, *shape[1:])
    return LocalWeight(weight=weight, shape=extent, held=held)


@lru_cache(maxsize=4096)
def _share(
    shape: tuple[int, ...], tp: int, index: int, placement: Placement
) -> tuple[tuple[int, ...], tuple[Held, ...]]:
    """Return the shape and the boxes of a local tensor, cached: many tensors share them."""
    return local_shape(shape, (tp,), (index,), (placement,)), held_boxes(shape, (tp,), (index,), (placement,))
