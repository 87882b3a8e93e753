"""Clipped policy loss with one importance ratio for a whole completion: the product of the ratios of its tokens."""

from __future__ import annotations

import torch

from starling.algo.loss.terms import (
    MAX_LOG_RATIO,
    LossTerms,
    Tokens,
    check_clip_bounds,
    log_ratio,
    ratio_metrics,
    sequence_sum,
)


def sequence_clip(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossTerms:
    """Return each token's share of the clipped surrogate loss of its completion.

    With ``s = exp(sum over the completion of logprobs - old_logprobs)``, a completion of n tokens has the loss
    ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``: PPO's (arXiv:1707.06347, equation 7) where a completion is
    one action, as RLOO takes it (arXiv:2402.14740, section 2.2; the form of TRL's `RLOOTrainer`). The value of a
    token is an n-th of it, its derivative by ``log p_t`` is ``-s A``, or 0 where the bound decides, so that with
    weights by `sequence_mean_token_sum` loss and gradient of a step are exactly those of the mean over completions.

    s varies with the length: the bounds, made for one token, are exceeded by nearly all long completions of older
    weights. `starling.algo.loss.ppo.ppo_clip` with a ratio for each token has no such dependence.

    Metrics: `ratio_max`, of completions; `approx_kl`, of tokens; `clip_fraction`, the tokens of completions that a
    bound decides.

    Args:
        tokens: of one microbatch, completions whole.
        clip_low: how far below 1 the ratio of a completion may count.
        clip_high: how far above 1 the ratio of a completion may count.

    Raises:
        ValueError: a bound is negative.
    """
    check_clip_bounds(clip_low, clip_high)
    logprobs = tokens.logprobs
    log_product = sequence_sum(logprobs.detach() - tokens.old_logprobs, tokens)
    ratio = log_product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    bounded = clipped < unclipped
    fixed = bounded | (log_product.abs() > MAX_LOG_RATIO)
    counts = sequence_sum(torch.ones_like(ratio), tokens)
    slope = torch.where(fixed, 0.0, -unclipped)
    # The added term is exactly 0; only its derivative counts.
    loss = -torch.minimum(unclipped, clipped) / counts + slope * (logprobs - logprobs.detach())
    metrics = ratio_metrics(log_ratio(logprobs, tokens.old_logprobs))
    metrics["ratio_max"] = ratio
    metrics["clip_fraction"] = bounded.to(ratio.dtype)
    return LossTerms(loss, metrics)
