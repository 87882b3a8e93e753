"""AdamW with a learning-rate schedule and a bound on the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from starling.common.errors import ConfigError
from starling.policy.settings import OptimizerSettings

_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` of `total_steps`, counted from 1.

    Warm-up step s of w has s / w of the highest rate. Then ``linear`` and ``cosine`` (SGDR, arXiv:1608.03983, equation
    5) start at the highest rate and would reach 0 one step after the last, so that no step is in vain.
    """
    peak = settings.learning_rate
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    left = total_steps - settings.warmup_steps
    progress = min((step - 1 - settings.warmup_steps) / left, 1.0) if left > 0 else 1.0
    if settings.schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Applied:
    """What one optimizer step did."""

    grad_norm: float
    """Euclidean norm of the whole gradient before it was scaled down."""
    learning_rate: float
    skipped: bool
    """The gradient or the loss was not finite: weights and averages stayed as they were."""


class Descent:
    """Turns the gradients that lie in a model's parameters into its next weights.

    AdamW (arXiv:1711.05101), in one fused kernel for all parameters where the device has it.
    """

    def __init__(self, model: torch.nn.Module, settings: OptimizerSettings, total_steps: int) -> None:
        """Start at step 1 of `total_steps`, with empty averages.

        Raises:
            ConfigError: `total_steps` is negative, or no parameter of the model is trainable.
        """
        if total_steps < 0:
            raise ConfigError(f"total_steps is {total_steps}: it must be 0 or more")
        self.num_steps = 0
        self.total_steps = total_steps
        self._settings = settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ConfigError("the model has no trainable parameter: unfreeze at least one")
        matrices = [parameter for parameter in self._parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.dim() < 2]
        decays = ((matrices, settings.weight_decay), (vectors, 0.0))
        self.optimizer = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for params, decay in decays if params],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=all(parameter.device.type in _FUSED_DEVICES for parameter in self._parameters),
        )

    def clear(self) -> None:
        """Forget the gradients, before the first microbatch of a step."""
        self.optimizer.zero_grad(set_to_none=True)

    def apply(self, loss: float, settings: OptimizerSettings | None = None) -> Applied:
        """Make one optimizer step of the accumulated gradients; without any, of a gradient of 0.

        Skips the step when the norm of the gradient is not finite, or `loss`, the step's loss: where a loss clamps its
        arguments, NaN in them gives a NaN loss with a gradient of 0. Of `settings`, if given, this step takes the
        learning rate with its schedule, and the bound on the gradient.
        """
        self.num_steps += 1
        settings = settings or self._settings
        rate = learning_rate(settings, self.num_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm_tensor = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        norm = float(norm_tensor)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return Applied(norm, rate, skipped=True)
        bound = settings.max_grad_norm
        if 0.0 < bound < norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, bound, norm_tensor)
        self.optimizer.step()
        return Applied(norm, rate, skipped=False)
