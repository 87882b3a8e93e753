"""AIPO: one-sided truncated importance weights for training on stale completions."""

from __future__ import annotations

from starling.algo.loss.terms import LossTerms, Tokens, log_ratio, ratio_metrics


def aipo(tokens: Tokens, *, max_ratio: float = 2.0) -> LossTerms:
    """Return ``-sg(min(r, max_ratio)) A logprobs`` of each token, with ``r = exp(logprobs - old_logprobs)``.

    The policy gradient under the truncated importance weight of LlamaRL (arXiv:2505.24034, section 6): the weight
    corrects for tokens that the rollouts' older weights sampled too often or too rarely, and the bound limits its
    variance. There is no trust region and so no lower bound.

    This is not ``-min(r, max_ratio) A``, differentiated through the minimum, as in some systems: both have the
    same gradient ``-r A`` by ``log p`` below the bound, but above it the latter has none, which drops tokens that
    became much likelier, independent of their advantage. Here they keep the weight `max_ratio`.

    Metrics: `ratio_max`, before truncation; `approx_kl`; `clip_fraction`, the tokens whose weight is truncated (their
    gradient is not 0).

    Args:
        tokens: of one microbatch; `old_logprobs` should be those of the rollout.
        max_ratio: maximum weight.

    Raises:
        ValueError: `max_ratio` is not above 0.
    """
    if not max_ratio > 0.0:
        raise ValueError(f"max_ratio is {max_ratio}: it must be above 0")
    log_ratios = log_ratio(tokens.logprobs, tokens.old_logprobs).detach()
    ratio = log_ratios.exp()
    metrics = ratio_metrics(log_ratios)
    metrics["clip_fraction"] = (ratio > max_ratio).to(ratio.dtype)
    return LossTerms(-ratio.clamp(max=max_ratio) * tokens.advantages * tokens.logprobs, metrics)
