"""CISPO: the importance ratio is clipped as a weight, and every token keeps its gradient."""

from __future__ import annotations

from starling.algo.loss.terms import LossTerms, Tokens, check_clip_bounds, log_ratio, ratio_metrics


def cispo(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossTerms:
    """Return ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs`` of each token.

    ``r = exp(logprobs - old_logprobs)`` and sg stops the gradient (CISPO, MiniMax-M1, arXiv:2506.13585, equations 4
    and 5). PPO's clip removes the gradient of the rare tokens at which reasoning turns, since their ratio leaves the
    bounds first; here they keep it, with a bounded weight.

    The paper sets no lower bound (`clip_low` of 1 is none) and tunes the upper one without giving it; a maximum ratio
    of 5 is used by ScaleRL (arXiv:2510.13786).

    Metrics: `ratio_max`, before clipping; `approx_kl`; `clip_fraction`, the tokens whose ratio is outside the bounds
    (their gradient is not 0).

    Args:
        tokens: of one microbatch.
        clip_low: how far below 1 the weight may be.
        clip_high: how far above 1 the weight may be.

    Raises:
        ValueError: a bound is negative.
    """
    check_clip_bounds(clip_low, clip_high)
    log_ratios = log_ratio(tokens.logprobs, tokens.old_logprobs).detach()
    ratio = log_ratios.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    metrics = ratio_metrics(log_ratios)
    metrics["clip_fraction"] = (weight != ratio).to(ratio.dtype)
    return LossTerms(-weight * tokens.advantages * tokens.logprobs, metrics)
