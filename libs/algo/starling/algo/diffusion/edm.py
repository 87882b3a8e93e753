"""EDM sampling with churn, as Cosmos-Predict2 was first trained by reinforcement learning.

Noise levels grow without bound: ``y = x0 + s e`` (EDM, arXiv:2206.00364). A flow model computes them by the change of
variables ``sigma = s / (1 + s)``, ``x = (1 - sigma) y``. A step adds noise first ("churn"), which is the action, and
then follows the probability flow with an exponential integrator of the second order. So the distribution of the next
noised state is a Gaussian around the end of the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from starling.algo.diffusion.flow import per_sample
from starling.algo.diffusion.transitions import Transition


def edm_levels(num_steps: int, *, largest: float = 200.0, smallest: float = 0.01, order: float = 7.0) -> list[float]:
    """Return the ``num_steps + 1`` noise levels of EDM, equation 5: equally spaced in ``s^(1 / order)``.

    Raises:
        ValueError: there is no step, or the levels do not decrease to a positive one.
    """
    if num_steps < 1:
        raise ValueError(f"{num_steps} steps: give 1 or more")
    if not 0.0 < smallest < largest < math.inf:
        raise ValueError(f"noise levels from {largest} to {smallest}: they must decrease to a positive one")
    first, last = largest ** (1.0 / order), smallest ** (1.0 / order)
    return [(first + index / num_steps * (last - first)) ** order for index in range(num_steps + 1)]


def churn_factor(churn: float, num_steps: int) -> float:
    """Return by how much of itself a step raises the noise level first, at most ``sqrt(1.2) - 1``.

    EDM, algorithm 2, divides by the number of levels.
    """
    return min(churn / (num_steps + 1), math.sqrt(1.2) - 1.0)


def to_flow(state: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of the flow and its sigma, of a state [B, ...] at noise levels [B]."""
    sigma = level / (1.0 + level)
    return state * per_sample(1.0 - sigma, state), sigma


def clean_at(state: Tensor, velocity: Tensor, level: Tensor) -> Tensor:
    """Return the clean sample that `velocity`, computed from `to_flow`, predicts: ``(1 - sigma) y - sigma v``."""
    flow_state, sigma = to_flow(state, level)
    return flow_state - per_sample(sigma, state) * velocity


def exponential_step(
    state: Tensor, clean: Tensor, level: Tensor, following: Tensor, before: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Follow the probability flow from `level` to `following`; differentiable in `clean`.

    In ``l = -log s`` the flow is ``dy/dl = clean(l) - y``. With a clean sample that is linear in l through this one and
    the one before (exponential Adams-Bashforth of order two; Hochbruck and Ostermann, "Exponential integrators", 2010,
    section 2.6) it is integrated exactly. The first step takes it as constant.

    Args:
        state: [B, ...], at `level`.
        clean: the clean sample that is predicted there.
        level: float [B].
        following: float [B], below `level` and above 0.
        before: the clean sample and the noise level of the step before, if any.
    """
    width = (level / following).log()
    decay = torch.exp(-width)
    result = per_sample(decay, state) * state + per_sample(1.0 - decay, state) * clean
    if before is None:
        return result
    earlier, earlier_level = before
    slope = (width - (1.0 - decay)) / (level / earlier_level).log()
    return result + per_sample(slope, state) * (earlier - clean)


def churned(mean: Tensor, level: Tensor, factor: float, noise_scale: float = 1.0) -> Transition:
    """Return the distribution of the state after the next churn, around the end of a step at `level` [B].

    Its variance is that by which `factor` raises the level, ``level^2 ((1 + factor)^2 - 1)``.
    """
    std = level * (math.sqrt((1.0 + factor) ** 2 - 1.0) * noise_scale)
    return Transition(mean, std, std)
