"""Low-rank adapters on a mesh: which of them ranks can divide, and how tensor parallelism divides their factors.

An adapter of W [out, in] has the factors A [r, in] and B [out, r], and computes W x + s B (A x):

    columns     a rank has rows of W and of B, for its part of the output; A is whole
    rows        a rank has columns of W and of A, for its part of the input; B is whole, and computes the rank's tokens
    whole       a rank has all three, and goes on with a part of the output

A rank computes a part of the gradient of a whole factor. Parts are summed once per update, like those of other whole
parameters, so an adapter adds one exchange of r numbers per token to the passes, for rows, and nothing for columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.memory.blocks import block_list
from starling.policy.train.model.lm_head import SCORE
from starling.policy.train.model.lora import merged_tensors
from starling.policy.train.parallel.weights.parts import part_of
from starling.weightsync.tensors.adapters import ADAPTER, adapted_layers, base_name, is_adapted


def check_adapters(model: torch.nn.Module, settings: ParallelSettings) -> None:
    """Check that the ranks of a mesh can divide the adapters of `model`, if it has any.

    Raises:
        ConfigError: names the axis, the layer and the remedy.
    """
    if not is_adapted(model):
        return
    config: Any = model.peft_config[ADAPTER]  # type: ignore[index]
    if settings.tp > 1 and config.use_dora:
        raise ConfigError(
            f"policy.parallel.tp = {settings.tp} divides rows whose lengths model.lora.dora = true needs: set tp "
            "to 1 and use dp_shard, or remove dora"
        )
    blocks = block_list(model)
    inside, scores = {module for block in blocks for module in block.modules()}, getattr(model, SCORE, None)
    for name, layer in adapted_layers(model):
        if layer is not scores:  # which is whole on each rank, or in one stage
            _check_layer(base_name(name), layer, settings, is_inside=layer in inside)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if settings.num_shards > 1 and len(kinds) > 1:
        raise ConfigError(
            f"model.lora.modules_to_save names modules of {next(iter(kinds - {torch.float32}))} beside adapters of "
            'float32, which dp_shard and cp cannot shard together: set model.dtype = "float32", or remove it'
        )


def _check_layer(name: str, layer: Any, settings: ParallelSettings, *, is_inside: bool) -> None:
    for axis, size in (("tp", settings.tp), ("pp", settings.pp)):
        if size > 1 and not is_inside:
            raise ConfigError(
                f"policy.parallel.{axis} = {size} with [model.lora] is available for layers of the blocks, "
                f"and {name} is none: leave it out of model.lora, or set {axis} to 1"
            )
    if settings.tp > 1 and hasattr(layer, "modules_to_save"):
        raise ConfigError(
            f"policy.parallel.tp = {settings.tp} divides {name}, which model.lora.modules_to_save trains in full: "
            "remove it there, or set tp to 1"
        )
    if settings.ep > 1 and hasattr(layer, "parameter_name"):
        raise ConfigError(
            f"policy.parallel.ep = {settings.ep} divides experts whose adapters are one tensor for all of them, "
            f"{name}: remove model.lora.parameters, or set ep to 1"
        )


def check_mergeable(model: torch.nn.Module) -> None:
    """Check that several ranks can export `model` with its adapters merged.

    Raises:
        ConfigError: names the layer and the remedy.
    """
    for name, layer in adapted_layers(model):
        if getattr(layer, "use_dora", {}).get(ADAPTER) or hasattr(layer, "parameter_name"):
            raise ConfigError(
                f"model.lora.merged = true with several ranks is available for plain adapters of layers, and that of "
                f"{base_name(name)} is none: set it to false, and merge with `starling export` on one rank"
            )


def merged_parts(
    model: torch.nn.Module, owned: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Part]:
    """Return this rank's parts of `model` with its adapters merged, in host memory, by the names without adapters.

    The update of one layer at a time exists whole, computed as on one rank: so are the bits.

    Args:
        model: of this rank. All ranks call this.
        owned: see `ParallelModel.owned`.
    """
    tensors = merged_tensors(model)
    own = owned(tensors).keys()
    parts = {name: part_of(name, tensors[name]) for name in own}
    for name, layer in adapted_layers(model):
        if not hasattr(layer, "lora_A"):
            continue  # trained in full
        first, second = (_whole(factors[ADAPTER].weight) for factors in (layer.lora_A, layer.lora_B))
        weight = f"{base_name(name)}.weight"
        if weight not in own:
            continue
        update = second @ first * layer.scaling[ADAPTER]
        parts[weight] = part = parts[weight].moved(parts[weight].local.clone())
        for start, box in part.boxes().items():
            box += update[tuple(slice(one, one + size) for one, size in zip(start, box.shape, strict=True))]
    return {name: part.moved(part.local.cpu()) for name, part in parts.items()}


def _whole(factor: Tensor) -> Tensor:
    detached = factor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def base_layer(module: torch.nn.Module) -> torch.nn.Module:
    """Return the layer that an adapter changes, or `module` where it has none."""
    return module.base_layer if hasattr(module, "lora_A") else module  # type: ignore[return-value]


def divided_factors(module: Any, *, by_rows: bool) -> list[torch.nn.Module]:
    """Return what ranks divide of a layer of which they have columns, or rows: the layer, and a factor of its adapter.

    The other factor is whole. That of columns computes the whole input, and that of rows the rank's tokens, so that a
    rank has a part of its gradient.
    """
    if not hasattr(module, "lora_A"):
        return [module]
    factors = module.lora_A if by_rows else module.lora_B
    return [module.base_layer, factors[ADAPTER]]
