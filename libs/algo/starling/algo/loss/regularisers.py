"""Regularisers that settings add to a policy loss: KL divergence from a reference, entropy, likelihood of successes.

Estimates of the divergence KL(trained || reference) per token may be right in value and wrong in gradient; a loss needs
the second. With ``d = log p - log q`` (trained less reference) and tokens sampled from the trained weights:

| estimate   | value            | unbiased | its gradient averages to                                           |
|------------|------------------|----------|--------------------------------------------------------------------|
| `k1`       | d                | yes      | 0: as a loss it only adds noise; for rewards only                  |
| `k2`       | d^2 / 2          | no       | that of KL(trained || reference): right                            |
| `k3`       | exp(-d) - 1 + d  | yes      | that of KL(reference || trained): the other direction              |
| `unbiased` | r k3             | yes      | that of KL(trained || reference), for tokens of older weights too  |

with ``r = exp(logprobs - rollout_logprobs)``, through which `unbiased` is differentiated. For tokens sampled by older
weights, only `unbiased` has the properties of the table.
(k1 to k3: Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html; `unbiased`:
DeepSeek-V3.2, arXiv:2512.02556, equation 7; the gradients: arXiv:2506.09477.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from starling.algo.loss.terms import LossTerms, Tokens, log_ratio

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
    # expm1 keeps precision where the two models hardly differ.
    return torch.expm1(difference) - difference


def kl_unbiased(logprobs: Tensor, reference_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return ``r k3`` of each token: unbiased in value and gradient for any sampling weights. Shapes as `kl_k3`."""
    return log_ratio(logprobs, rollout_logprobs).exp() * kl_k3(logprobs, reference_logprobs)


def kl_loss(tokens: Tokens, reference_logprobs: Tensor, *, kind: KlKind = "k3") -> LossTerms:
    """Return an estimate of the divergence from the reference as a loss term.

    Metrics: `kl_reference`, always by k3, so that runs can be compared.

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
    return LossTerms(loss, {"kl_reference": kl_k3(tokens.logprobs.detach(), reference_logprobs)})


def entropy_bonus(entropies: Tensor) -> LossTerms:
    """Return minus the entropy of the trained policy at each token, as a loss term.

    (A3C, arXiv:1602.01783, section 4; PPO, arXiv:1707.06347, equation 9.)

    Metrics: `entropy`, in nats.

    Args:
        entropies: float32 [N], ``-sum over the vocabulary of p log p`` at each trained token; differentiable.
    """
    return LossTerms(-entropies, {"entropy": entropies.detach()})


def positive_nll(tokens: Tokens) -> LossTerms:
    """Return ``-logprobs`` of the tokens whose advantage is above 0, and 0 for the others.

    The positive-example loss of VAPO (arXiv:2504.05118, section 4.3), which is added to the policy loss with a
    coefficient (0.1 there). VAPO divides by the tokens of the positive completions alone; here it shares the weights
    of the policy loss, so the coefficient means the same whatever part of a step went well.

    Metrics: `positive_nll`, the loss itself; `positive_fraction`, the tokens with an advantage above 0.
    """
    positive = tokens.advantages > 0.0
    loss = torch.where(positive, -tokens.logprobs, 0.0)
    return LossTerms(loss, {"positive_nll": loss.detach(), "positive_fraction": positive.to(loss.dtype)})
