"""GRPO's policy loss: the clipped importance ratio of PPO with group-relative advantages."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""The logarithm of the ratio is held within +-20, so that one odd token cannot overflow to infinity."""


class GrpoTerms(NamedTuple):
    """The loss and the metrics of each token; all have the shape of the log-probabilities."""

    loss: Tensor
    """Differentiable in the trained log-probabilities."""
    ratio: Tensor
    """Detached importance ratio; its greatest value is the metric `ratio_max`."""
    clipped: Tensor
    """Detached bool: the clipped branch decides this token, so its gradient is 0; its mean is `clip_fraction`."""
    approx_kl: Tensor
    """Detached k3 estimate of KL(sampling policy || trained policy); its mean is `approx_kl`."""


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> GrpoTerms:
    """Return the clipped surrogate loss of each token.

    With ``r = exp(logprobs - old_logprobs)``: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``
    (DeepSeekMath, arXiv:2402.03300, equation 3; PPO, arXiv:1707.06347, equation 7; unequal bounds as in DAPO,
    arXiv:2503.14476, equation 10).

    Args:
        logprobs: of the trained tokens under the trained weights, any shape; the only differentiable input.
        old_logprobs: of the same tokens when they were sampled, same shape.
        advantages: of each token's completion, same shape.
        clip_low: how far below 1 the ratio may count.
        clip_high: how far above 1 the ratio may count.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.minimum(unclipped, clipped)
    with torch.no_grad():
        is_clipped = clipped < unclipped
        approx_kl = torch.expm1(log_ratio) - log_ratio
    return GrpoTerms(loss, ratio.detach(), is_clipped, approx_kl)
