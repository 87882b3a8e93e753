"""PPO's clipped policy loss, which GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++ and decoupled PPO share.

They differ in the advantages, in the weight of each token in the step, and in `Tokens.old_logprobs`:
see `starling.algo.algorithm.ALGORITHMS`.
"""

from __future__ import annotations

import torch

from starling.algo.loss.terms import LossTerms, Tokens, check_clip_bounds, log_ratio, ratio_metrics


def ppo_clip(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> LossTerms:
    """Return the clipped surrogate loss of each token.

    With ``r = exp(logprobs - old_logprobs)``: ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``
    (PPO, arXiv:1707.06347, equation 7; DeepSeekMath, arXiv:2402.03300, equation 3; unequal bounds as in DAPO,
    arXiv:2503.14476, equation 10). Where r = 1 its gradient is that of REINFORCE.

    `dual_clip` c bounds the remaining case: for A < 0 the loss grows with r without limit, so it is at most ``-c A``
    and has no gradient beyond (arXiv:1912.09729, equation 5, which takes c = 3).

    Metrics: `ratio_max`; `approx_kl`; `clip_fraction`, the tokens that a bound on r decides, so that their gradient
    is 0; with `dual_clip` also `dual_clip_fraction`, those that it decides.

    Args:
        tokens: of one microbatch.
        clip_low: how far below 1 the ratio may count.
        clip_high: how far above 1 the ratio may count.
        dual_clip: maximum ratio where the advantage is negative; 0 for no such bound.

    Raises:
        ValueError: a bound is negative, or `dual_clip` is neither 0 nor above 1.
    """
    check_clip_bounds(clip_low, clip_high)
    if dual_clip and not dual_clip > 1.0:
        raise ValueError(f"dual_clip is {dual_clip}: it must be above 1, or 0 for no bound")
    log_ratios = log_ratio(tokens.logprobs, tokens.old_logprobs)
    ratio = log_ratios.exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    loss = -torch.minimum(unclipped, clipped)
    metrics = ratio_metrics(log_ratios)
    metrics["clip_fraction"] = (clipped < unclipped).to(loss.dtype)
    if dual_clip:
        bound = -dual_clip * tokens.advantages
        bounded = (tokens.advantages < 0.0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["dual_clip_fraction"] = bounded.to(loss.dtype)
    return LossTerms(loss, metrics)
