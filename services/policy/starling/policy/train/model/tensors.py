"""The parameters and buffers of a model, and their replacement by others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def all_named(model: torch.nn.Module, *, each_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of `model` with their names; with `each_name`, what is tied with all of them."""
    yield from model.named_parameters(remove_duplicate=not each_name)
    yield from model.named_buffers(remove_duplicate=not each_name)


def replace_tensors(model: torch.nn.Module, by: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters and buffers of `model` wherever they occur: what is tied stays so."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor in by:
                    tensors[name] = by[tensor]  # type: ignore[assignment]
