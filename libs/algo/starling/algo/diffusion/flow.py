"""Rectified flow, the path from data to noise that a velocity model is trained on.

    x(sigma) = (1 - sigma) x0 + sigma e,    0 <= sigma <= 1,    v = dx/dsigma = e - x0

(Flow Matching, arXiv:2210.02747; Rectified Flow, arXiv:2209.03003.) From a state and its velocity follow the clean
sample, the noise, and the score of the distribution at sigma. Every function takes tensors [B, ...] and noise levels
[B], and keeps the type of the tensors.
"""

from __future__ import annotations

from torch import Tensor


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` [B] in the shape [B, 1, ...] and type of `like` [B, ...], to be multiplied with it."""
    return values.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))


def noised(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return the state between `clean` and `noise` at `sigma`."""
    level = per_sample(sigma, clean)
    return (1.0 - level) * clean + level * noise


def clean_of(state: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean sample that `velocity` predicts, ``x - sigma v``."""
    return state - per_sample(sigma, state) * velocity


def noise_of(state: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Return the noise that `velocity` predicts, ``x + (1 - sigma) v``; the score is ``-noise / sigma``."""
    return state + (1.0 - per_sample(sigma, state)) * velocity


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return the velocity of classifier-free guidance (arXiv:2207.12598): ``u + scale (c - u)``.

    The unconditional half gets no gradient, as in FlowGRPO.
    """
    base = unconditional.detach()
    return base + scale * (conditional - base)
