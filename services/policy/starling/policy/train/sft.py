"""A supervised step: examples become a new weight version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.sft import sft_loss
from starling.common.errors import ConfigError
from starling.policy.core.phases import NullClock, PhaseClock
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import SftExample
from starling.policy.train.data.packing import PromptBlock, check_lengths, pack_sequences, to_tensors
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.memory.setup import optimizer_device
from starling.policy.train.metrics.flops import model_cost, step_flops
from starling.policy.train.model.load import longest_sequence, pair_cost
from starling.policy.train.optim.optimizer import ModelOptimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


class SftTrainer:
    """Trains a model on the responses of examples; the prompts are read, not learnt."""

    def __init__(
        self, model: PreTrainedModel, settings: PolicySettings, *, total_steps: int, clock: PhaseClock | None = None
    ) -> None:
        """Start with a fresh optimizer; `model` is trained in place, and `clock` is told what the time goes into."""
        self._model = model
        self._settings = settings
        self._longest = longest_sequence(model)
        self._pair_cost = pair_cost(model)
        self._clock = clock or NullClock()
        self._cost = model_cost(model)
        where = optimizer_device(model, settings.memory)
        self.descent = ModelOptimizer(model, settings.sft.optimizer, total_steps, where=where)

    def step(self, examples: Sequence[SftExample], settings: PolicySettings | None = None) -> dict[str, float]:
        """Make the next version out of `examples`, every response token weighing the same.

        Args:
            examples: those of the step.
            settings: of this step; by default those that the trainer was made with.

        Returns:
            The metrics: ``loss`` (nats per response token), ``entropy`` (the same), ``grad_norm`` before clipping,
            ``max_grad_norm``, ``learning_rate``, ``skipped_step``, ``num_tokens`` (of responses), ``num_sequences``,
            ``num_microbatches``, ``padding_waste``, ``model_flops``.

        Raises:
            ConfigError: there are no examples, or one is longer than the model's context.
        """
        if not examples:
            raise ConfigError("a supervised step has no examples: there is nothing to train")
        ends = np.cumsum([len(example.response_ids) for example in examples]).tolist()
        starts = [0, *ends[:-1]]
        prompted = [
            PromptBlock(example.prompt_ids, ((start, end),))
            for example, start, end in zip(examples, starts, ends, strict=True)
        ]
        token_ids = np.concatenate([example.response_ids for example in examples])
        check_lengths(prompted, self._longest)
        batch = pack_sequences(prompted, self._settings.tokens_per_microbatch, pair_cost=self._pair_cost)
        optimizer = (settings or self._settings).sft.optimizer
        self.descent.clear()
        parts = []
        for microbatch in batch.plan:
            self._clock.enter("forward")
            inputs = to_tensors(batch, microbatch, token_ids, self._model.dtype, self._model.device)
            chunk_tokens = self._settings.memory.logprob_chunk_tokens
            logprobs, entropy = token_logprobs(self._model, inputs, chunk_tokens=chunk_tokens)
            loss = token_mean(sft_loss(logprobs), ends[-1])
            self._clock.enter("backward")
            torch.autograd.backward(loss)
            parts.append(torch.stack([loss.detach(), entropy.sum() / ends[-1]]))
        self._clock.enter("optimizer")
        loss_sum, entropy_sum = torch.stack(parts).sum(dim=0).tolist()
        applied = self.descent.apply(loss_sum, optimizer)
        self._clock.enter("other")
        return {
            "loss": loss_sum,
            "entropy": entropy_sum,
            "grad_norm": applied.grad_norm,
            "max_grad_norm": optimizer.max_grad_norm,
            "learning_rate": applied.learning_rate,
            "skipped_step": float(applied.skipped),
            "num_tokens": float(ends[-1]),
            "num_sequences": float(len(examples)),
            "num_microbatches": float(len(batch.plan)),
            "padding_waste": batch.padding_waste,
            "model_flops": step_flops(self._cost, batch.lengths, ends[-1]),
        }
