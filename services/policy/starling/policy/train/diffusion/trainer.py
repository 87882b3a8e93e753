"""Reinforcement learning of diffusion models: scored trajectories become a new weight version.

A step that adds noise is an action with a density, as a token has a probability. So credit, staleness, the losses of
`starling.algo.loss`, their corrections and their aggregation are those of tokens; Flow-GRPO (arXiv:2505.05470) is GRPO
over actions. What differs is the forward pass: a microbatch has some actions of any trajectories, and computes the
velocity at each of their states.

A loss may depend on whole trajectories (GSPO), whose actions are seldom in one microbatch. Then the densities of all
actions are computed first, without gradients, and the loss of them all gives the derivative by each density; the passes
with gradients continue from there. That is exact for every loss, and takes another forward pass only where a minibatch
is larger than a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.flow import noised
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import Sampler
from starling.algo.diffusion.transitions import Transition
from starling.algo.loss.diffusion import data_term, mean_kl, normalised_log_ratio, velocity_kl
from starling.algo.loss.terms import Tokens
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.digest import batch_digest
from starling.policy.train.data.groups import FloatArray
from starling.policy.train.data.packing import Index
from starling.policy.train.diffusion.base import CleanSamples, DiffusionModelTrainer, norm_of, parts_of, update_metrics
from starling.policy.train.diffusion.groups import Actions, DenoisedGroup, number_actions
from starling.policy.train.loss.credit import TrainBatch, compute_advantages, group_metrics, make_train_batch
from starling.policy.train.loss.objective import Objective, objective_of, token_losses
from starling.policy.train.metrics.tokens import TokenMetrics, effective_sample_size, mismatch, staleness_shares
from starling.policy.train.optim.optimizer import UpdateResult


@dataclass(frozen=True, slots=True, eq=False)
class _StepContext:
    """Everything that is the same for all updates of a step."""

    settings: PolicySettings
    diffusion: DiffusionSettings
    objective: Objective
    actions: Actions
    data: CleanSamples | None
    uses_reference: bool
    metrics: TokenMetrics


@dataclass(slots=True, eq=False)
class _Minibatch:
    """The actions of one optimizer update."""

    tokens: TrainBatch
    proximal: FloatArray | None = None
    """Log-densities under the weights at the start of the step, [T]."""
    means: list[Tensor] | None = None
    """The means of the actions' distributions under those weights, by microbatch; None unless ratios are normalised."""
    first: FloatArray | None = None
    """The log-densities of the minibatch's first update, [T]."""


