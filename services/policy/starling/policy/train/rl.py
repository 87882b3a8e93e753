"""Stops 6 to 8 of the walk: the groups of a step become a new weight version.

rewards -> advantages -> microbatches -> forward and backward of each -> one optimizer update, or several
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from starling.algo.loss.correct import correct
from starling.algo.loss.regularisers import entropy_bonus, kl_loss, positive_nll
from starling.algo.loss.terms import LossTerms, Tokens
from starling.common.errors import ConfigError
from starling.policy.core.phases import NullClock, PhaseClock
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.credit import (
    StepGroups,
    TrainBatch,
    compute_advantages,
    group_metrics,
    make_train_batch,
)
from starling.policy.train.data.groups import FloatArray, ScoredGroup
from starling.policy.train.data.packing import (
    Index,
    MicrobatchInputs,
    PackedBatch,
    check_lengths,
    pack_sequences,
    to_tensors,
)
from starling.policy.train.errors import StepBrokenError
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.loss.objective import Objective, objective_of
from starling.policy.train.loss.teacher import check_taught, divergence, wanted_tokens, with_teacher
from starling.policy.train.memory.setup import optimizer_device
from starling.policy.train.metrics.flops import model_cost, step_flops
from starling.policy.train.metrics.tokens import TokenMetrics, effective_sample_size, mismatch, staleness_shares
from starling.policy.train.model.load import longest_sequence, pair_cost
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.optim.optimizer import ModelOptimizer, UpdateResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


@dataclass(slots=True, eq=False)
class _Part:
    """What one optimizer update trains."""

    credited: TrainBatch
    batch: PackedBatch
    proximal: FloatArray | None = None
    """Log-probabilities under the weights with which the step began, [T]; None where they were not computed apart."""
    first: FloatArray | None = None
    """Log-probabilities that its first update found, [T]."""


class RlTrainer:
    """Trains a model on scored groups, one step at a time.

    Two trainers with equal weights, settings and groups make bitwise equal versions on a CPU with one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        *,
        total_steps: int,
        reference: PreTrainedModel | None = None,
        initial: Callable[[], PreTrainedModel] | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: trained in place.
            settings: what to do.
            total_steps: how many steps there will be; decides the decay of the learning rate.
            reference: the model of the KL term; by default a copy of `model` as it is before the first step, made when
                there is such a term.
            initial: loads version 0 again, for a KL term that comes when that is no longer what `model` holds.
            clock: is told what the time of a step goes into.

        Raises:
            ConfigError: there is no such algorithm, or an option that it does not take.
        """
        objective_of(settings.algorithm)
        self._model = model
        self._settings = settings
        self._longest = longest_sequence(model)
        self._pair_cost = pair_cost(model)
        self._clock = clock or NullClock()
        self._cost = model_cost(model)
        where = optimizer_device(model, settings.memory)
        self.descent = ModelOptimizer(model, settings.optimizer, total_steps, where=where)
        self.reference = ReferenceModel(model, initial, reference)

    def step(
        self,
        groups: Sequence[ScoredGroup],
        *,
        step: int,
        temperature: float = 1.0,
        settings: PolicySettings | None = None,
        longest_completion: int = 0,
    ) -> dict[str, float]:
        """Make version `step` out of version `step - 1`.

        Args:
            groups: those of the step.
            step: numbers the version to make; the ages of samples count from it.
            temperature: divisor of the logits under which the completions were sampled whose group does not say it.
            settings: of this step; by default those that the trainer was made with.
            longest_completion: most tokens that a completion could have had; 0 for the longest of the step.

        Returns:
            The metrics, which `docs/reference/metrics.md` explains. What no token can tell is left out,
            such as ``mismatch_kl`` when every completion is stale.

        Raises:
            ConfigError: no tokens, a reward or log-probability not finite, a sequence too long, `temperature` <= 0,
                an advantage or a loss of the user's that fails, or a KL term whose reference nobody has any more. Then
                the weights are as they were.
            StepBrokenError: a loss of the user's failed after some updates of the step: the weights are no version.
        """
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}: training needs samples drawn at a temperature above 0")
        settings = settings or self._settings
        algorithm, objective = settings.algorithm, objective_of(settings.algorithm)
        if not self.descent.num_steps:
            self.reference.begin(step - 1)
        reference = self._reference_of(algorithm, step)
        scored = compute_advantages(groups, objective, step=step)
        parts = [
            self._prepare(part, settings, objective, temperature, longest_completion or scored.longest)
            for part in scored.split(algorithm.num_minibatches)
        ]
        measured, applied = self._update(parts, settings, objective, temperature, reference)
        flops = sum(step_flops(self._cost, part.batch.lengths, part.credited.num_tokens) for part in parts)
        return {
            **group_metrics(scored),
            **diagnosed(parts, step),
            **_told(measured, applied, parts),
            **_in_force(settings, objective),
            "model_flops": algorithm.num_passes * flops,
        }

    def _update(
        self,
        parts: Sequence[_Part],
        settings: PolicySettings,
        objective: Objective,
        temperature: float,
        reference: ReferenceModel | None,
    ) -> tuple[TokenMetrics, list[UpdateResult]]:
        """Make the updates of a step, one of each part in each pass."""
        updates = [part for _ in range(settings.algorithm.num_passes) for part in parts]
        if objective.old == "proximal" and len(updates) > 1:
            for part in parts:
                part.proximal = self._log_probabilities(part, temperature, settings.memory.logprob_chunk_tokens)
        measured, applied = TokenMetrics(), list[UpdateResult]()
        for number, part in enumerate(updates, start=1):
            try:
                losses = self._accumulate(part, settings, objective, temperature, reference, measured)
            except ConfigError as error:
                if not applied:
                    raise
                raise StepBrokenError(f"update {number} of {len(updates)} of a step failed: {error}") from error
            applied.append(self._apply(losses, settings, measured, ends_step=number == len(updates)))
        return measured, applied

    def _reference_of(self, algorithm: AlgorithmSettings, step: int) -> ReferenceModel | None:
        if not algorithm.kl_coefficient:
            return None
        self.reference.prepare(
            step,
            wanted_by=f"policy.algorithm.kl_coefficient = {algorithm.kl_coefficient:g}",
            reset_every=algorithm.reference_reset_every,
        )
        return self.reference

    def _prepare(
        self, part: StepGroups, settings: PolicySettings, objective: Objective, temperature: float, longest: int
    ) -> _Part:
        algorithm = settings.algorithm
        others = algorithm.kl_coefficient or algorithm.entropy_coefficient
        skip_zero = algorithm.skip_zero_advantage and not others
        skip_zero = skip_zero and all(group.taught is None for group in part.groups)
        credited = make_train_batch(part, objective, skip_zero=skip_zero, temperature=temperature, longest=longest)
        check_taught(credited, settings.distill)
        credited = with_teacher(credited, settings.distill)
        check_lengths(credited.prompted, self._longest)
        batch = pack_sequences(
            credited.prompted,
            settings.tokens_per_microbatch,
            share_prompts=settings.share_prompts,
            pair_cost=self._pair_cost,
        )
        return _Part(credited, batch)

    def _inputs(self, part: _Part) -> Iterator[MicrobatchInputs]:
        """Make the tensors of one microbatch at a time: masks and pixels of all could be larger than the model."""
        model, ids, trained = self._model, part.credited.token_ids, part.credited.trained
        for microbatch in part.batch.plan:
            self._clock.enter("forward")
            yield to_tensors(part.batch, microbatch, ids, model.dtype, model.device, trained)

    def _log_probabilities(self, part: _Part, temperature: float, chunk_tokens: int) -> FloatArray:
        """Return the log-probabilities of a part's tokens under the weights as they are, [T]."""
        found = []
        with torch.no_grad():
            for inputs in self._inputs(part):
                divisor = _divisor(part.credited, inputs, temperature)
                logprobs, _ = token_logprobs(self._model, inputs, divisor, chunk_tokens=chunk_tokens)
                found.append((inputs.tokens, logprobs))
        self._clock.enter("other")
        return _gathered(found, part.credited.num_tokens)

    def _accumulate(
        self,
        part: _Part,
        settings: PolicySettings,
        objective: Objective,
        temperature: float,
        reference: ReferenceModel | None,
        measured: TokenMetrics,
    ) -> list[Tensor]:
        """Add up the gradient of one update. Returns the parts of its loss."""
        self.descent.clear()
        losses, found, chunk_tokens = [], [], settings.memory.logprob_chunk_tokens
        for inputs in self._inputs(part):
            divisor = _divisor(part.credited, inputs, temperature)
            known = None
            if reference is not None:
                with reference.computing() as other:
                    known, _ = token_logprobs(other, inputs, divisor, chunk_tokens=chunk_tokens)
            targets = wanted_tokens(part.credited, inputs, settings.distill)
            logprobs, entropy = token_logprobs(
                self._model,
                inputs,
                divisor,
                targets=targets,
                with_entropy_gradient=bool(settings.algorithm.entropy_coefficient),
                chunk_tokens=chunk_tokens,
            )
            student, logprobs = logprobs, logprobs if targets is None else logprobs[:, 0]
            tokens, weights = _tokens(part, inputs, logprobs, objective)
            token_losses = compose(tokens, entropy, known, settings.algorithm, objective, measured)
            if targets is not None:
                terms = divergence(part.credited, inputs, student[:, 1:], settings.distill)
                measured.add(terms.metrics)
                token_losses = token_losses + settings.distill.coefficient * terms.loss
            loss = (token_losses * weights).sum()
            self._clock.enter("backward")
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            found.append((inputs.tokens, logprobs.detach()))
        self._clock.enter("other")
        if part.first is None:
            part.first = _gathered(found, part.credited.num_tokens)
        return losses

    def _apply(
        self, losses: Sequence[Tensor], settings: PolicySettings, measured: TokenMetrics, *, ends_step: bool
    ) -> UpdateResult:
        """Make one optimizer update of what was accumulated."""
        self._clock.enter("optimizer")
        total = torch.stack([torch.zeros((), device=self._model.device), *losses]).sum()
        measured.add_sum("loss", total)
        applied = self.descent.apply(float(total), settings.optimizer, ends_step=ends_step)
        self._clock.enter("other")
        return applied


