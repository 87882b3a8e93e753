"""Supervised fine-tuning: one step turns examples into a new weight version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.sft import sft_loss
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.core.phases import PhaseClock
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.data.packing import MicrobatchInputs, PromptBlock, check_lengths, pack_sequences
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.metrics.tokens import TokenMetrics
from starling.policy.train.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.policy.train.parallel.apply import ParallelModel
else:
    PreTrainedModel = torch.nn.Module


class SftTrainer(Trainer):
    """Trains a model on the responses of examples; prompts are context only."""

    kind: ClassVar[TrainerKind] = "sft"

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        *,
        total_steps: int,
        clock: PhaseClock | None = None,
        parallel: ParallelModel | None = None,
    ) -> None:
        """Start with a fresh optimizer; see `Trainer`."""
        super().__init__(
            model, settings, settings.sft.optimizer, total_steps=total_steps, clock=clock, parallel=parallel
        )

    def step(self, examples: Sequence[SftExample], settings: PolicySettings | None = None) -> dict[str, float]:
        """Make the next version from `examples`; every response token has the same weight.

        Args:
            examples: those of the step.
            settings: of this step; by default those of the trainer.

        Returns:
            The metrics: ``loss`` and ``entropy`` (nats per response token), and those of every step. ``num_tokens``
            counts response tokens.

        Raises:
            ConfigError: there are no examples, or one is longer than the model's context.
        """
        if not examples:
            raise ConfigError("a supervised step has no examples: there is nothing to train")
        optimizer = (settings or self._settings).sft.optimizer
        chunk_tokens = self._settings.memory.logprob_chunk_tokens

        # Pack
        ends = np.cumsum([len(example.response_ids) for example in examples]).tolist()
        num_tokens, starts = ends[-1], [0, *ends[:-1]]
        blocks = [
            PromptBlock(example.prompt_ids, ((start, end),))
            for example, start, end in zip(examples, starts, ends, strict=True)
        ]
        token_ids = np.concatenate([example.response_ids for example in examples])
        check_lengths(blocks, self._longest)
        batch = pack_sequences(
            blocks,
            token_ids,
            self._settings.tokens_per_microbatch,
            layout=self._layout,
            share=self._settings.share_prompts,
        )

        # Forward and loss
        self.optimizer.clear()
        metrics = TokenMetrics(self._gather)

        def loss_of(inputs: MicrobatchInputs, _: Any) -> Tensor:
            logprobs, entropy = token_logprobs(
                self._model, inputs, chunk_tokens=chunk_tokens, keeps_probabilities=self._one_at_a_time
            )
            metrics.add({"entropy": entropy})
            return token_mean(sft_loss(logprobs), num_tokens)

        losses = self._add_gradients(batch, loss_of, metrics)

        # Update
        self._clock.enter("optimizer")
        loss_sum = self._total(losses)
        result = self._apply_gradient(loss_sum, optimizer)
        self._clock.enter("other")
        return {
            "loss": loss_sum,
            **metrics.read(),
            **self._router_loss.end_step(skipped=result.skipped),
            **self._step_metrics(result, optimizer, batch, num_tokens=num_tokens, num_sequences=len(examples)),
        }
