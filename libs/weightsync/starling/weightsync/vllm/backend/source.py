"""The tensors of a trainer's module, and their layout: nothing is gathered, each rank describes what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from starling.common.errors import WeightsError
from starling.weightsync.tensors.modules import plain_name

Tensors = Mapping[str, torch.Tensor]
Source = Any
"""A `torch.nn.Module`, a mapping of tensors, vLLM's `ModuleSource`, or a function that returns a mapping."""


def tensors_of(source: Source) -> dict[str, torch.Tensor]:
    """Return the tensors of a source by their names in the transformers class: parameters and persistent buffers.

    `DTensor`s stay as they are.

    Raises:
        WeightsError: it is none of the kinds above, or a wrapper that gathers.
    """
    if callable(getattr(source, "metadata", None)):  # a `WeightSource` of vLLM, which would gather
        source = getattr(source, "_module", source)
    if isinstance(source, torch.nn.Module):
        return _module_tensors(source)
    if isinstance(source, Mapping):
        return {plain_name(name): tensor for name, tensor in source.items()}
    if callable(source):
        return tensors_of(source())
    raise WeightsError(
        f"source is a {type(source).__name__}, expected a torch.nn.Module, its ModuleSource, a mapping of tensors, or "
        "a function that returns one: any other source would gather whole tensors."
    )


def config_of(source: Source) -> Any:
    """Return the configuration of a module of transformers, None if there is none."""
    source = getattr(source, "_module", source)
    return getattr(_unwrapped(source), "config", None) if isinstance(source, torch.nn.Module) else None


def converted(tensors: Tensors, wanted: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors that engines need, in their element types; a copy of this rank's part where the type differs.

    Args:
        tensors: of the trainer.
        wanted: element type by name, of what engines need. Names that the trainer lacks are left out: the planner says
            so.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items() if name in wanted}
    return {
        name: tensor if _dtype(tensor) == wanted[name] else tensor.to(getattr(torch, wanted[name]))
        for name, tensor in found.items()
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module in a wrapper of data parallelism or of torch.compile."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise WeightsError("FullyShardedDataParallel keeps flat parameters; use torch.distributed.fsdp.fully_shard.")
    if type(module).__name__ == "DistributedDataParallel":
        return _unwrapped(module.module)  # type: ignore[arg-type]
    inner = getattr(module, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, torch.nn.Module) else module


def _module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    module = _unwrapped(module)
    found: dict[str, torch.Tensor] = {plain_name(name): tensor for name, tensor in module.named_parameters()}
    for path, part in module.named_modules():
        for own, buffer in part.named_buffers(recurse=False):
            if own not in part._non_persistent_buffers_set:
                found[plain_name(f"{path}.{own}" if path else own)] = buffer
    return found
