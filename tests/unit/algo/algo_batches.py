"""Ragged batches for the tests of losses, and the gradient of a step over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from starling.algo.loss.terms import LossTerms, Tokens

RAGGED = [[1], [1, 5, 0, 33], [7, 1, 1, 2], [64, 1, 0, 3, 12]]
"""Tokens of each completion: one, none, and very different numbers."""


def make_tokens(lengths: Sequence[int], seed: int = 0, *, new: float = 0.3, old: float = 0.2) -> Tokens:
    """Return tokens of completions; `new` and `old` bound the change of log-probabilities since the rollout."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    rollout = -3.0 * torch.rand(num_tokens, generator=generator)
    old_logprobs = rollout + old * torch.randn(num_tokens, generator=generator)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Tokens(
        logprobs=(old_logprobs + new * torch.randn(num_tokens, generator=generator)).requires_grad_(),
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout,
        advantages=torch.randn(len(lengths), generator=generator)[sequence],
        sequence=sequence,
        num_sequences=len(lengths),
    )


def on_policy(tokens: Tokens) -> Tokens:
    """Return the same tokens as if sampled by the trained weights."""
    now = tokens.logprobs.detach()
    return replace(tokens, old_logprobs=now.clone(), rollout_logprobs=now.clone())


def gradient(terms: LossTerms, tokens: Tokens, weights: Tensor | None = None) -> Tensor:
    """Return the derivative of the weighted sum of losses with respect to each log-probability."""
    total = terms.loss.sum() if weights is None else (terms.loss * weights).sum()
    (result,) = torch.autograd.grad(total, tokens.logprobs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(tokens.logprobs) if result is None else result


def rows(tokens: Tokens) -> list[list[tuple[float, float, float, float]]]:
    """Return for each completion its tokens: new, old and rollout log-probability, and advantage, as doubles."""
    table: list[list[tuple[float, float, float, float]]] = [[] for _ in range(tokens.num_sequences)]
    columns = (tokens.logprobs, tokens.old_logprobs, tokens.rollout_logprobs, tokens.advantages)
    for owner, *values in zip(tokens.sequence.tolist(), *(column.tolist() for column in columns), strict=True):
        table[owner].append(tuple(values))  # type: ignore[arg-type]
    return table
