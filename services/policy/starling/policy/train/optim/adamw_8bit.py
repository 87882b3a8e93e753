"""AdamW with moments of 8 bits. Imports torchao, which takes seconds: import this module only where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit  # type: ignore[import-untyped]

from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.optim.quantised import BLOCK_NUMEL, is_quantised


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """AdamW with moments as codes `uint8 [shape]` and a float32 scale for each 256 of them.

    Tensors of less than 4096 elements, or of a number that 256 does not divide, have moments in float32. On a
    GPU the update is compiled, once for each shape. On a CPU it is not: that needs a C++ compiler, and takes longer
    than typical training on a CPU.
    """

    def __init__(
        self, groups: list[dict[str, Any]], settings: OptimizerSettings, numel_of: Callable[[Tensor], int]
    ) -> None:
        """Start with moments of 0.

        Args:
            groups: as of `starling.policy.train.optim.adamw.adamw`.
            settings: betas and epsilon.
            numel_of: returns the elements of the whole tensor of which a parameter is a part, whole blocks of it.
        """
        super().__init__(groups, betas=settings.betas, eps=settings.eps)
        assert self.block_size == BLOCK_NUMEL
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._compiles = all(parameter.device.type != "cpu" for parameter in parameters)
        for parameter in parameters:
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._moment(parameter.detach(), numel_of(parameter), signed=True),
                "exp_avg_sq": self._moment(parameter.detach(), numel_of(parameter), signed=False),
            }

    def _moment(self, parameter: Tensor, numel: int, *, signed: bool) -> Tensor:
        """Return a moment of 0 for a part of a tensor of `numel` elements, quantised where that of the whole one is."""
        if not is_quantised(numel):
            return torch.zeros_like(parameter)
        found: Tensor = self._subclass_zeros(parameter, signed, self.block_size).to(parameter.device)
        return found

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        with nullcontext() if self._compiles else torch.compiler.set_stance("force_eager"):
            super().step(closure)
