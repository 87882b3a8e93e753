"""Steps that learn from pairs of responses: a policy by DPO or IPO, and a model that scores responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from starling.algo.loss.preference import Pairs, bradley_terry, dpo, ipo
from starling.algo.loss.terms import LossTerms
from starling.policy.core.phases import NullClock, PhaseClock
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import DpoSettings
from starling.policy.train.data.examples import PackedPairs, PreferencePair, pack_pairs
from starling.policy.train.data.packing import Index, MicrobatchInputs, to_tensors
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.memory.setup import optimizer_device
from starling.policy.train.metrics.flops import ModelCost, model_cost, step_flops
from starling.policy.train.metrics.tokens import TokenMetrics
from starling.policy.train.model.load import longest_sequence, pair_cost
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.optim.optimizer import ModelOptimizer, UpdateResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


class DpoTrainer:
    """Trains a model to prefer the chosen responses, measured against the model that it began as."""

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
            total_steps: how many steps there will be.
            reference: against which to measure; by default `model` as it is before the first step.
            initial: loads version 0 again, for when it is wanted as the reference.
            clock: is told what the time of a step goes into.
        """
        self._model, self._settings = model, settings
        self._longest, self._pair_cost = longest_sequence(model), pair_cost(model)
        self._clock, self._cost = clock or NullClock(), model_cost(model)
        where = optimizer_device(model, settings.memory)
        self.descent = ModelOptimizer(model, settings.dpo.optimizer, total_steps, where=where)
        self.reference = ReferenceModel(model, initial, reference)

    def step(
        self, pairs: Sequence[PreferencePair], *, step: int, settings: PolicySettings | None = None
    ) -> dict[str, float]:
        """Make version `step` out of `pairs`, each weighing the same.

        Returns:
            The metrics: means over the pairs of ``loss``, ``reward_chosen``, ``reward_rejected``, ``reward_margin``
            and ``accuracy`` (see `starling.algo.loss.preference.dpo`), and those of every step.

        Raises:
            ConfigError: there are no pairs, one is longer than the model's context, or nobody has the reference.
        """
        settings = settings or self._settings
        if not self.descent.num_steps:
            self.reference.begin(step - 1)
        if settings.dpo.use_reference:
            self.reference.prepare(step, wanted_by="policy.dpo.use_reference = true")
        paired = pack_pairs(pairs, settings, longest=self._longest, pair_cost=self._pair_cost)
        self.descent.clear()
        measured, losses = TokenMetrics(), []
        for microbatch in paired.batch.plan:
            self._clock.enter("forward")
            inputs = to_tensors(paired.batch, microbatch, paired.token_ids, self._model.dtype, self._model.device)
            known = None
            if settings.dpo.use_reference:
                with self.reference.computing() as other:
                    known = self._sums(other, inputs, paired)
            terms = _preferred(self._sums(self._model, inputs, paired), known, settings.dpo)
            measured.add(terms.metrics)
            loss = terms.loss.sum() / paired.num_pairs
            losses.append(loss.detach())
            self._clock.enter("backward")
            torch.autograd.backward(loss)
        self._clock.enter("optimizer")
        return _finish(self.descent, self._clock, self._cost, losses, settings.dpo.optimizer, measured, paired)

    def _sums(self, model: PreTrainedModel, inputs: MicrobatchInputs, paired: PackedPairs) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each response of a microbatch, and its tokens: both [pairs, 2]."""
        chunk_tokens = self._settings.memory.logprob_chunk_tokens
        logprobs, _ = token_logprobs(model, inputs, chunk_tokens=chunk_tokens)
        numbers, count = _compact(paired, inputs)
        sequence = torch.from_numpy(numbers).to(logprobs.device)
        sums = torch.zeros(count, dtype=torch.float64, device=logprobs.device)
        sums = sums.index_add(0, sequence, logprobs.double())
        return sums.float().view(-1, 2), torch.bincount(sequence, minlength=count).view(-1, 2)


class RewardModelTrainer:
    """Trains a model with one output to score the chosen responses above the rejected ones."""

    def __init__(
        self, model: PreTrainedModel, settings: PolicySettings, *, total_steps: int, clock: PhaseClock | None = None
    ) -> None:
        """Start with a fresh optimizer; `model` has a `score` layer, see `load_model`, and is trained in place."""
        self._model, self._settings = model, settings
        self._longest, self._pair_cost = longest_sequence(model), pair_cost(model)
        self._clock, self._cost = clock or NullClock(), model_cost(model)
        where = optimizer_device(model, settings.memory)
        self.descent = ModelOptimizer(model, settings.reward_model.optimizer, total_steps, where=where)

    def step(
        self, pairs: Sequence[PreferencePair], *, step: int, settings: PolicySettings | None = None
    ) -> dict[str, float]:
        """Make version `step` out of `pairs`, each weighing the same.

        Returns:
            The metrics: means over the pairs of ``loss``, ``reward_chosen``, ``reward_rejected``, ``reward_margin``
            and ``accuracy`` (the share of pairs that the model orders right), and those of every step.

        Raises:
            ConfigError: there are no pairs, or one is longer than the model's context.
        """
        del step
        chosen = (settings or self._settings).reward_model
        # A score is read behind the last token, which must therefore be an input: one more token follows it.
        paired = pack_pairs(pairs, self._settings, longest=self._longest, pair_cost=self._pair_cost, closing=1)
        self.descent.clear()
        measured, losses = TokenMetrics(), []
        for microbatch in paired.batch.plan:
            self._clock.enter("forward")
            inputs = to_tensors(paired.batch, microbatch, paired.token_ids, self._model.dtype, self._model.device)
            scores = self._scores(inputs, paired)
            terms = bradley_terry(scores[:, 0], scores[:, 1], center=chosen.center_coefficient)
            measured.add(terms.metrics)
            loss = terms.loss.sum() / paired.num_pairs
            losses.append(loss.detach())
            self._clock.enter("backward")
            torch.autograd.backward(loss)
        self._clock.enter("optimizer")
        return _finish(self.descent, self._clock, self._cost, losses, chosen.optimizer, measured, paired)

    def _scores(self, inputs: MicrobatchInputs, paired: PackedPairs) -> Tensor:
        """Return the scores of a microbatch's responses, float32 [pairs, 2]."""
        hidden: Tensor = self._model.base_model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
        ).last_hidden_state
        numbers, count = _compact(paired, inputs)
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        assert len(last) == count
        cells = inputs.source.index_select(0, torch.from_numpy(last).to(inputs.source.device))
        scores: Tensor = self._model.score(hidden.flatten(0, 1).index_select(0, cells))
        return scores.float().view(-1, 2)