class DiffusionTrainer(DiffusionModelTrainer):
    """Trains a diffusion transformer on scored trajectories, one step at a time."""

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
        """Start with a fresh optimizer; see `DiffusionModelTrainer`.

        Args:
            sampler: that of the rollouts.

        Raises:
            ConfigError: the algorithm is unknown, does not take one of the options, or cannot train trajectories.
        """
        _check_algorithm(settings)
        super().__init__(
            model,
            settings,
            settings.optimizer,
            total_steps=total_steps,
            reference=reference,
            initial=initial,
            clock=clock,
        )
        self._sampler = sampler
        self.batch_digest = 0
        """Digest of the groups of the last step, see `starling.policy.train.data.digest`."""

    def step(
        self,
        groups: Sequence[DenoisedGroup],
        *,
        step: int,
        settings: PolicySettings | None = None,
        data: CleanSamples | None = None,
    ) -> dict[str, float]:
        """Make version `step` from version `step - 1`.

        Args:
            groups: those of the step.
            step: number of the version to make; staleness counts from it.
            settings: of this step; by default those of the trainer.
            data: samples for the data term, with `data_coefficient`; each update adds it once.

        Returns:
            The metrics: those of language models, per action in place of per token; ``ratio_error/<action>``, the
            largest difference of a ratio from 1 before the first update, over trajectories that this version sampled;
            and with data ``data_loss``, ``policy_grad_norm`` and ``data_grad_norm``.

        Raises:
            ConfigError: the groups cannot be trained; the weights are unchanged.
            StepBrokenError: a later update of the step failed: the weights are not a version.
        """
        settings = settings or self._settings
        algorithm, objective = settings.algorithm, objective_of(settings.algorithm)
        if settings.diffusion.data_coefficient and data is None:
            raise ConfigError(
                f"policy.diffusion.data_coefficient is {settings.diffusion.data_coefficient:g}, and step {step} came "
                "without samples of the dataset: give the run a dataset of videos, or set it to 0"
            )
        uses_reference = self._prepare_reference(settings, step)
        numbered, actions = number_actions(groups, self._sampler)
        metrics = TokenMetrics()
        context = _StepContext(settings, settings.diffusion, objective, actions, data, uses_reference, metrics)
        step_groups = compute_advantages(numbered, objective, step=step)
        skips = algorithm.skip_zero_advantage and not uses_reference
        minibatches = [
            _Minibatch(make_train_batch(part, objective, longest=len(actions.steps), skip_zero=skips))
            for part in step_groups.split(algorithm.num_minibatches)
        ]
        results = self._update(minibatches, context)
        # Of the groups as they came: their numbers depend on their order.
        self.batch_digest = batch_digest([group.scored for group in groups], step_groups.advantages)
        return {
            **group_metrics(step_groups),
            **_rollout_metrics(minibatches, actions, step),
            **metrics.read(),
            **update_metrics(results, settings.optimizer),
        }

    def _update(self, minibatches: Sequence[_Minibatch], context: _StepContext) -> list[UpdateResult]:
        """Make the optimizer updates of a step: in each pass, one of each minibatch."""
        updates = [one for _ in range(context.settings.algorithm.num_passes) for one in minibatches]
        if context.objective.old == "proximal":
            for minibatch in minibatches:
                self._measure(minibatch, context)
        return self._make(updates, lambda one: self._accumulate(one, context), context.settings.optimizer)

    # --- one update ------------------------------------------------------------------------------------------------

    def _accumulate(self, minibatch: _Minibatch, context: _StepContext) -> float:
        """Accumulate the gradient of one update. Returns its loss."""
        parts = list(parts_of(minibatch.tokens.num_tokens, context.diffusion.actions_per_microbatch))
        if len(parts) == 1:
            total = self._add_whole(minibatch, context, parts[0])
        elif parts:
            total = self._add_in_parts(minibatch, context, parts)
        else:
            total = torch.zeros((), device=self._device)
        if context.data is not None and context.diffusion.data_coefficient:
            total = total + self._add_data(context.data, context)
        context.metrics.add_sum("loss", total)
        return float(total)

    def _add_whole(self, minibatch: _Minibatch, context: _StepContext, part: Index) -> Tensor:
        """Add the gradient of a minibatch that is one microbatch. Returns its loss, detached."""
        found, predicted, divergence = self._forward(minibatch.tokens, part, context)
        logprobs = self._log_densities(found, predicted, minibatch, context, 0, part)
        loss = self._loss(minibatch, context, logprobs)
        self._keep_first(minibatch, logprobs)
        if divergence is not None:
            loss = loss + self._divergence(divergence, minibatch, context, part)
        return self._backward(loss)

    def _add_in_parts(self, minibatch: _Minibatch, context: _StepContext, parts: Sequence[Index]) -> Tensor:
        """Do the same in several microbatches: first the derivative of the loss by each log-density."""
        with torch.no_grad():
            found = [
                self._log_densities(*self._predict(minibatch.tokens, part, context), minibatch, context, number, part)
                for number, part in enumerate(parts)
            ]
        leaf = torch.cat(found).requires_grad_()
        loss = self._loss(minibatch, context, leaf)
        (derivative,) = torch.autograd.grad(loss, leaf)
        self._keep_first(minibatch, leaf)
        total = loss.detach()
        for number, part in enumerate(parts):
            transition, predicted, divergence = self._forward(minibatch.tokens, part, context)
            logprobs = self._log_densities(transition, predicted, minibatch, context, number, part)
            surrogate = (logprobs * derivative[torch.from_numpy(part).to(self._device)]).sum()
            if divergence is not None:
                term = self._divergence(divergence, minibatch, context, part)
                surrogate, total = surrogate + term, total + term.detach()
            self._backward(surrogate)
        return total

    def _add_data(self, data: CleanSamples, context: _StepContext) -> Tensor:
        """Add the gradient of DDRL's term, and report the norms of both parts. Returns the term, detached."""
        of_policy = {name: one.grad for name, one in self._model.named_parameters() if one.grad is not None}
        context.metrics.add({"policy_grad_norm": norm_of(of_policy.values()).reshape(1)})
        for parameter in self._model.parameters():
            parameter.grad = None
        self._clock.enter("forward")
        state = noised(data.clean, data.noise, data.sigma)
        predicted = velocity(self._model, state, data.sigma, data.conditions)
        term = data_term(predicted, data.noise - data.clean, data.sigma).mean()
        total = self._backward(context.diffusion.data_coefficient * term)
        of_data = [one.grad for one in self._model.parameters() if one.grad is not None]
        context.metrics.add({"data_grad_norm": norm_of(of_data).reshape(1), "data_loss": term.reshape(1)})
        for name, parameter in self._model.named_parameters():
            if (mine := of_policy.get(name)) is not None:
                parameter.grad = mine if parameter.grad is None else parameter.grad.add_(mine)
        return total

    # --- forward passes --------------------------------------------------------------------------------------------

    def _predict(self, tokens: TrainBatch, part: Index, context: _StepContext) -> tuple[Transition, _Predicted]:
        """Return the distributions of some actions of a minibatch."""
        self._clock.enter("forward")
        numbers = tokens.token_ids[part].astype(np.int64)
        state, following, steps, conditions = context.actions.take(numbers, self._device)
        speed = velocity(self._model, state, self._sampler.sigma(steps), conditions)
        return self._sampler.transition(state, speed, steps), _Predicted(state, following, steps, conditions, speed)

    def _forward(
        self, tokens: TrainBatch, part: Index, context: _StepContext
    ) -> tuple[Transition, _Predicted, Tensor | None]:
        """Do the same with gradients, and return the divergence of each action from the reference, if it is used."""
        velocity_of_reference = self._reference_velocity(tokens, part, context)
        found, predicted = self._predict(tokens, part, context)
        if velocity_of_reference is None:
            return found, predicted, None
        if context.diffusion.divergence == "velocity":
            return found, predicted, velocity_kl(predicted.velocity, velocity_of_reference)
        theirs = self._sampler.transition(predicted.state, velocity_of_reference, predicted.steps)
        return found, predicted, mean_kl(found, theirs.mean)

    def _reference_velocity(self, tokens: TrainBatch, part: Index, context: _StepContext) -> Tensor | None:
        if not context.uses_reference:
            return None
        self._clock.enter("forward")
        numbers = tokens.token_ids[part].astype(np.int64)
        state, _, steps, conditions = context.actions.take(numbers, self._device)
        with self.reference.computing() as reference:
            return velocity(reference, state, self._sampler.sigma(steps), conditions)

    @torch.no_grad()
    def _measure(self, minibatch: _Minibatch, context: _StepContext) -> None:
        """Compute the log-densities of a minibatch under the weights at the start of the step."""
        proximal = np.zeros(minibatch.tokens.num_tokens, np.float32)
        keeps_means = context.diffusion.ratio == "normalised"
        means = list[Tensor]()
        for part in parts_of(minibatch.tokens.num_tokens, context.diffusion.actions_per_microbatch):
            found, predicted = self._predict(minibatch.tokens, part, context)
            proximal[part] = self._sampler.log_density(found, predicted.following).float().cpu().numpy()
            if keeps_means:
                means.append(found.mean.cpu())
        minibatch.proximal, minibatch.means = proximal, means if keeps_means else None
        self._clock.enter("other")

    def _log_densities(
        self,
        found: Transition,
        predicted: _Predicted,
        minibatch: _Minibatch,
        context: _StepContext,
        number: int,
        part: Index,
    ) -> Tensor:
        """Return the log-densities of the drawn states of microbatch `number`, [B], with normalised ratios if asked."""
        logprobs = self._sampler.log_density(found, predicted.following).float()
        if minibatch.means is None or minibatch.proximal is None:
            return logprobs
        old = torch.from_numpy(minibatch.proximal[part]).to(self._device)
        old_mean = minibatch.means[number].to(self._device)
        return old + normalised_log_ratio(found, old_mean, logprobs, old).float()

    # --- the loss --------------------------------------------------------------------------------------------------

    def _loss(self, minibatch: _Minibatch, context: _StepContext, logprobs: Tensor) -> Tensor:
        """Return the loss of a minibatch, a scalar, from the log-densities of all of its actions, [T]."""
        batch, device = minibatch.tokens, self._device
        rollout, advantages, weights = (
            torch.from_numpy(values).to(device) for values in (batch.rollout_logprobs, batch.advantages, batch.weights)
        )
        old = rollout
        if context.objective.old == "proximal":
            assert minibatch.proximal is not None, "it was measured"
            old = torch.from_numpy(minibatch.proximal).to(device)
        numbers, sequence = np.unique(batch.sequence, return_inverse=True)
        tokens = Tokens(logprobs, old, rollout, advantages, torch.from_numpy(sequence).to(device), len(numbers))
        algorithm = context.settings.algorithm
        losses = token_losses(tokens, None, None, algorithm, context.objective, context.metrics)
        return (losses * weights).sum()

    def _divergence(self, values: Tensor, minibatch: _Minibatch, context: _StepContext, part: Index) -> Tensor:
        """Return the weighted divergence of some actions from the reference, a scalar."""
        context.metrics.add({"reference_kl": values})
        weights = torch.from_numpy(minibatch.tokens.weights[part]).to(self._device)
        return context.settings.algorithm.kl_coefficient * (values.float() * weights).sum()

    def _keep_first(self, minibatch: _Minibatch, logprobs: Tensor) -> None:
        if minibatch.first is None:
            minibatch.first = logprobs.detach().float().cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class _Predicted:
    """Inputs of the transitions of B actions, and the model's velocity."""

    state: Tensor
    following: Tensor
    steps: Tensor
    conditions: Conditions
    velocity: Tensor


