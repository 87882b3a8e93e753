"""Stops 6 to 8 of the walk: the scored groups of a step become a new weight version.

    credit -> pack -> forward -> loss -> update -> metrics

Credit and packing happen once per step, forward and loss once per microbatch. A step makes one optimizer update, or
`num_passes` x `num_minibatches` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.loss.terms import Tokens
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.digest import batch_digest
from starling.policy.train.data.groups import FloatArray, ScoredGroup
from starling.policy.train.data.packing import (
    Index,
    MicrobatchInputs,
    PackedBatch,
    check_lengths,
    pack_sequences,
    shared_token_fraction,
)
from starling.policy.train.errors import PeersLostError, StepBrokenError
from starling.policy.train.loss.credit import (
    StepGroups,
    TrainBatch,
    compute_advantages,
    group_metrics,
    make_train_batch,
)
from starling.policy.train.loss.logprobs import KeptSets, token_logprobs
from starling.policy.train.loss.objective import Objective, objective_of, token_losses
from starling.policy.train.loss.router import METRIC
from starling.policy.train.loss.teacher import (
    check_teacher,
    teacher_divergence,
    teacher_targets,
    with_teacher_advantages,
)
from starling.policy.train.metrics.flops import step_flops
from starling.policy.train.metrics.tokens import TokenMetrics, effective_sample_size, mismatch, staleness_shares
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.optim.optimizer import UpdateResult
from starling.policy.train.trainer import Trainer, reference_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.policy.train.parallel.apply import ParallelModel
else:
    PreTrainedModel = torch.nn.Module


@dataclass(frozen=True, slots=True, eq=False)
class _StepContext:
    """Everything that is the same for all microbatches of a step."""

    settings: PolicySettings
    objective: Objective
    temperature: float
    """Of groups without a temperature of their own."""
    reference: ReferenceModel | None
    """None without a KL term."""
    metrics: TokenMetrics


@dataclass(slots=True, eq=False)
class _Minibatch:
    """The tokens of one optimizer update."""

    tokens: TrainBatch
    packed: PackedBatch
    proximal_logprobs: FloatArray | None = None
    """Under the weights at the start of the step, [T]; None where no separate forward pass computed them."""
    first_logprobs: FloatArray | None = None
    """Those of the minibatch's first update, [T]."""


