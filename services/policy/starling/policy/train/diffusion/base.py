"""Parts of a step that all trainers of diffusion models share: the optimizer, the reference, and the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import NullClock, PhaseClock
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.packing import Index
from starling.policy.train.errors import StepBrokenError
from starling.policy.train.memory.setup import optimizer_device
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.optim.norm import total_norm
from starling.policy.train.optim.optimizer import ModelOptimizer, UpdateResult


@dataclass(frozen=True, slots=True, eq=False)
class CleanSamples:
    """Samples of the dataset, each with a noise level at which it is trained."""

    clean: Tensor
    """[B, ...], latents."""
    conditions: Conditions
    """Of each."""
    sigma: Tensor
    """float [B], the noise level of each, in (0, 1)."""
    noise: Tensor
    """[B, ...], standard normal."""

    def take(self, numbers: Index) -> CleanSamples:
        """Return some of them."""
        index = torch.from_numpy(numbers).to(self.clean.device)
        return CleanSamples(self.clean[index], self.conditions.rows(index), self.sigma[index], self.noise[index])


class DiffusionModelTrainer:
    """A diffusion transformer that is trained in place, with its optimizer and, where a loss needs it, a reference."""

    kind: ClassVar[TrainerKind]

    def __init__(
        self,
        model: torch.nn.Module,
        settings: PolicySettings,
        optimizer: OptimizerSettings,
        *,
        total_steps: int,
        reference: torch.nn.Module | None = None,
        initial: Callable[[], Any] | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: one of `starling.algo.diffusion.models`, trained in place.
            settings: defaults of every step.
            optimizer: settings of this kind of step.
            total_steps: planned number of steps; decides the decay of the learning rate.
            reference: model of the divergence; by default a copy of `model` as it is before the first step.
            initial: loads version 0 again.
            clock: records the phases of each step.
        """
        self._model = model.eval()
        self._settings = settings
        self._clock = clock or NullClock()
        self._device = next(model.parameters()).device
        device = optimizer_device(model, settings.memory)
        self.optimizer = ModelOptimizer(model, optimizer, total_steps, device=device)
        self.reference = ReferenceModel(model, initial, reference)

    def begin_step(self) -> None:
        """Prepare a step, after one that may have failed: there is nothing to clear."""

    def _prepare_reference(self, settings: PolicySettings, step: int) -> bool:
        """Make the reference of a step available. Returns whether its loss has a divergence from it."""
        if not self.optimizer.num_steps:
            self.reference.begin(step - 1)
        algorithm = settings.algorithm
        if not algorithm.kl_coefficient:
            return False
        self.reference.prepare(
            step,
            required_by=f"policy.algorithm.kl_coefficient = {algorithm.kl_coefficient:g}",
            reset_every=algorithm.reference_reset_every,
        )
        return True

    def _make(
        self, updates: Sequence[Any], accumulate: Callable[[Any], float], optimizer: OptimizerSettings
    ) -> list[UpdateResult]:
        """Make the optimizer updates of a step; `accumulate` adds the gradient of one, and returns its loss."""
        results = list[UpdateResult]()
        for number, update in enumerate(updates, start=1):
            self.optimizer.clear()
            try:
                loss = accumulate(update)
            except ConfigError as error:
                if not results:
                    raise
                raise StepBrokenError(f"update {number} of {len(updates)} of a step failed: {error}") from error
            self._clock.enter("optimizer")
            results.append(self.optimizer.apply(loss, optimizer, ends_step=number == len(updates)))
            self._clock.enter("other")
        return results

    def _backward(self, loss: Tensor) -> Tensor:
        """Accumulate the gradient of `loss`. Returns its detached value."""
        self._clock.enter("backward")
        torch.autograd.backward(loss)
        return loss.detach()


def parts_of(count: int, size: int) -> Iterator[Index]:
    """Yield the numbers from 0 to `count` in order, at most `size` at a time."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count), dtype=np.int64)


def norm_of(gradients: Any) -> Tensor:
    """Return the norm of all gradients together, float32; 0 of none."""
    found = list(gradients)
    return total_norm(found).float() if found else torch.zeros(())


def update_metrics(results: Sequence[UpdateResult], optimizer: OptimizerSettings) -> dict[str, float]:
    """Return the metrics of the optimizer that every step has."""
    return {
        "grad_norm": results[-1].grad_norm,
        "max_grad_norm": optimizer.max_grad_norm,
        "learning_rate": results[-1].learning_rate,
        "skipped_step": float(any(result.skipped for result in results)),
    }
