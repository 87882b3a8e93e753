"""DiffusionNFT: scored samples of any sampler become a new weight version (arXiv:2509.16117).

It needs no densities, so trajectories may follow the probability flow, and only their ends are stored. Each end is
noised anew to some of the sampler's noise levels; a sample of high advantage draws the velocity there towards itself,
one of low advantage pushes it away, both from the velocity of the weights at the start of the step.

The paper draws samples from a slow average of the trained weights. Here they are drawn from published versions, which
are at most `controller.max_staleness` behind; the weights at the start of a step take the place of the average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import joined
from starling.algo.diffusion.flow import noised
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import Sampler
from starling.algo.loss.diffusion import Forward, negative_aware
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.digest import batch_digest
from starling.policy.train.data.packing import Index
from starling.policy.train.diffusion.base import CleanSamples, DiffusionModelTrainer, parts_of, update_metrics
from starling.policy.train.diffusion.groups import DenoisedGroup
from starling.policy.train.loss.credit import StepGroups, compute_advantages, group_metrics
from starling.policy.train.loss.objective import objective_of
from starling.policy.train.metrics.tokens import TokenMetrics, staleness_shares


@dataclass(frozen=True, slots=True, eq=False)
class _Minibatch:
    """The noised samples of one optimizer update, S of them."""

    samples: CleanSamples
    advantages: Tensor
    """float32 [S]."""
    old: Tensor
    """[S, ...], velocities of the weights at the start of the step, on the host."""
    reference: Tensor
    """[S, ...], those of the reference; `old` where it is not used."""


class NftTrainer(DiffusionModelTrainer):
    """Trains a diffusion transformer on scored samples, one step at a time."""

    kind: ClassVar[TrainerKind] = "rl"

    def __init__(
        self,
        model: torch.nn.Module,
        sampler: Sampler,
        settings: PolicySettings,
        *,
        total_steps: int,
        reference: torch.nn.Module | None = None,
        initial: Callable[[], Any] | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Start with a fresh optimizer; see `DiffusionModelTrainer`. `sampler`: its noise levels are trained."""
        super().__init__(
            model,
            settings,
            settings.optimizer,
            total_steps=total_steps,
            reference=reference,
            initial=initial,
            clock=clock,
        )
        self.batch_digest = 0
        """Digest of the groups of the last step, see `starling.policy.train.data.digest`."""
        self._levels = torch.tensor([sigma for sigma in sampler.sigmas if sigma > 0.0])

    def step(
        self, groups: Sequence[DenoisedGroup], *, step: int, settings: PolicySettings | None = None
    ) -> dict[str, float]:
        """Make version `step` from version `step - 1`.

        Args:
            groups: those of the step, with the ends of their trajectories.
            step: number of the version to make; staleness counts from it, and the noise depends on it.
            settings: of this step; by default those of the trainer.

        Returns:
            The metrics: of rewards, staleness and the optimizer, and those of `negative_aware`.

        Raises:
            ConfigError: the groups cannot be trained; the weights are unchanged.
            StepBrokenError: a later update of the step failed: the weights are not a version.
        """
        settings = settings or self._settings
        uses_reference = self._prepare_reference(settings, step)
        _check_ends(groups)
        scored = [group.scored for group in groups]
        step_groups = compute_advantages(scored, objective_of(settings.algorithm), step=step)
        by_group = {id(group.scored): group for group in groups}
        generator = torch.Generator().manual_seed(step)
        minibatches = [
            self._minibatch(
                [by_group[id(one)] for one in part.groups], part, generator, settings, uses_reference=uses_reference
            )
            for part in step_groups.split(settings.algorithm.num_minibatches)
        ]
        metrics = TokenMetrics()
        updates = [one for _ in range(settings.algorithm.num_passes) for one in minibatches]
        results = self._make(updates, lambda one: self._accumulate(one, settings, metrics), settings.optimizer)
        self.batch_digest = batch_digest(step_groups.groups, step_groups.advantages)
        return {
            **group_metrics(step_groups),
            **metrics.read(),
            **staleness_shares(step - 1 - np.concatenate([group.versions for group in scored])),
            **update_metrics(results, settings.optimizer),
        }

    def _minibatch(
        self,
        groups: Sequence[DenoisedGroup],
        part: StepGroups,
        generator: torch.Generator,
        settings: PolicySettings,
        *,
        uses_reference: bool,
    ) -> _Minibatch:
        """Noise the ends of the trajectories of some groups, and compute the velocities that do not change."""
        count, size = settings.diffusion.levels_per_sample, settings.diffusion.actions_per_microbatch
        ends = torch.cat([group.latents for group in groups if group.latents is not None]).float()
        clean = ends.repeat_interleave(count, dim=0)
        owner = [index for index, group in enumerate(groups) for _ in range(len(group.scored.lengths) * count)]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = self._levels[torch.randint(len(self._levels), (len(clean),), generator=generator)]
        conditions = joined([group.conditions for group in groups]).rows(owner)
        samples = CleanSamples(clean, conditions, sigma, noise)
        advantages = torch.tensor([value for row in part.advantages for value in row]).repeat_interleave(count)
        old = self._velocities(self._model, samples, size)
        if not uses_reference:
            return _Minibatch(samples, advantages, old, old)
        with self.reference.computing() as reference:
            return _Minibatch(samples, advantages, old, self._velocities(reference, samples, size))

    @torch.no_grad()
    def _velocities(self, model: Any, samples: CleanSamples, size: int) -> Tensor:
        """Return the velocities of a model at noised samples, `size` of them at a time, on the host."""
        self._clock.enter("forward")
        return torch.cat(
            [self._velocity(model, samples.take(part))[1].cpu() for part in parts_of(len(samples.clean), size)]
        )

    def _velocity(self, model: Any, samples: CleanSamples) -> tuple[Tensor, Tensor]:
        """Return the noised samples, and the velocities of a model there, on its device."""
        clean, noise, sigma = (one.to(self._device) for one in (samples.clean, samples.noise, samples.sigma))
        state = noised(clean, noise, sigma)
        return state, velocity(model, state, sigma, samples.conditions)

    def _accumulate(self, minibatch: _Minibatch, settings: PolicySettings, metrics: TokenMetrics) -> float:
        """Accumulate the gradient of one update. Returns its loss, the mean over its samples."""
        diffusion = settings.diffusion
        count, total = len(minibatch.advantages), torch.zeros((), device=self._device)
        for part in parts_of(count, diffusion.actions_per_microbatch):
            self._clock.enter("forward")
            terms = negative_aware(
                self._forward(minibatch, part),
                beta=diffusion.nft_beta,
                kl=settings.algorithm.kl_coefficient,
                bound=diffusion.advantage_bound,
            )
            metrics.add(terms.metrics)
            total = total + self._backward(terms.loss.float().sum() / count)
        metrics.add_sum("loss", total)
        return float(total)

    def _forward(self, minibatch: _Minibatch, part: Index) -> Forward:
        samples, index = minibatch.samples.take(part), torch.from_numpy(part)
        state, predicted = self._velocity(self._model, samples)
        return Forward(
            samples.clean.to(self._device),
            state,
            samples.sigma.to(self._device),
            predicted,
            minibatch.old[index].to(self._device),
            minibatch.reference[index].to(self._device),
            minibatch.advantages[index].to(self._device),
        )


def _check_ends(groups: Sequence[DenoisedGroup]) -> None:
    """Refuse groups without the ends of all trajectories, or of different shapes. Raises ConfigError."""
    shapes = set()
    for group in groups:
        name, count = group.scored.prompt_id, len(group.scored.lengths)
        if group.latents is None or len(group.latents) != count:
            found = 0 if group.latents is None else len(group.latents)
            raise ConfigError(f"group {name!r} has the ends of {found} trajectories out of {count}")
        if not bool(group.latents.isfinite().all()):
            raise ConfigError(f"group {name!r} cannot be trained: the end of a trajectory is not finite")
        shapes.add(tuple(group.latents.shape[1:]))
    if len(shapes) > 1:
        raise ConfigError(f"the trajectories of a step have different shapes: {sorted(shapes)}")
