"""Interface of a loss: its arguments and results, and sums over a completion that some losses need.

A loss is a function ``loss(tokens: Tokens, *, option=default, ...) -> LossTerms``. It returns the loss of each trained
token; the weight of a token in its step is computed elsewhere (`starling.algo.loss.aggregate`), so the same loss works
for any split of the step over microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""The logarithm of a ratio is clamped to +-20, so that a single token cannot overflow to infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The trained tokens of one microbatch: N tokens of S whole completions, in any order."""

    logprobs: Tensor
    """float32 [N], under the weights that are trained; the only differentiable input."""
    old_logprobs: Tensor
    """float32 [N], the denominator of the importance ratio: those of the rollout, or those of the weights at the start
    of the step (decoupled PPO); detached."""
    rollout_logprobs: Tensor
    """float32 [N], at sampling; detached."""
    advantages: Tensor
    """float32 [N], detached."""
    sequence: Tensor
    """int64 [N]: the completion of each token, from 0 to S - 1."""
    num_sequences: int
    """S; a completion may have no trained token."""


class LossTerms(NamedTuple):
    """The loss and the metrics of each token."""

    loss: Tensor
    """float32 [N], differentiable in `Tokens.logprobs`."""
    metrics: dict[str, Tensor]
    """float32 [N] each, detached; reduced by their mean over trained tokens, or by their maximum if the name ends in
    `_max`."""


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Check how far below and above 1 a ratio may count.

    Raises:
        ValueError: a bound is negative or NaN.
    """
    if not (clip_low >= 0.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}: both must be 0 or more")


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """Return for each token the sum of `values` over its completion: [N] to [N], differentiable.

    Summed in double precision, because a completion may have tens of thousands of tokens whose terms cancel.
    `index_add` and `index_select` are each other's derivative and run in the order of the tokens on the CPU, so that
    both passes give the same bits every time; indexing with brackets would not (its derivative adds in parallel).
    """
    sums = values.new_zeros(tokens.num_sequences, dtype=torch.float64)
    sums = sums.index_add(0, tokens.sequence, values.double())
    return sums.index_select(0, tokens.sequence).to(values.dtype)


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Return for each token the mean of `values` over its completion: [N] to [N], differentiable.

    The mean goes over the trained tokens only, each weighing the same. See `sequence_sum`.
    """
    counts = sequence_sum(torch.ones_like(values, requires_grad=False), tokens)
    return sequence_sum(values, tokens) / counts


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``logprobs - old_logprobs`` clamped to +-`MAX_LOG_RATIO`; the same shape, differentiable.

    Beyond the bound the derivative is 0.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(log_ratios: Tensor) -> dict[str, Tensor]:
    """Return the metrics of every loss with importance ratios, from the clamped logarithms of the ratios, [N].

    `ratio_max`, the ratio itself; `approx_kl`, the k3 estimate of KL(old policy || trained policy), ``r - 1 - log r``
    (Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html).
    """
    logs = log_ratios.detach()
    # expm1 keeps precision where the two policies hardly differ.
    return {"ratio_max": logs.exp(), "approx_kl": torch.expm1(logs) - logs}