def compose(
    tokens: Tokens,
    entropy: Tensor,
    reference_logprobs: Tensor | None,
    algorithm: AlgorithmSettings,
    objective: Objective,
    measured: TokenMetrics,
) -> Tensor:
    """Return the loss of each token, [N]: the algorithm's, corrected, and the terms that the settings add."""
    terms = _terms(tokens, objective)
    factor, found = correct(tokens, objective.corrections)
    measured.add(terms.metrics | found | {"entropy": entropy})
    losses = terms.loss * factor if objective.corrections else terms.loss
    extra = []
    if reference_logprobs is not None:
        kl = kl_loss(tokens, reference_logprobs, kind=algorithm.kl_estimator)
        extra.append((algorithm.kl_coefficient, kl))
    if algorithm.entropy_coefficient:
        extra.append((algorithm.entropy_coefficient, entropy_bonus(entropy)))
    if algorithm.positive_nll_coefficient:
        extra.append((algorithm.positive_nll_coefficient, positive_nll(tokens)))
    for coefficient, term in extra:
        losses = losses + coefficient * term.loss
        measured.add({name: value for name, value in term.metrics.items() if name != "entropy"})
    return losses


def _terms(tokens: Tokens, objective: Objective) -> LossTerms:
    """Ask the loss, which may be the user's own, and check what it gives: a mean would silently count N times."""
    try:
        terms = objective.loss(tokens)
        shapes = {name: tuple(values.shape) for name, values in {"loss": terms.loss, **terms.metrics}.items()}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A user's function raises anything.
        why = error if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"the loss function of policy.algorithm failed: {why}") from error
    for name, shape in shapes.items():
        if shape != tuple(tokens.logprobs.shape):
            raise ConfigError(
                f"the loss function of policy.algorithm gave {name!r} in the shape {list(shape)} for "
                f"{len(tokens.logprobs)} tokens: it must give one number per token"
            )
    if not terms.loss.requires_grad:
        raise ConfigError("the loss of policy.algorithm does not depend on tokens.logprobs: nothing could be learnt")
    return terms


