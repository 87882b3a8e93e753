"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from starling.algo.loss.terms import LossTerms, Tokens, log_ratio, ratio_metrics


def reinforce(tokens: Tokens) -> LossTerms:
    """Return ``-A logprobs`` of each token (Williams, 1992, https://doi.org/10.1007/BF00992696, section 4).

    Unbiased only for tokens sampled by the trained weights; for others add a correction
    (`starling.algo.loss.correct`) or use `starling.algo.loss.aipo`.

    Metrics: `ratio_max` and `approx_kl` against `old_logprobs`, which the loss does not use: they measure how far the
    step is from that assumption.
    """
    log_ratios = log_ratio(tokens.logprobs, tokens.old_logprobs)
    return LossTerms(-tokens.advantages * tokens.logprobs, ratio_metrics(log_ratios))