class RlTrainer(Trainer):
    """Trains a model on scored groups, one step at a time.

    On a CPU with one thread, two trainers with equal weights, settings and groups make bitwise equal versions.
    """

    kind: ClassVar[TrainerKind] = "rl"
    reference: ReferenceModel
    batch_digest: int = 0
    """Of the groups of the last step, and of their advantages."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        *,
        total_steps: int,
        reference: PreTrainedModel | None = None,
        initial: Callable[[], PreTrainedModel] | None = None,
        clock: PhaseClock | None = None,
        parallel: ParallelModel | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: trained in place.
            settings: defaults of every step.
            total_steps: planned number of steps; decides the decay of the learning rate.
            reference: model of the KL term; by default a copy of `model` as it is before the first step, made when
                a step has such a term.
            initial: loads version 0 again, for a KL term that starts after `model` has changed.
            clock: records the phases of each step.
            parallel: see `Trainer`.

        Raises:
            ConfigError: the algorithm is unknown, or does not take one of the options.
        """
        objective_of(settings.algorithm)
        super().__init__(
            model,
            settings,
            settings.optimizer,
            total_steps=total_steps,
            clock=clock,
            reference=reference_model(model, initial, reference, parallel),
            parallel=parallel,
        )

    def step(
        self,
        groups: Sequence[ScoredGroup],
        *,
        step: int,
        temperature: float = 1.0,
        settings: PolicySettings | None = None,
        longest_completion: int = 0,
    ) -> dict[str, float]:
        """Make version `step` from version `step - 1`.

        Args:
            groups: those of the step.
            step: number of the version to make; staleness counts from it.
            temperature: divisor of the logits for groups that do not carry their own.
            settings: of this step; by default those of the trainer.
            longest_completion: token limit of a completion; 0 for the longest completion of the step.

        Returns:
            The metrics, see `docs/reference/metrics.md`. Metrics without a token to measure are left out, such as
            ``mismatch_kl`` when every completion is stale.

        Raises:
            ConfigError: no tokens, a reward or log-probability that is not finite, a sequence that is too long,
                `temperature` <= 0, a user's advantage or loss that fails, or a KL term whose reference is not
                available. The weights are unchanged.
            StepBrokenError: a user's loss failed after some updates of the step: the weights are not a version.
        """
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}: training needs samples drawn at a temperature above 0")
        settings = settings or self._settings
        algorithm, objective = settings.algorithm, objective_of(settings.algorithm)
        reference = self._prepare_reference(algorithm, step)
        context = _StepContext(settings, objective, temperature, reference, TokenMetrics(self._gather))

        # Credit and pack
        step_groups = compute_advantages(groups, objective, step=step)
        minibatches = [
            self._pack(part, context, longest_completion or step_groups.longest)
            for part in step_groups.split(algorithm.num_minibatches)
        ]

        # Forward, loss and update
        results = self._update(minibatches, context)
        self.batch_digest = batch_digest(step_groups.groups, step_groups.advantages)

        # Metrics
        flops = sum(
            step_flops(self._cost, one.packed.lengths, one.packed.reach, one.tokens.num_tokens) for one in minibatches
        )
        return {
            **group_metrics(step_groups),
            **rollout_metrics(minibatches, step),
            **_update_metrics(context.metrics, results, minibatches),
            **self._router_loss.end_step(skipped=any(one.skipped for one in results)),
            **_settings_in_force(settings, objective),
            "model_flops": algorithm.num_passes * flops,
        }

    def _prepare_reference(self, algorithm: AlgorithmSettings, step: int) -> ReferenceModel | None:
        if not self.optimizer.num_steps:
            self.reference.begin(step - 1)
        if not algorithm.kl_coefficient:
            return None
        self.reference.prepare(
            step,
            required_by=f"policy.algorithm.kl_coefficient = {algorithm.kl_coefficient:g}",
            reset_every=algorithm.reference_reset_every,
        )
        return self.reference

    def _pack(self, part: StepGroups, context: _StepContext, longest: int) -> _Minibatch:
        """Turn the groups of one update into trained tokens, and those into microbatches."""
        settings, algorithm = context.settings, context.settings.algorithm
        other_terms = algorithm.kl_coefficient or algorithm.entropy_coefficient or settings.router_aux_coefficient
        skip_zero = algorithm.skip_zero_advantage and not other_terms
        skip_zero = skip_zero and all(group.teacher is None for group in part.groups)
        tokens = make_train_batch(
            part, context.objective, skip_zero=skip_zero, temperature=context.temperature, longest=longest
        )
        check_teacher(tokens, settings.distill)
        tokens = with_teacher_advantages(tokens, settings.distill)
        check_lengths(tokens.blocks, self._longest)
        packed = pack_sequences(
            tokens.blocks,
            tokens.token_ids,
            settings.tokens_per_microbatch,
            layout=self._layout,
            share=settings.share_prompts,
            routing=tokens.routing,
        )
        return _Minibatch(tokens, packed)

    def _update(self, minibatches: Sequence[_Minibatch], context: _StepContext) -> list[UpdateResult]:
        """Make the optimizer updates of a step: in each pass, one of each minibatch."""
        updates = [one for _ in range(context.settings.algorithm.num_passes) for one in minibatches]
        if context.objective.old == "proximal" and len(updates) > 1:
            for minibatch in minibatches:
                minibatch.proximal_logprobs = self._logprobs(minibatch, context)
        with self._all_or_none(len(updates)):
            return self._make(updates, context)

    def _make(self, updates: Sequence[_Minibatch], context: _StepContext) -> list[UpdateResult]:
        results = list[UpdateResult]()
        for number, minibatch in enumerate(updates, start=1):
            try:
                losses = self._accumulate(minibatch, context)
            except ConfigError as error:
                if not results:
                    raise
                raise StepBrokenError(f"update {number} of {len(updates)} of a step failed: {error}") from error
            results.append(self._apply(losses, context, ends_step=number == len(updates)))
        return results

    @contextmanager
    def _all_or_none(self, num_updates: int) -> Iterator[None]:
        """Undo the updates of a step that this replica cannot complete because it has lost others."""
        peers = None if self._parallel is None else self._parallel.peers
        if peers is None or peers.size == 1 or num_updates == 1:
            yield
            return
        self.optimizer.keep()
        try:
            yield
        except PeersLostError:
            self.optimizer.rewind()
            raise
        finally:
            self.optimizer.forget()

    def _logprobs(self, minibatch: _Minibatch, context: _StepContext) -> FloatArray:
        """Return the log-probabilities of a minibatch's tokens under the present weights, [T]."""
        tokens, chunk_tokens = minibatch.tokens, context.settings.memory.logprob_chunk_tokens
        found = list[tuple[Index, Tensor]]()

        def keep(inputs: MicrobatchInputs) -> None:
            divisor = _divisor(tokens, inputs, context.temperature)
            kept = _kept_sets(tokens, inputs)
            logprobs, _ = token_logprobs(self._model, inputs, divisor, kept=kept, chunk_tokens=chunk_tokens)
            found.append((inputs.tokens, logprobs))

        self._evaluate(minibatch.packed, keep, tokens.trained)
        self._clock.enter("other")
        return self._joined(found, tokens.num_tokens)

    def _accumulate(self, minibatch: _Minibatch, context: _StepContext) -> list[Tensor]:
        """Accumulate the gradient of one update. Returns the loss of each microbatch."""
        self.optimizer.clear()
        tokens = minibatch.tokens
        found = list[tuple[Index, Tensor]]()

        def loss_of(inputs: MicrobatchInputs, reference: Tensor | None) -> Tensor:
            loss, logprobs = self._microbatch_loss(minibatch, inputs, context, reference)
            found.append((inputs.tokens, logprobs))
            return loss

        def reference_of(model: PreTrainedModel, inputs: MicrobatchInputs) -> Tensor:
            divisor, kept = _divisor(tokens, inputs, context.temperature), _kept_sets(tokens, inputs)
            chunk_tokens = context.settings.memory.logprob_chunk_tokens
            logprobs, _ = token_logprobs(model, inputs, divisor, kept=kept, chunk_tokens=chunk_tokens)
            return logprobs

        losses = self._add_gradients(
            minibatch.packed,
            loss_of,
            context.metrics,
            tokens.trained,
            reference_of=None if context.reference is None else reference_of,
        )
        self._clock.enter("other")
        if minibatch.first_logprobs is None:
            minibatch.first_logprobs = self._joined(found, tokens.num_tokens)
        return losses

    def _microbatch_loss(
        self, minibatch: _Minibatch, inputs: MicrobatchInputs, context: _StepContext, reference_logprobs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return a microbatch's part of the loss, a scalar, and its tokens' log-probabilities, [N], detached."""
        settings, batch = context.settings, minibatch.tokens
        chunk_tokens = settings.memory.logprob_chunk_tokens
        divisor, kept = _divisor(batch, inputs, context.temperature), _kept_sets(batch, inputs)
        targets = teacher_targets(batch, inputs, settings.distill)
        logprobs, entropy = token_logprobs(
            self._model,
            inputs,
            divisor,
            targets=targets,
            with_entropy_gradient=bool(settings.algorithm.entropy_coefficient),
            kept=kept,
            chunk_tokens=chunk_tokens,
            keeps_probabilities=self._one_at_a_time,
        )
        student, logprobs = logprobs, logprobs if targets is None else logprobs[:, 0]
        tokens, weights = _loss_tokens(minibatch, inputs, logprobs, context.objective)
        losses = token_losses(
            tokens, entropy, reference_logprobs, settings.algorithm, context.objective, context.metrics
        )
        if targets is not None:
            terms = teacher_divergence(batch, inputs, student[:, 1:], settings.distill)
            context.metrics.add(terms.metrics)
            losses = losses + settings.distill.coefficient * terms.loss
        return (losses * weights).sum(), logprobs.detach()

    def _apply(self, losses: Sequence[Tensor], context: _StepContext, *, ends_step: bool) -> UpdateResult:
        """Make one optimizer update from the accumulated gradient."""
        self._clock.enter("optimizer")
        total = torch.stack([torch.zeros((), device=self._model.device), *losses]).sum()
        context.metrics.add_sum("loss", total)
        loss = float(total if self._parallel is None else self._parallel.sum(total))
        result = self._apply_gradient(loss, context.settings.optimizer, ends_step=ends_step)
        self._clock.enter("other")
        return result

    def _joined(self, found: Sequence[tuple[Index, Tensor]], num_tokens: int) -> FloatArray:
        """Join the log-probabilities of all microbatches, [T]. Call it after the last: it waits for the device."""
        joined = np.zeros(num_tokens, dtype=np.float32)
        for tokens, logprobs in found:
            joined[tokens] = logprobs.cpu().numpy()
        return joined if self._parallel is None else self._parallel.join(joined)


def _divisor(batch: TrainBatch, inputs: MicrobatchInputs, temperature: float) -> float | Tensor:
    if batch.temperatures is None:
        return temperature
    return torch.from_numpy(batch.temperatures[inputs.tokens]).to(inputs.targets.device)


def _kept_sets(batch: TrainBatch, inputs: MicrobatchInputs) -> KeptSets | None:
    return None if batch.kept is None else KeptSets(batch.kept.take(inputs.tokens), inputs.targets.device)


def _loss_tokens(
    minibatch: _Minibatch, inputs: MicrobatchInputs, logprobs: Tensor, objective: Objective
) -> tuple[Tokens, Tensor]:
    """Return the arguments of a loss for one microbatch, and the weight of each token, [N]."""
    batch, device = minibatch.tokens, inputs.targets.device
    rollout, advantages, weights = (
        torch.from_numpy(values[inputs.tokens]).to(device)
        for values in (batch.rollout_logprobs, batch.advantages, batch.weights)
    )
    old = rollout
    if objective.old == "proximal":
        proximal = minibatch.proximal_logprobs
        old = logprobs.detach() if proximal is None else torch.from_numpy(proximal[inputs.tokens]).to(device)
    numbers, sequence = np.unique(batch.sequence[inputs.tokens], return_inverse=True)
    tokens = Tokens(logprobs, old, rollout, advantages, torch.from_numpy(sequence).to(device), len(numbers))
    return tokens, weights


def rollout_metrics(minibatches: Sequence[_Minibatch], step: int) -> dict[str, float]:
    """Return how far the step's tokens are from the weights at its start, in versions and in log-probability.

    Log-probabilities under those weights are known for all tokens if the step had one update or a separate forward
    pass; otherwise only for the first minibatch with tokens. (Updates before it had a gradient of 0.)
    """
    known = [one for one in minibatches if one.tokens.num_tokens] or minibatches[:1]
    if any(one.proximal_logprobs is None for one in minibatches):
        known = known[:1]
    trainer = np.concatenate(
        [one.first_logprobs if one.proximal_logprobs is None else one.proximal_logprobs for one in known]
    )
    rollout = np.concatenate([one.tokens.rollout_logprobs for one in known])
    fresh = np.concatenate([one.tokens.fresh for one in known])
    versions = np.concatenate([one.tokens.versions for one in minibatches])
    lengths = [int(length) for one in known for length in np.bincount(one.tokens.sequence)]
    teacher = [one.tokens.teacher.logprobs for one in known if one.tokens.teacher is not None]
    kl = {"teacher_kl": float((rollout - np.concatenate(teacher)).mean())} if teacher and len(rollout) else {}
    return {
        **kl,
        **mismatch(trainer, rollout, fresh),
        **effective_sample_size(trainer, rollout, lengths),
        **staleness_shares(step - 1 - versions),
    }


def _update_metrics(
    token_metrics: TokenMetrics, results: Sequence[UpdateResult], minibatches: Sequence[_Minibatch]
) -> dict[str, float]:
    metrics = token_metrics.read()
    metrics |= {name: metrics[name] / len(results) for name in ("loss", METRIC) if name in metrics}
    return metrics | {
        "grad_norm": sum(one.grad_norm for one in results) / len(results),
        "learning_rate": results[-1].learning_rate,
        "skipped_step": float(any(one.skipped for one in results)),
        "num_updates": float(len(results)),
        "num_trained_tokens": float(sum(one.tokens.num_tokens for one in minibatches)),
        "num_microbatches": float(sum(len(one.packed.plan) for one in minibatches)),
        "padding_waste": max(one.packed.padding_waste for one in minibatches),
        "shared_token_fraction": shared_token_fraction([one.packed for one in minibatches]),
    }


def _settings_in_force(settings: PolicySettings, objective: Objective) -> dict[str, float]:
    """Return the values of the settings that operators may change, as used by this step."""
    bounds = {name: objective.in_force.get(name) for name in ("clip_low", "clip_high")}
    return {
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "kl_coefficient": settings.algorithm.kl_coefficient,
        **{name: float(value) for name, value in bounds.items() if value is not None},
    }
