"""DoRA at the pace of plain adapters: what depends on weights alone is computed once for each version.

As peft computes it, each forward pass makes the whole matrix that an adapter adds, for the lengths of its rows. In
training that is lost among much else; token by token it takes 3 to 8 times as long as all the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from starling.weightsync.tensors.adapters import adapted_layers, is_adapted


class CachedWeightNorms:
    """The part of an adapted linear layer that makes DoRA of it (arXiv:2402.09353), bit for bit as peft's."""

    def __init__(self) -> None:
        self._scale: Tensor | None = None

    def forget(self) -> None:
        """Compute the lengths anew in the next pass: the weights have changed."""
        self._scale = None

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return what the layer gives for `x`, where `result` is what it gives without its adapter."""
        if self._scale is None:
            self._scale = _scale(module, active_adapter, x.dtype)
        bias = module.get_base_layer().bias
        plain = result if bias is None else result - bias
        added = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        scaling: float = module.scaling[active_adapter]
        dora: Tensor = (self._scale - 1) * plain + self._scale * added * scaling
        return result + dora


def cache_weight_norms(model: torch.nn.Module) -> tuple[CachedWeightNorms, ...]:
    """Let the linear layers of `model` that have DoRA adapters keep the lengths of their rows.

    Returns:
        What must `forget` whenever weights have changed.
    """
    if not is_adapted(model):
        return ()
    from peft.tuners.lora.variants import DoraLinearVariant

    kept = []
    for _, layer in adapted_layers(model):
        for adapter, variant in getattr(layer, "lora_variant", {}).items():
            if isinstance(variant, DoraLinearVariant):
                layer.lora_variant[adapter] = CachedWeightNorms()
                kept.append(layer.lora_variant[adapter])
    return tuple(kept)


def _scale(module: Any, adapter: str, dtype: torch.dtype) -> Tensor:
    """Return by how much each row of the layer's weight is lengthened, shape [1, rows]."""
    dora = module.lora_magnitude_vector[adapter]
    added = dora.get_lora_weight(lora_A=module.lora_A[adapter], lora_B=module.lora_B[adapter]).to(dtype)
    weight = module.get_base_layer().weight.to(dtype)
    length = dora.get_weight_norm(weight=weight, lora_weight=added, scaling=module.scaling[adapter])
    scale: Tensor = (dora.weight / length).view(1, -1)
    return scale
