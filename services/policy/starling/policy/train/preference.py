"""Trainers on preference pairs: a policy by DPO or IPO, and a reward model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.loss.preference import Pairs, bradley_terry, dpo, ipo
from starling.algo.loss.terms import LossTerms
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import PackedPairs, PreferencePair, pack_pairs
from starling.policy.train.data.packing import Index, MicrobatchInputs
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.metrics.tokens import TokenMetrics
from starling.policy.train.model.attention import model_arguments
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.trainer import ReferenceOf, Trainer, reference_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.policy.train.parallel.apply import ParallelModel
else:
    PreTrainedModel = torch.nn.Module


class PreferenceTrainer(Trainer, ABC):
    """A step on preference pairs; subclasses define the loss of each pair."""

    closing_tokens: ClassVar[int] = 0
    """Tokens to append to every response; see `pack_pairs`."""

    def step(
        self, pairs: Sequence[PreferencePair], *, step: int, settings: PolicySettings | None = None
    ) -> dict[str, float]:
        """Make version `step` from `pairs`; every pair has the same weight.

        Args:
            pairs: those of the step.
            step: number of the version to make.
            settings: of this step; by default those of the trainer.

        Returns:
            The metrics: means over the pairs of ``loss``, ``reward_chosen``, ``reward_rejected``, ``reward_margin``
            and ``accuracy`` (see `starling.algo.loss.preference`), and those of every step.

        Raises:
            ConfigError: there are no pairs, one is longer than the model's context, or the reference is not available.
        """
        settings = settings or self._settings
        optimizer = self._optimizer_settings(settings)
        self._prepare_reference(settings, step)

        # Pack
        packed = pack_pairs(pairs, settings, longest=self._longest, layout=self._layout, closing=self.closing_tokens)

        # Forward and loss
        self.optimizer.clear()
        metrics = TokenMetrics(self._gather)

        def loss_of(inputs: MicrobatchInputs, reference: Tensor | None) -> Tensor:
            terms = self._pair_terms(inputs, packed, settings, reference)
            metrics.add(terms.metrics)
            return terms.loss.sum() / packed.num_pairs

        losses = self._add_gradients(packed.batch, loss_of, metrics, reference_of=self._reference_of(packed, settings))

        # Update
        self._clock.enter("optimizer")
        loss = self._total(losses)
        result = self._apply_gradient(loss, optimizer)
        self._clock.enter("other")
        common = self._step_metrics(
            result, optimizer, packed.batch, num_tokens=packed.num_tokens, num_sequences=2 * packed.num_pairs
        )
        return metrics.read() | self._router_loss.end_step(skipped=result.skipped) | {"loss": loss} | common

    @abstractmethod
    def _optimizer_settings(self, settings: PolicySettings) -> OptimizerSettings:
        """Return the optimizer settings of this kind of step."""

    def _prepare_reference(self, settings: PolicySettings, step: int) -> None:
        """Make the reference of step `step` available, where the loss needs one."""

    def _reference_of(self, packed: PackedPairs, settings: PolicySettings) -> ReferenceOf | None:
        """Return what computes the reference's part of a loss; None where the loss needs none."""
        return None

    @abstractmethod
    def _pair_terms(
        self, inputs: MicrobatchInputs, packed: PackedPairs, settings: PolicySettings, reference: Tensor | None
    ) -> LossTerms:
        """Return loss and metrics of each pair of a microbatch, [pairs], from the reference's part."""


