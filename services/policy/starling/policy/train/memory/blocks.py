"""Transformer blocks of a model, independent of their names: finding them, and replacing their forward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import torch

from starling.common.errors import ConfigError


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks, see `block_list`."""
    return list(block_list(model))


def block_list(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of modules of one class with the most parameters.

    Parameters decide, because blocks may contain lists of experts. Only the language model of a vision-language model
    is searched.

    Raises:
        ConfigError: the model has no such list.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder: torch.nn.Module = model if get_decoder is None else get_decoder()
    lists = [
        module
        for module in decoder.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(item) for item in module}) == 1
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of blocks of one class: leave policy.memory.checkpointing and "
            "policy.precision.kind at none, and policy.memory.compile off"
        )
    return max(lists, key=lambda blocks: sum(parameter.numel() for block in blocks for parameter in block.parameters()))


def last_norm(model: torch.nn.Module) -> str:
    """Return the name, in the language model's body, of the norm before the output layer.

    Raises:
        ConfigError: there is none of a known name.
    """
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[operator]
    names = [name for name in _LAST_NORMS if isinstance(getattr(decoder, name, None), torch.nn.Module)]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no last norm of a known name ({', '.join(_LAST_NORMS)}): set "
            "policy.parallel.tp and pp to 1, and use dp_shard"
        )
    return names[0]


_LAST_NORMS: Final = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Make this one module compute `forward(module, ...)`, which can call the original by `class_forward`.

    The module stays the same object, and its tensors keep their names. A bound method, because a copy of the module
    must call itself: a closure would compute with the weights of the original.
    """
    assert "forward" not in vars(module), "the forward of a module is replaced once"
    module.forward = MethodType(forward, module)


def class_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` of the module's class, compiled where `use_compiled` has said so."""
    forward = vars(module).get(_COMPILED) or type(module).forward
    return forward(module, *args, **kwargs)


def use_compiled(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Make `class_forward` of this one module call `forward`, the compiled one of its class.

    What replaces the module's forward stays uncompiled around it: a break in code that is compiled together with its
    checkpointing leaves all of it uncompiled.
    """
    setattr(module, _COMPILED, forward)
    if "forward" not in vars(module):
        replace_forward(module, class_forward)


_COMPILED: Final = "_compiled_forward"