def _check_algorithm(settings: PolicySettings) -> None:
    """Refuse what has no meaning for trajectories. Raises ConfigError."""
    algorithm, objective = settings.algorithm, objective_of(settings.algorithm)
    if algorithm.entropy_coefficient:
        raise ConfigError(
            f"policy.algorithm.entropy_coefficient is {algorithm.entropy_coefficient:g}, and the entropy of a step's "
            "distribution does not depend on the weights: set it to 0"
        )
    if settings.diffusion.ratio == "normalised" and objective.old != "proximal":
        raise ConfigError(
            "policy.diffusion.ratio = 'normalised' compares with the distributions at the start of the step: set "
            "policy.algorithm.old = 'proximal'"
        )


def _rollout_metrics(minibatches: Sequence[_Minibatch], actions: Actions, step: int) -> dict[str, float]:
    """Return how far the actions of a step are from the weights at its start, in versions and in log-density."""
    known = [one for one in minibatches if one.tokens.num_tokens][:1] or list(minibatches[:1])
    if all(one.proximal is not None for one in minibatches):
        known = list(minibatches)
    logprobs = [one.first if one.proximal is None else one.proximal for one in known]
    trainer = np.concatenate([one for one in logprobs if one is not None] or [np.zeros(0, np.float32)])
    rollout = np.concatenate([one.tokens.rollout_logprobs for one in known])[: len(trainer)]
    fresh = np.concatenate([one.tokens.fresh for one in known])[: len(trainer)]
    numbers = np.concatenate([one.tokens.token_ids for one in known])[: len(trainer)]
    lengths = [int(length) for one in known for length in np.bincount(one.tokens.sequence)]
    versions = np.concatenate([one.tokens.versions for one in minibatches])
    return {
        **mismatch(trainer, rollout, fresh),
        **(effective_sample_size(trainer, rollout, lengths) if len(trainer) else {}),
        **staleness_shares(step - 1 - versions),
        **_ratio_errors(trainer, rollout, fresh, numbers, actions.steps),
    }


def _ratio_errors(
    trainer: FloatArray, rollout: FloatArray, fresh: FloatArray, numbers: Any, steps: Sequence[int]
) -> dict[str, float]:
    """Return for each step of the sampler the largest difference of a ratio from 1, over fresh actions."""
    errors = np.abs(np.expm1(trainer.astype(np.float64) - rollout.astype(np.float64)))
    found = {}
    for offset, step in enumerate(steps):
        chosen = (numbers % len(steps) == offset) & (fresh > 0)
        if chosen.any():
            found[f"ratio_error/{step}"] = float(errors[chosen].max())
    return found
