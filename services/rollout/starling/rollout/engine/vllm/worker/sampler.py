"""Samplers that return log-probabilities under softmax(logits / temperature) over the whole vocabulary.

vLLM returns log-probabilities either of the raw logits or after top-p and top-k; training needs those in between. These
samplers divide the logits by the temperature first and then sample at temperature 1: the samples are the same, and the
raw log-probabilities are the ones that training needs.

Written for the first model runner of vLLM 0.32 and 0.33; `launch` selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

GREEDY_BELOW: Final = 1e-5
"""vLLM samples greedily at temperatures below this; the log-probabilities are then those of softmax(logits)."""


class TemperedSampler(Sampler):  # type: ignore[misc]
    """A sampler that divides the logits by the temperature before everything else."""

    banned_ids: torch.Tensor | None = None
    """int64 [tokens]: tokens that are never drawn, as if truncated."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *arguments: Any, **options: Any
    ) -> Any:
        """Sample a token for each row of `logits`, [rows, vocabulary]."""
        scaled, metadata = _scaled(logits, sampling_metadata, None)
        return super().forward(scaled, metadata, *arguments, **options)

    def apply_logits_processors(self, logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Mask the banned tokens; log-probabilities are computed before."""
        return _without(super().apply_logits_processors(logits, *arguments), self.banned_ids)


class TemperedRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """The same for speculative decoding, where a sequence has one row per drafted token and one more."""

    def forward(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> Any:
        """Accept or replace drafted tokens by `logits`, [drafted tokens + sequences, vocabulary]."""
        rows = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
        scaled, sampling = _scaled(logits, sampling_metadata, rows)
        return super().forward(metadata, draft_probs, scaled, sampling)

    def apply_logits_processors(self, logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Mask the banned tokens, drafted or not."""
        return _without(super().apply_logits_processors(logits, *arguments), self.sampler.banned_ids)


def install(runner: Any, banned_ids: Sequence[int] = ()) -> None:
    """Replace the samplers of a model runner; tokens in `banned_ids` are never drawn."""
    runner.sampler = TemperedSampler(runner.sampler.logprobs_mode, runner.sampler.use_fp64_gumbel)
    runner.sampler.banned_ids = torch.tensor(banned_ids, device=runner.device) if banned_ids else None
    if getattr(runner, "rejection_sampler", None) is not None:
        runner.rejection_sampler = TemperedRejectionSampler(runner.sampler, runner.speculative_config, runner.device)


def _without(logits: torch.Tensor, banned_ids: torch.Tensor | None) -> torch.Tensor:
    return logits if banned_ids is None else logits.index_fill_(-1, banned_ids, -torch.inf)


def _scaled(
    logits: torch.Tensor, metadata: SamplingMetadata, rows: torch.Tensor | None
) -> tuple[torch.Tensor, SamplingMetadata]:
    """Return logits divided by each sequence's temperature, and metadata with temperature 1.

    Args:
        logits: [rows, vocabulary].
        metadata: one temperature for each sequence.
        rows: rows of each sequence; None for one.
    """
    temperature = metadata.temperature
    if metadata.all_greedy or temperature is None:
        return logits, metadata
    greedy = temperature < GREEDY_BELOW
    divisor = torch.where(greedy, 1.0, temperature)
    if rows is not None:
        divisor = divisor.repeat_interleave(rows)
    ones = torch.where(greedy, temperature, 1.0)
    return logits.to(torch.float32) / divisor[:, None], replace(metadata, temperature=ones)
