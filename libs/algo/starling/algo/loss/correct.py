"""Off-policy corrections: detached factors on the loss of each token.

The rollout samples with one set of log-probabilities (its own kernels, perhaps older weights) and the trainer takes
others for the denominator of its ratio (`old = "proximal"`). The importance weight ``exp(old - rollout)`` corrects the
difference; a correction limits its variance. Factors multiply, so corrections can be combined. Under
`old = "rollout"` the weights are exactly 1, because the ratio of the loss already starts at the rollout.

| known as                | correction                                            | from                              |
|-------------------------|-------------------------------------------------------|-----------------------------------|
| TIS                     | ``truncate``, ``token``, high 2                       | fengyao.notion.site/off-policy-rl |
| icepop                  | ``mask``, ``token``, low 0.5, high 5                  | ringtech.notion.site/icepop       |
| MIS                     | ``mask``, ``sequence``                                | richardli.xyz/rl-collapse         |
| geometric MIS           | ``mask``, ``geometric``, bounds close to 1            | the same                          |
| decoupled PPO           | ``mask``, ``token``, high 5                           | arXiv:2505.24298, equation 5      |
| off-policy sequence mask| ``sequence_mask``                                     | arXiv:2512.02556, equation 9      |
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from starling.algo.algorithm import Correction
from starling.algo.loss.terms import MAX_LOG_RATIO, Tokens, sequence_mean, sequence_sum


def correct(tokens: Tokens, corrections: Iterable[Correction]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the product of the corrections' factors, float32 [N], and their metrics; both detached.

    No corrections are a factor of 1.
    """
    product = torch.ones_like(tokens.old_logprobs)
    metrics: dict[str, Tensor] = {}
    for correction in corrections:
        if correction.kind == "sequence_mask":
            factor, own = sequence_mask(tokens, correction)
        else:
            factor, own = importance_weight(tokens, correction)
        product = product * factor
        metrics |= own
    return product, metrics


@torch.no_grad()
def importance_weight(tokens: Tokens, correction: Correction) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``w = exp(old - rollout)``, truncated or masked, of each token or of its whole completion.

    ``truncate``: ``min(w, high)``, biased but never without a gradient. ``mask``: w where ``low <= w <= high``, else 0.
    Level ``token``: w of each token; ``sequence``: the product over the completion, the weight that is unbiased;
    ``geometric``: its root by the number of tokens, which does not grow with the length.

    Metrics, with the kind and the level in front (`mask_token_...`): `..._ratio_max`, w before the bound;
    `..._fraction`, the tokens that are truncated or masked.
    """
    difference = tokens.old_logprobs - tokens.rollout_logprobs
    if correction.level == "sequence":
        difference = sequence_sum(difference, tokens)
    elif correction.level == "geometric":
        difference = sequence_mean(difference, tokens)
    weight = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction.kind == "truncate":
        affected = weight > correction.high
        factor = weight.clamp(max=correction.high)
    else:
        affected = (weight < correction.low) | (weight > correction.high)
        factor = weight.masked_fill(affected, 0.0)
    name = f"{correction.kind}_{correction.level}"
    return factor, {f"{name}_ratio_max": weight, f"{name}_fraction": affected.to(weight.dtype)}


@torch.no_grad()
def sequence_mask(tokens: Tokens, correction: Correction) -> tuple[Tensor, dict[str, Tensor]]:
    """Return 0 for completions with a negative advantage that are unlikely under the trained weights, else 1.

    A completion is dropped if ``mean(rollout_logprobs - logprobs) > high`` (DeepSeek-V3.2, arXiv:2512.02556, equation
    9): with the present weights, so that both staleness and the rollout's arithmetic count. A model learns from its own
    mistakes; those of a different model mislead it.

    Metrics: `sequence_mask_fraction`, the tokens that are masked.
    """
    drift = sequence_mean(tokens.rollout_logprobs - tokens.logprobs, tokens)
    masked = (tokens.advantages < 0.0) & (drift > correction.high)
    return (~masked).to(drift.dtype), {"sequence_mask_fraction": masked.to(drift.dtype)}