def _gathered(found: Sequence[tuple[Index, Tensor]], num_tokens: int) -> FloatArray:
    """Put the log-probabilities of all microbatches together, [T]. Last of all, for it waits for the device."""
    gathered = np.zeros(num_tokens, dtype=np.float32)
    for tokens, logprobs in found:
        gathered[tokens] = logprobs.cpu().numpy()
    return gathered


def _divisor(credited: TrainBatch, inputs: MicrobatchInputs, temperature: float) -> float | Tensor:
    if credited.temperatures is None:
        return temperature
    return torch.from_numpy(credited.temperatures[inputs.tokens]).to(inputs.targets.device)


def _tokens(part: _Part, inputs: MicrobatchInputs, logprobs: Tensor, objective: Objective) -> tuple[Tokens, Tensor]:
    """Return what a loss takes of one microbatch, and its tokens' weights."""
    credited, device = part.credited, inputs.targets.device
    rollout, advantages, weights = (
        torch.from_numpy(values[inputs.tokens]).to(device)
        for values in (credited.rollout_logprobs, credited.advantages, credited.weights)
    )
    old = rollout
    if objective.old == "proximal":
        known = part.proximal
        old = logprobs.detach() if known is None else torch.from_numpy(known[inputs.tokens]).to(device)
    numbers, sequence = np.unique(credited.sequence[inputs.tokens], return_inverse=True)
    tokens = Tokens(logprobs, old, rollout, advantages, torch.from_numpy(sequence).to(device), len(numbers))
    return tokens, weights


