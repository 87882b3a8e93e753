"""The transformer blocks of a model, whatever it calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from starling.common.errors import ConfigError


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks: the list of modules of one class that holds the most parameters.

    By parameters, because lists of experts may lie inside blocks. Of a vision-language model only the language model
    counts.

    Raises:
        ConfigError: the model has no such list.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder: torch.nn.Module = model if get_decoder is None else get_decoder()
    lists = [
        list(module)
        for module in decoder.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(item) for item in module}) == 1
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal blocks: leave policy.memory.checkpointing at none and "
            "policy.memory.compile off"
        )
    return max(lists, key=lambda blocks: sum(parameter.numel() for block in blocks for parameter in block.parameters()))


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let `forward(module, ...)` be what this one module computes; it finds the former one by `class_forward`.

    The module stays the object that it is, and its tensors keep their names. A bound method, because a copy of the
    module must call itself: a closure would go on computing with the weights of the original.
    """
    assert "forward" not in vars(module), "a module is changed once"
    module.forward = MethodType(forward, module)


def class_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute what the module's class says."""
    return type(module).forward(module, *args, **kwargs)


# JOINED from starling.policy.train.compiled: Compiled transformer blocks.


def compile_blocks(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each block of `model`, in place: its tensors keep their names.

    Blocks and not the whole model: they share one code, which is compiled once for all, and the sizes of microbatches
    vary from step to step. A copy of the model runs uncompiled.
    """
    for block in find_blocks(model):
        block.compile(backend=backend)
