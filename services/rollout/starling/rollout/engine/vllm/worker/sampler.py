"""Samplers that return log-probabilities under softmax(logits / temperature), and the tokens that truncation kept.

vLLM returns log-probabilities either of the raw logits or after top-p and top-k; training needs those in between. These
samplers divide the logits by the temperature first and then sample at temperature 1: the samples are the same, and the
raw log-probabilities are the ones that training needs.

A request that is truncated asks for more log-probabilities than that of its token, and gets these columns instead of
the most likely tokens:

    [sampled token, its log-probability]  [-1, mass]  [another kept token, 0] ...  [-1, mass] ...

The mass is the logarithm of the sum of the kept tokens' probabilities. vLLM puts the columns of a token into a dict
where it joins two outputs, so columns of the same id have the same value, and the sampled token is not listed again.
`groups.num_logprobs` asks for one more (the second column), or for all (the kept tokens too).

Written for the first model runner of vLLM 0.32 and 0.33; `launch` selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from starling.common.wire.tensors import MAX_KEPT_PER_TOKEN

GREEDY_BELOW: Final = 1e-5
"""vLLM samples greedily at temperatures below this; the log-probabilities are then those of softmax(logits)."""


class TemperedSampler(Sampler):  # type: ignore[misc]
    """A sampler that divides the logits by the temperature before everything else."""

    banned_ids: torch.Tensor | None = None
    """int64 [tokens]: tokens that are never drawn, as if truncated."""
    _is_measured = False
    _kept_logits: torch.Tensor | None = None
    """Logits from which the tokens were drawn, -inf where a token was not kept; of a measured call only."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *arguments: Any, **options: Any
    ) -> Any:
        """Sample a token for each row of `logits`, [rows, vocabulary]."""
        scaled, metadata = _scaled(logits, sampling_metadata, None)
        wanted = metadata.max_num_logprobs or 0
        # Below 0: called by the sampler of drafted tokens, which is not measured.
        if wanted < 1 or metadata.all_greedy or metadata.temperature is None:
            return super().forward(scaled, metadata, *arguments, **options)
        total = scaled.logsumexp(dim=-1)  # the logits are changed in place below
        truncation = self.topk_topp_sampler
        mode, truncation.logprobs_mode, self._is_measured = truncation.logprobs_mode, "processed_logits", True
        try:
            output = super().forward(scaled, replace(metadata, max_num_logprobs=0), *arguments, **options)
        finally:
            truncation.logprobs_mode, self._is_measured = mode, False
        kept, self._kept_logits = self._kept_logits, None
        assert kept is not None, "a batch that is not all greedy is drawn from processed logits"
        tensors = _with_truncation(output.logprobs_tensors, kept, total, metadata.top_k, with_ids=wanted > 1)
        return replace(output, logprobs_tensors=tensors)

    def sample(self, *arguments: Any, **options: Any) -> Any:
        """Sample from processed logits, and keep them for `forward` where it measures."""
        sampled, processed = super().sample(*arguments, **options)
        if not self._is_measured:
            return sampled, processed
        self._kept_logits = processed
        return sampled, None

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


def _with_truncation(
    tensors: LogprobsTensors, kept: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor | None, *, with_ids: bool
) -> LogprobsTensors:
    """Return `tensors` with the columns that the module's docstring describes.

    Args:
        tensors: of the sampled tokens, one column.
        kept: logits of the kept tokens, -inf elsewhere, [rows, vocabulary].
        total: logarithm of the sum of the exponentials of all logits, [rows].
        top_k: of each row, [rows]; None if no row has one. Kept tokens are listed for rows that have one.
        with_ids: list the kept tokens.
    """
    log_mass = (kept.logsumexp(dim=-1) - total)[:, None]
    ids, logprobs = tensors.logprob_token_ids, tensors.logprobs
    ids, logprobs = torch.cat((ids, torch.full_like(ids, -1)), dim=1), torch.cat((logprobs, log_mass), dim=1)
    if with_ids:
        listed = (kept > -torch.inf).scatter_(1, ids[:, :1].long(), False)
        if kept.shape[1] > MAX_KEPT_PER_TOKEN:
            assert top_k is not None, "a request that records kept tokens has a top_k"
            listed &= (top_k < kept.shape[1])[:, None]
        counts = listed.sum(dim=-1)
        rows, tokens = listed.nonzero(as_tuple=True)
        columns = torch.arange(len(rows), device=kept.device) - (counts.cumsum(dim=0) - counts)[rows]
        table = ids.new_full((len(kept), int(counts.max())), -1)
        table[rows, columns] = tokens.to(table.dtype)
        ids = torch.cat((ids, table), dim=1)
        logprobs = torch.cat((logprobs, torch.where(table < 0, log_mass, 0.0)), dim=1)
    return tensors._replace(logprob_token_ids=ids, logprobs=logprobs)


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
