"""AdamW (arXiv:1711.05101), with moments in the parameters' type or in 8 bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.torchao_log import quiet_torchao

if TYPE_CHECKING:
    from starling.policy.train.optim.adamw_8bit import AdamW8bit

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


class AdamW(torch.optim.AdamW):
    """torch's AdamW without torch's compiler, which its methods import, in half a second, to be excluded from it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one update from the gradients."""
        inspect.unwrap(torch.optim.AdamW.step)(self)


def adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return torch's AdamW with moments of 0, as one fused kernel for all parameters where the device has it.

    Args:
        groups: ``params``, ``lr`` and ``weight_decay`` each.
        settings: betas and epsilon.
    """
    fused = all(parameter.device.type in _FUSED_DEVICES for group in groups for parameter in group["params"])
    optimizer = AdamW(groups, betas=settings.betas, eps=settings.eps, fused=fused, foreach=not fused)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if fused else None
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def adamw_8bit(
    groups: list[dict[str, Any]], settings: OptimizerSettings, numel_of: Callable[[Tensor], int] = Tensor.numel
) -> torch.optim.Optimizer:
    """Return torchao's AdamW with moments of 8 bits (arXiv:2110.02861); see `adamw`, and `AdamW8bit` for `numel_of`.

    Raises:
        ConfigError: torchao is not installed.
    """
    return import_adamw_8bit("optimizer")(groups, settings, numel_of)


def import_adamw_8bit(key: str) -> type[AdamW8bit]:
    """Return the class of `adamw_8bit`; its import takes seconds.

    Raises:
        ConfigError: torchao is not installed, and the settings `key` need it.
    """
    quiet_torchao()
    try:
        from starling.policy.train.optim.adamw_8bit import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f'{key}.kind = "adamw_8bit" needs torchao ({error}): install torchao, or use "adamw"'
        ) from error
    return AdamW8bit


def plain_tensors(field: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of an entry of an optimizer's state: itself or, of 8 bits, its codes and scales."""
    if type(value) is Tensor:
        yield field, value
    else:
        yield f"{field}.codes", value.codes  # type: ignore[attr-defined]
        yield f"{field}.scale", value.scale  # type: ignore[attr-defined]
