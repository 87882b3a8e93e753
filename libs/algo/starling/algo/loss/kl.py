"""Estimates of the divergence from a reference model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from starling.algo.loss.grpo import MAX_LOG_RATIO


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(trained || reference) of each token.

    ``exp(d) - d - 1`` with ``d = reference_logprobs - logprobs``: never negative, unbiased for tokens sampled from the
    trained policy, and of low variance (Schulman, "Approximating KL divergence", 2020,
    http://joschu.net/blog/kl-approx.html; DeepSeekMath, arXiv:2402.03300, equation 4). Its mean over the trained
    tokens is the metric `kl_reference`.

    Args:
        logprobs: of the trained tokens under the trained weights, any shape; differentiable.
        reference_logprobs: of the same tokens under the reference, same shape.
    """
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits where the two models hardly differ.
    return torch.expm1(difference) - difference
