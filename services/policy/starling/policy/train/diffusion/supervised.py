"""Supervised training of diffusion models: the flow-matching loss on samples of a dataset (arXiv:2210.02747)."""

from __future__ import annotations

from typing import ClassVar

import torch

from starling.algo.diffusion.flow import noised
from starling.algo.diffusion.models import velocity
from starling.algo.loss.diffusion import matching
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.diffusion.base import CleanSamples, DiffusionModelTrainer, parts_of, update_metrics


class MatchingTrainer(DiffusionModelTrainer):
    """Trains a diffusion transformer on clean samples; every sample has the same weight."""

    kind: ClassVar[TrainerKind] = "sft"

    def __init__(
        self,
        model: torch.nn.Module,
        settings: PolicySettings,
        *,
        total_steps: int,
        clock: PhaseClock | None = None,
    ) -> None:
        """Start with a fresh optimizer; see `DiffusionModelTrainer`."""
        super().__init__(model, settings, settings.sft.optimizer, total_steps=total_steps, clock=clock)

    def step(self, samples: CleanSamples, settings: PolicySettings | None = None) -> dict[str, float]:
        """Make the next version from `samples`.

        Args:
            samples: those of the step, B of them.
            settings: of this step; by default those of the trainer.

        Returns:
            The metrics: ``loss``, the mean square error of velocities, and those of the optimizer.

        Raises:
            ConfigError: there are no samples, or one is not finite.
        """
        if not len(samples.clean):
            raise ConfigError("a supervised step has no samples: there is nothing to train")
        if not bool(samples.clean.isfinite().all()):
            raise ConfigError("a supervised step has a sample that is not finite: leave it out of the dataset")
        settings = settings or self._settings
        optimizer, size = settings.sft.optimizer, settings.diffusion.actions_per_microbatch
        losses = list[float]()

        def accumulate(samples: CleanSamples) -> float:
            losses.append(self._accumulate(samples, size))
            return losses[-1]

        results = self._make([samples], accumulate, optimizer)
        return {"loss": losses[0], "num_sequences": float(len(samples.clean)), **update_metrics(results, optimizer)}

    def _accumulate(self, samples: CleanSamples, size: int) -> float:
        """Accumulate the gradient of a step, of `size` samples at a time. Returns its loss."""
        count, total = len(samples.clean), torch.zeros((), device=self._device)
        for part in parts_of(count, size):
            self._clock.enter("forward")
            some = samples.take(part)
            clean, noise, sigma = (one.to(self._device) for one in (some.clean, some.noise, some.sigma))
            predicted = velocity(self._model, noised(clean, noise, sigma), sigma, some.conditions)
            total = total + self._backward(matching(predicted, noise - clean).sum() / count)
        return float(total)
