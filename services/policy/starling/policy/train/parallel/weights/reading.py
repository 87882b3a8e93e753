"""Reading of a divided model's weights: a rank allocates its parts, and reads them one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from starling.policy.train.model.tensors import all_named, replace_tensors
from starling.policy.train.parallel.weights.parts import part_of

if TYPE_CHECKING:
    from starling.policy.train.model.deferred import DeferredModel


@torch.no_grad()
def read_weights(deferred: DeferredModel, roots: Sequence[torch.nn.Module], dtypes: Mapping[str, torch.dtype]) -> None:
    """Give memory to this rank's parts of a divided model, and read them.

    Args:
        deferred: with the model, on `meta`.
        roots: the modules that FSDP shards as a whole, if they are others than the model.
        dtypes: of the tensors of the whole model, by name; FSDP may train a part in another type.

    Raises:
        ConfigError: a file cannot be read.
    """
    modules: tuple[torch.nn.Module, ...] = (deferred.model, *roots)
    unread = {name for name, tensor in all_named(deferred.model) if tensor.is_meta}
    real: dict[Tensor, Tensor] = {}
    for module in modules:
        for _, tensor in all_named(module):
            if tensor.is_meta and tensor not in real:
                real[tensor] = _empty(tensor, deferred.device)
    for module in modules:
        replace_tensors(module, real)
        module.to(deferred.device)  # by which FSDP takes its new parameters
    parts = {name: part_of(name, tensor) for name, tensor in all_named(deferred.model) if name in unread}
    deferred.fill(parts, dtypes)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.empty_like(tensor, device=device)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(values, requires_grad=tensor.requires_grad) if is_parameter else values