class DpoTrainer(PreferenceTrainer):
    """Trains a model to prefer the chosen responses, relative to a reference model (DPO or IPO)."""

    kind: ClassVar[TrainerKind] = "dpo"
    reference: ReferenceModel

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
            total_steps: planned number of steps.
            reference: reference model; by default `model` as it is before the first step.
            initial: loads version 0 again, for when it is needed as the reference.
            clock: records the phases of each step.
            parallel: see `Trainer`.
        """
        super().__init__(
            model,
            settings,
            settings.dpo.optimizer,
            total_steps=total_steps,
            clock=clock,
            reference=reference_model(model, initial, reference, parallel),
            parallel=parallel,
        )

    def _optimizer_settings(self, settings: PolicySettings) -> OptimizerSettings:
        return settings.dpo.optimizer

    def _prepare_reference(self, settings: PolicySettings, step: int) -> None:
        if not self.optimizer.num_steps:
            self.reference.begin(step - 1)
        if settings.dpo.use_reference:
            self.reference.prepare(step, required_by="policy.dpo.use_reference = true")

    def _reference_of(self, packed: PackedPairs, settings: PolicySettings) -> ReferenceOf | None:
        if not settings.dpo.use_reference:
            return None
        return lambda model, inputs: self._response_logprobs(model, inputs, packed)[0]

    def _pair_terms(
        self, inputs: MicrobatchInputs, packed: PackedPairs, settings: PolicySettings, reference: Tensor | None
    ) -> LossTerms:
        sums, counts = self._response_logprobs(self._model, inputs, packed)
        of_reference = (None, None) if reference is None else (reference[:, 0], reference[:, 1])
        pairs = Pairs(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1], *of_reference)
        if settings.dpo.loss == "ipo":
            return ipo(pairs, beta=settings.dpo.beta)
        return dpo(pairs, beta=settings.dpo.beta, label_smoothing=settings.dpo.label_smoothing)

    def _response_logprobs(
        self, model: PreTrainedModel, inputs: MicrobatchInputs, packed: PackedPairs
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and number of tokens of each response of a microbatch, both [pairs, 2]."""
        chunk_tokens = self._settings.memory.logprob_chunk_tokens
        logprobs, _ = token_logprobs(model, inputs, chunk_tokens=chunk_tokens, keeps_probabilities=self._one_at_a_time)
        numbers, count = _number_responses(packed, inputs)
        sequence = torch.from_numpy(numbers).to(logprobs.device)
        sums = torch.zeros(count, dtype=torch.float64, device=logprobs.device)
        sums = sums.index_add(0, sequence, logprobs.double())
        return sums.float().view(-1, 2), torch.bincount(sequence, minlength=count).view(-1, 2)


class RewardModelTrainer(PreferenceTrainer):
    """Trains a model with one output to score chosen responses above rejected ones."""

    kind: ClassVar[TrainerKind] = "reward_model"
    closing_tokens: ClassVar[int] = 1
    """A score is read at the last token of a response, which is a model input only if another token follows."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        *,
        total_steps: int,
        clock: PhaseClock | None = None,
        parallel: ParallelModel | None = None,
    ) -> None:
        """Start with a fresh optimizer; `model` has a layer `score`, see `load_model`."""
        super().__init__(
            model, settings, settings.reward_model.optimizer, total_steps=total_steps, clock=clock, parallel=parallel
        )

    def _optimizer_settings(self, settings: PolicySettings) -> OptimizerSettings:
        return settings.reward_model.optimizer

    def _pair_terms(
        self, inputs: MicrobatchInputs, packed: PackedPairs, settings: PolicySettings, reference: Tensor | None
    ) -> LossTerms:
        scores = self._scores(inputs, packed)
        return bradley_terry(scores[:, 0], scores[:, 1], center=settings.reward_model.center_coefficient)

    def _scores(self, inputs: MicrobatchInputs, packed: PackedPairs) -> Tensor:
        """Return the scores of a microbatch's responses, float32 [pairs, 2]."""
        numbers, count = _number_responses(packed, inputs)
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        assert len(last) == count
        slots = inputs.source.index_select(0, torch.from_numpy(last).to(inputs.source.device))
        return self._score(inputs, slots).float().view(-1, 2)

    def _output_sum(self, model: PreTrainedModel, inputs: MicrobatchInputs) -> Tensor:
        return self._score(inputs, inputs.source).sum()

    def _score(self, inputs: MicrobatchInputs, slots: Tensor) -> Tensor:
        """Return the scores read at `slots` of a microbatch, [N, 1]."""
        share = None if inputs.share is None else inputs.share.select(slots)

        def compute() -> Tensor:
            hidden: Tensor = self._model.base_model(**model_arguments(self._model, inputs)).last_hidden_state
            own = slots if share is None else share.slots
            scores: Tensor = self._model.score(hidden.flatten(0, 1).index_select(0, own))
            return scores

        scores = compute() if self._parallel is None else self._parallel.compute(compute)
        return scores if share is None else share.join(scores)


def _number_responses(packed: PackedPairs, inputs: MicrobatchInputs) -> tuple[Index, int]:
    """Return the response of each token of a microbatch, int64 [N], and the number of responses.

    Responses are numbered from 0; those of a pair are adjacent.
    """
    found, sequence = np.unique(packed.sequence[inputs.tokens], return_inverse=True)
    return sequence.astype(np.int64), len(found)