def _compact(paired: PackedPairs, inputs: MicrobatchInputs) -> tuple[Index, int]:
    """Return which of a microbatch's responses holds each of its tokens, and how many it has.

    They are numbered from 0, and those of a pair follow each other.
    """
    found, sequence = np.unique(paired.sequence[inputs.tokens], return_inverse=True)
    return sequence.astype(np.int64), len(found)


def _preferred(
    trained: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor] | None, settings: DpoSettings
) -> LossTerms:
    sums, counts = trained
    known = (None, None) if reference is None else (reference[0][:, 0], reference[0][:, 1])
    pairs = Pairs(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1], *known)
    if settings.loss == "ipo":
        return ipo(pairs, beta=settings.beta)
    return dpo(pairs, beta=settings.beta, label_smoothing=settings.label_smoothing)


def _finish(
    descent: ModelOptimizer,
    clock: PhaseClock,
    cost: ModelCost,
    losses: list[Tensor],
    optimizer: OptimizerSettings,
    measured: TokenMetrics,
    paired: PackedPairs,
) -> dict[str, float]:
    total = float(torch.stack(losses).sum())
    applied: UpdateResult = descent.apply(total, optimizer)
    clock.enter("other")
    return measured.read() | {
        "loss": total,
        "grad_norm": applied.grad_norm,
        "max_grad_norm": optimizer.max_grad_norm,
        "learning_rate": applied.learning_rate,
        "skipped_step": float(applied.skipped),
        "num_tokens": float(paired.num_tokens),
        "num_sequences": float(2 * paired.num_pairs),
        "num_microbatches": float(len(paired.batch.plan)),
        "padding_waste": paired.batch.padding_waste,
        "model_flops": step_flops(cost, paired.batch.lengths, paired.num_tokens),
    }
