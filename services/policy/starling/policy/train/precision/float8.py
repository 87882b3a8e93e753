"""Linear layers of torchao that multiply in FP8, and their weights as FSDP gathers them in FP8.

Imports torchao, which takes seconds: import this module only where it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.float8.config import Float8LinearConfig  # type: ignore[import-untyped]
from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]
from torchao.float8.fsdp_utils import (  # type: ignore[import-untyped]
    WeightWithDynamicFloat8CastTensor,
    precompute_float8_dynamic_scale_for_fsdp,
)

_RECIPES: Final = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_gw_hp": "rowwise_with_gw_hp",
}
"""Names in torchao."""


def replace_layers(model: torch.nn.Module, names: Sequence[str], kind: str, *, emulate: bool) -> None:
    """Replace linear layers of `model`, in place, by layers with the same parameters that multiply in FP8.

    Args:
        model: not on a mesh yet.
        names: of the layers.
        kind: see `PrecisionSettings`.
        emulate: multiply the decoded operands in float32: the same result, but for the order of additions.
    """
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(_RECIPES[kind]), emulate=emulate)
    for name in names:
        linear = model.get_submodule(name)
        layer = Float8Linear.from_float(linear, config).train(linear.training)
        if not emulate:
            # The gradient of a weight is a sum over tokens, of any number, and tensor cores sum 16 products at a time.
            products = layer.linear_mm_config
            layer.linear_mm_config = products._replace(grad_weight=products.grad_weight._replace(pad_inner_dim=True))
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)


def gather_codes(model: torch.nn.Module, roots: Sequence[torch.nn.Module], num_ranks: int) -> None:
    """Make FSDP, which `model` is sharded by next, gather the weights of layers with one scale as codes.

    The scales of all weights are computed once in each pass, by one reduction over the ranks. A weight whose rows
    `num_ranks` do not divide is gathered in its own type.

    Args:
        model: with its layers replaced, on the other axes of its mesh already.
        roots: modules whose forward passes begin a pass.
        num_ranks: over which FSDP shards.
    """
    wrapped = dict[int, torch.nn.Parameter]()
    for layer in _layers(model):
        weight = layer.weight
        if not _local(weight).shape[0] % num_ranks:
            layer.weight = wrapped.setdefault(id(weight), _wrapped(layer))
    for root in roots:
        root.register_forward_pre_hook(_compute_scales)


def _layers(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, Float8Linear))


def _compute_scales(root: torch.nn.Module, _: Any) -> None:
    precompute_float8_dynamic_scale_for_fsdp(root)


def _wrapped(layer: Any) -> torch.nn.Parameter:
    """Return the weight of `layer`, in the same memory, as a parameter that FSDP gathers as codes."""
    weight = layer.weight
    dtype = layer.config.cast_config_weight.target_dtype
    own: Tensor = WeightWithDynamicFloat8CastTensor(_local(weight).detach(), layer.linear_mm_config, dtype)
    if isinstance(weight, DTensor):
        own = DTensor.from_local(
            own,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return torch.nn.Parameter(own, requires_grad=weight.requires_grad)


def _local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight
