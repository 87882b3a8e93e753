"""Estimates of the divergence KL(trained || reference), one token at a time, and their use as a loss.

An estimate may be right in value and wrong in gradient: what a loss needs is the second. With
``d = log p - log q`` (trained less reference) and tokens sampled from the trained weights:

| estimate   | value            | unbiased | its gradient averages to                                           |
|------------|------------------|----------|--------------------------------------------------------------------|
| `k1`       | d                | yes      | 0: as a loss it does nothing but add noise; for rewards only       |
| `k2`       | d^2 / 2          | no       | that of KL(trained || reference): right                            |
| `k3`       | exp(-d) - 1 + d  | yes      | that of KL(reference || trained): the other direction              |
| `unbiased` | r k3             | yes      | that of KL(trained || reference), for tokens of older weights too  |

with ``r = exp(logprobs - rollout_logprobs)``, through which `unbiased` is differentiated. For tokens that older weights
sampled, only `unbiased` keeps what the table says.
(k1 to k3: Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html; `unbiased`:
DeepSeek-V3.2, arXiv:2512.02556, equation 7; the gradients: arXiv:2506.09477.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from starling.algo.loss.terms import Terms, Tokens, log_ratio

KlKind = Literal["k1", "k2", "k3", "unbiased"]


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ``d`` of each token: unbiased, of high variance, negative for many tokens. Shapes as for `kl_k3`."""
    return log_ratio(logprobs, reference_logprobs)


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ``d^2 / 2`` of each token: never negative, slightly biased, right in its gradient. Shapes as `kl_k3`."""
    return 0.5 * log_ratio(logprobs, reference_logprobs).square()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d`` of each token: never negative, unbiased, of low variance.

    The penalty of GRPO (DeepSeekMath, arXiv:2402.03300, equation 4).

    Args:
        logprobs: of the trained tokens under the trained weights, any shape; differentiable.
        reference_logprobs: of the same tokens under the reference, same shape.
    """
    difference = log_ratio(reference_logprobs, logprobs)
    # expm1 keeps the digits where the two models hardly differ.
    return torch.expm1(difference) - difference


def kl_unbiased(logprobs: Tensor, reference_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return ``r k3`` of each token: unbiased in value and gradient whichever weights sampled. Shapes as `kl_k3`."""
    return log_ratio(logprobs, rollout_logprobs).exp() * kl_k3(logprobs, reference_logprobs)


def kl_loss(tokens: Tokens, reference_logprobs: Tensor, *, kind: KlKind = "k3") -> Terms:
    """Return an estimate of the divergence from the reference as a loss, to be added with a coefficient.

    Metrics: `kl_reference`, by k3 whatever the kind, so that runs can be compared.

    Args:
        tokens: of one microbatch.
        reference_logprobs: float32 [N], of the same tokens under the reference; detached.
        kind: see the table above.

    Raises:
        ValueError: there is no such kind.
    """
    match kind:
        case "k1":
            loss = kl_k1(tokens.logprobs, reference_logprobs)
        case "k2":
            loss = kl_k2(tokens.logprobs, reference_logprobs)
        case "k3":
            loss = kl_k3(tokens.logprobs, reference_logprobs)
        case "unbiased":
            loss = kl_unbiased(tokens.logprobs, reference_logprobs, tokens.rollout_logprobs)
        case _:
            raise ValueError(f"kind is {kind!r}: the estimates are k1, k2, k3 and unbiased")
    return Terms(loss, {"kl_reference": kl_k3(tokens.logprobs.detach(), reference_logprobs)})
