"""Linear layers that compute in low precision: which ones of a model, and their replacement by those of torchao.

    weight, input, gradient -> codes and scales -> product in FP8, added up in float32 -> element type of the input

Codes and scales live as long as their product. The weight of a layer stays the same parameter, of the same name and
type, and so do its gradient, the optimizer's masters and moments, and what is published and saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import structlog
import torch

from starling.common.errors import ConfigError
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.precision import PrecisionKind
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.torchao_log import quiet_torchao
from starling.weightsync.quantise.recipe import NOT_QUANTISED

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

log = structlog.get_logger(__name__)

_HIGH: Final = (*NOT_QUANTISED, r"(^|\.)experts\.")
"""Patterns of weights that are never multiplied in low precision. A single routed expert may have no token."""


@dataclass(frozen=True, slots=True)
class _Format:
    """What a kind of precision needs."""

    multiple: int
    """Of which both dimensions of a weight have to be multiples, on each rank: so tensor cores multiply its codes."""
    capability: tuple[int, int]
    """Of the first GPUs whose tensor cores do."""
    emulated: bool = False
    """Whether older GPUs emulate it: it is more than a way to save time."""


_FP8: Final = _Format(16, (8, 9))
_FORMATS: Final[dict[PrecisionKind, _Format]] = {
    "fp8_tensorwise": _FP8,
    "fp8_rowwise": _FP8,
    "fp8_rowwise_gw_hp": _FP8,
    "mxfp8": _Format(32, (10, 0)),
    "mxfp4": _Format(32, (10, 0), emulated=True),
}


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a model."""

    low: tuple[str, ...]
    """Names of those that compute in low precision."""
    num_linear: int
    """Of all linear layers."""


def use_precision(model: PreTrainedModel, settings: PolicySettings, device: torch.device | None = None) -> None:
    """Make `model` multiply in the precision of `settings`, in place; its parameters stay what they are.

    Call it after everything that observes how `model` computes (`apply_memory_settings`): in low precision the result
    for a sequence may depend on those beside it, which share a scale with it. `device`: see `apply_memory_settings`.

    Raises:
        ConfigError: as `check_precision`, or the format is not available on the device or for the type of `model`.
    """
    precision = settings.precision
    if precision.kind == "none":
        return
    layers = check_precision(model, settings)
    emulate = emulates(precision.kind, device or model.device)
    _import_layers(precision.kind)(model, layers.low, precision.kind, emulate=emulate)
    _log_once(precision.kind, len(layers.low), layers.num_linear)


def check_precision(model: PreTrainedModel, settings: PolicySettings) -> LinearLayers:
    """Return which layers of `model` compute in low precision, by the names and shapes of its parameters alone.

    These are the linear layers of its transformer blocks, but for routers, experts, what `precision.skip` names, and
    those with a dimension that is no multiple of 16, or 32 of the MX formats, on each rank.

    Args:
        model: whole, with or without memory.
        settings: of its precision and of its mesh.

    Raises:
        ConfigError: a pattern matches no layer, no layer is left, the type of `model` is not available, or torchao is
            not installed.
    """
    precision = settings.precision
    multiple = _FORMATS[precision.kind].multiple * settings.parallel.tp
    if precision.kind.startswith("mx") and model.dtype == torch.float16:
        raise ConfigError(
            f'policy.precision.kind = "{precision.kind}" is not available with model.dtype = "float16": set that to '
            '"bfloat16"'
        )
    of_blocks = {id(module) for block in find_blocks(model) for module in block.modules()}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    inside = {f"{name}.weight": module for name, module in linear.items() if id(module) in of_blocks}
    for pattern in precision.skip:
        if not any(re.search(pattern, name) for name in inside):
            first = next(iter(inside), "none")
            raise ConfigError(
                f"policy.precision.skip has {pattern!r}, which matches the weight of no linear layer in a block; the "
                f"first of {len(inside)} is {first}"
            )
    wanted = {
        name: module
        for name, module in inside.items()
        if not any(re.search(pattern, name) for pattern in (*_HIGH, *precision.skip))
    }
    fitting = [name for name, module in wanted.items() if not any(size % multiple for size in module.weight.shape)]
    if not wanted:
        raise ConfigError(
            f"policy.precision leaves none of the {len(inside)} linear layers in the blocks of "
            f'{type(model).__name__} to compute in "{precision.kind}": remove a pattern from policy.precision.skip, or '
            'set kind to "none"'
        )
    if not fitting:
        name, module = next(iter(wanted.items()))
        size = " x ".join(map(str, module.weight.shape))
        tp = settings.parallel.tp
        of_rank = f" ({multiple // tp} on each of {tp} ranks of tp)" if tp > 1 else ""
        raise ConfigError(
            f'policy.precision.kind = "{precision.kind}" finds no layer in the blocks of {type(model).__name__}: of '
            f"{len(inside)} linear ones, {len(wanted)} are not skipped, and have no two dimensions that are multiples "
            f'of {multiple}{of_rank}, such as {name} of {size}; set it to "none"'
        )
    _import_layers(precision.kind)
    return LinearLayers(tuple(name.removesuffix(".weight") for name in fitting), len(linear))


def emulates(kind: PrecisionKind, device: torch.device) -> bool:
    """Return whether products of `kind` are emulated on `device`. Raises ConfigError for a GPU that should not."""
    if device.type != "cuda":
        return True
    needed, capability = _FORMATS[kind], torch.cuda.get_device_capability(device)
    if capability >= needed.capability or needed.emulated:
        return capability < needed.capability
    least, given = (".".join(str(part) for part in one) for one in (needed.capability, capability))
    raise ConfigError(
        f'policy.precision.kind = "{kind}" needs a GPU of compute capability {least}, and {device} has {given}: set it '
        'to "none"'
    )


def _import_layers(kind: str) -> Callable[..., Any]:
    """Return `replace_layers` of torchao's layers, whose import takes seconds. Raises ConfigError."""
    quiet_torchao()
    try:
        if kind.startswith("mx"):
            from starling.policy.train.precision.mx import replace_layers
        else:
            from starling.policy.train.precision.float8 import replace_layers
    except ImportError as error:
        raise ConfigError(
            f'policy.precision.kind = "{kind}" needs torchao ({error}): install starling-policy[low-precision], or set '
            'it to "none"'
        ) from error
    return replace_layers


@cache
def _log_once(kind: str, num_layers: int, num_linear: int) -> None:
    """Log how many layers compute in low precision; the reference of a KL term has the same ones."""
    log.info("low_precision", kind=kind, num_layers=num_layers, num_linear=num_linear)
