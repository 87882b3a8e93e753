"""GSPO: one importance ratio for a whole completion."""

from __future__ import annotations

import torch

from starling.algo.loss.terms import (
    MAX_LOG_RATIO,
    LossTerms,
    Tokens,
    check_clip_bounds,
    log_ratio,
    ratio_metrics,
    sequence_mean,
)


def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossTerms:
    """Return the clipped surrogate loss of each token under the ratio of its completion.

    With ``s = exp(mean over the completion of logprobs - old_logprobs)``:
    ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` (GSPO, arXiv:2507.18071, equations 5 and 7; the bounds are
    those of its experiments). Each token carries it as ``s_t = sg(s) p_t / sg(p_t)`` (GSPO-token, equations 13 and 14):
    its value is s, its derivative by ``log p_t`` is s. With one advantage per completion, and weights by
    `sequence_mean_token_mean`, loss and gradient are exactly those of GSPO; advantages may also differ by token.

    Metrics: `ratio_max`, of completions; `approx_kl`, of tokens; `clip_fraction`, the tokens of completions that a
    bound decides, so that their gradient is 0. With bounds this narrow it is normal that a tenth of the tokens or
    more are clipped, where PPO clips a few in a thousand.

    Args:
        tokens: of one microbatch, completions whole.
        clip_low: how far below 1 the ratio of a completion may count.
        clip_high: how far above 1 the ratio of a completion may count.

    Raises:
        ValueError: a bound is negative.
    """
    check_clip_bounds(clip_low, clip_high)
    logprobs = tokens.logprobs
    log_mean = sequence_mean(logprobs.detach() - tokens.old_logprobs, tokens)
    # The value is exactly log_mean, because the added term is exactly 0; only its derivative is the token's own.
    log_ratios = (log_mean + (logprobs - logprobs.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratios.exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    metrics = ratio_metrics(log_ratio(logprobs, tokens.old_logprobs))
    metrics["ratio_max"] = ratio.detach()
    metrics["clip_fraction"] = (clipped < unclipped).to(ratio.dtype)
    return LossTerms(-torch.minimum(unclipped, clipped), metrics)