def diagnosed(parts: Sequence[_Part], step: int) -> dict[str, float]:
    """Return how far the step's tokens are from the weights with which it began, in versions and in log-probability.

    The log-probabilities of all tokens under those weights are known where the step had one update, or they were
    computed apart; else those of the first update that had tokens. (Updates before it had a gradient of 0.)
    """
    known = [part for part in parts if part.credited.num_tokens] or parts[:1]
    if any(part.proximal is None for part in parts):
        known = known[:1]
    trainer = np.concatenate([part.first if part.proximal is None else part.proximal for part in known])
    rollout, fresh = (
        np.concatenate([getattr(part.credited, name) for part in known]) for name in ("rollout_logprobs", "fresh")
    )
    versions = np.concatenate([part.credited.versions for part in parts])
    lengths = [int(length) for part in known for length in np.bincount(part.credited.sequence)]
    taught = [part.credited.taught.logprobs for part in known if part.credited.taught is not None]
    kl = {"teacher_kl": float((rollout - np.concatenate(taught)).mean())} if taught and len(rollout) else {}
    return {
        **kl,
        **mismatch(trainer, rollout, fresh),
        **effective_sample_size(trainer, rollout, lengths),
        **staleness_shares(step - 1 - versions),
    }


def _told(measured: TokenMetrics, applied: Sequence[UpdateResult], parts: Sequence[_Part]) -> dict[str, float]:
    found = measured.read()
    found["loss"] = found.get("loss", 0.0) / len(applied)
    return found | {
        "grad_norm": sum(one.grad_norm for one in applied) / len(applied),
        "learning_rate": applied[-1].learning_rate,
        "skipped_step": float(any(one.skipped for one in applied)),
        "num_updates": float(len(applied)),
        "num_trained_tokens": float(sum(part.credited.num_tokens for part in parts)),
        "num_microbatches": float(sum(len(part.batch.plan) for part in parts)),
        "padding_waste": max(part.batch.padding_waste for part in parts),
    }


def _in_force(settings: PolicySettings, objective: Objective) -> dict[str, float]:
    """Return the settings that operators may change, as they were for this step."""
    bounds = {name: objective.in_force.get(name) for name in ("clip_low", "clip_high")}
    return {
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "kl_coefficient": settings.algorithm.kl_coefficient,
        **{name: float(value) for name, value in bounds.items() if value is not None},
    }
