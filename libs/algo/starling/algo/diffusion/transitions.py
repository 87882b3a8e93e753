"""The steps of a stochastic sampler as a policy's actions: a Gaussian over the next state, and its log-density.

A sampler goes through noise levels ``1 >= sigma_0 > ... > sigma_N >= 0`` (see `starling.algo.diffusion.flow`). A step
draws the next state from a Gaussian whose mean depends on the model's velocity. The dynamics differ in mean and
deviation, with ``dt = sigma_next - sigma < 0``:

    sde     the reverse SDE ``dx = (v - a^2 score / 2) dt + a dw`` with ``a = level sqrt(sigma / (1 - sigma'))``
            (Flow-GRPO, arXiv:2505.05470, equation 9); sigma' is sigma, but at most the second-largest level of the
            schedule, because the largest may be 1 or nearly 1
    dance   the same with ``a = level`` (DanceGRPO, arXiv:2505.07818)
    cps     deviation ``sigma_next sin(level pi / 2)``, and a mean such that the coefficients keep to the path
            (Flow-CPS, arXiv:2509.05952)
    ode     no noise: the probability flow, which has no log-density

With the level 0 each of them is `ode`, so a window of noisy steps between others without noise (Flow-GRPO-Fast,
MixGRPO, arXiv:2507.21802) is a level for each step. The reverse SDE has the marginals of the flow as steps grow; `cps`
has less noise by design.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from starling.algo.diffusion.flow import clean_of, noise_of, per_sample
from starling.algo.diffusion.settings import Dynamics

Density = Literal["gaussian", "distance"]

_HALF_LOG_TAU: Final = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """One step of each of B trajectories, which may be at different places of the schedule."""

    sigma: Tensor
    """float32 [B], the noise level before the step, above 0."""
    sigma_next: Tensor
    """float32 [B], the one after it, below `sigma`."""
    second: float
    """The second-largest noise level of the schedule, `second_level`."""
    level: Tensor
    """float32 [B], how much noise the step adds; 0 for none."""


class Transition(NamedTuple):
    """A Gaussian over the next state of each trajectory."""

    mean: Tensor
    """float32 or float64 [B, ...], differentiable in the velocity."""
    std: Tensor
    """[B], the deviation of each element; 0 where the step adds no noise."""
    rate: Tensor
    """[B], the deviation that the KL term of Flow-GRPO divides by: that of a unit of time for an SDE, ``std /
    sqrt(-dt)``, and `std` itself for `cps`."""


def step_levels(sigmas: Sequence[float], level: float, window: range | None = None) -> list[float]:
    """Return the noise level of each step of a schedule: `level` inside `window`, all of them by default, else 0.

    A step that does not change the noise level, or that ends without noise (its log-density may be infinite), gets 0.

    Raises:
        ValueError: fewer than two sigmas, one is outside [0, 1], they increase, or the window is outside of the steps.
    """
    if len(sigmas) < 2:
        raise ValueError(f"a schedule of {len(sigmas)} noise levels has no step: give two or more")
    if not all(0.0 <= sigma <= 1.0 for sigma in sigmas) or list(sigmas) != sorted(sigmas, reverse=True):
        raise ValueError(
            f"the noise levels are {list(sigmas)}: each must be in [0, 1] and none above the one before it"
        )
    steps = range(len(sigmas) - 1)
    chosen = steps if window is None else window
    if any(step not in steps for step in chosen):
        raise ValueError(f"steps {chosen.start} to {chosen.stop} are not among the {len(steps)} of the schedule")
    return [level if step in chosen and sigmas[step] > sigmas[step + 1] > 0.0 else 0.0 for step in steps]


def second_level(sigmas: Sequence[float]) -> float:
    """Return the second-largest noise level of a schedule, 0 if all are equal."""
    return max((sigma for sigma in sigmas if sigma < max(sigmas)), default=0.0)


def transition(dynamics: Dynamics, state: Tensor, velocity: Tensor, steps: Steps) -> Transition:
    """Return the distribution of the next state, computed in float32, or in float64 where `state` is.

    Args:
        dynamics: see above.
        state: [B, ...].
        velocity: the model's, in the shape of `state`.
        steps: where each trajectory is.

    Raises:
        ValueError: there are no such dynamics.
    """
    dtype = torch.float64 if state.dtype == torch.float64 else torch.float32
    state, velocity = state.to(dtype), velocity.to(dtype)
    sigma, following = steps.sigma.to(dtype), steps.sigma_next.to(dtype)
    level = torch.zeros_like(sigma) if dynamics == "ode" else steps.level.to(dtype)
    match dynamics:
        case "sde" | "ode":
            # A step without noise may begin at 1, where 0 times infinity is not a number.
            capped = torch.where(level > 0.0, sigma.clamp(max=steps.second), 0.0)
            rate = level * (sigma / (1.0 - capped)).sqrt()
        case "dance":
            rate = level
        case "cps":
            std = following * (level * (math.pi / 2.0)).sin()
            return Transition(_preserving_mean(state, velocity, sigma, following, std), std, std)
        case _:
            raise ValueError(f"dynamics is {dynamics!r}: give sde, dance, cps or ode")
    dt = following - sigma
    # v - a^2 score / 2, with the score -noise / sigma.
    pull = per_sample(rate.square() / (2.0 * sigma), state) * noise_of(state, velocity, sigma)
    mean = state + per_sample(dt, state) * (velocity + pull)
    return Transition(mean, rate * (-dt).sqrt(), rate)


def _preserving_mean(state: Tensor, velocity: Tensor, sigma: Tensor, following: Tensor, std: Tensor) -> Tensor:
    clean, noise = clean_of(state, velocity, sigma), noise_of(state, velocity, sigma)
    left = (following.square() - std.square()).clamp(min=0.0).sqrt()
    return per_sample(1.0 - following, state) * clean + per_sample(left, state) * noise


def draw(found: Transition, noise: Tensor) -> Tensor:
    """Return the next state, from standard normal `noise` in the shape of the mean."""
    return found.mean + per_sample(found.std, found.mean) * noise.to(found.mean.dtype)


def log_density(found: Transition, following: Tensor, density: Density = "gaussian") -> Tensor:
    """Return the log-density of the next state, the mean over its elements, [B]; differentiable in the mean.

    The mean and not the sum, as in Flow-GRPO: a ratio of densities of millions of elements would be 0 or infinite. It
    makes log-ratios small, hence clip bounds of 1e-4. ``"distance"`` is ``-(x - mean)^2``, without the deviation and
    the constants, as Flow-CPS and the first trainer of Cosmos-RL take it.

    Args:
        found: the distribution; a `std` of 0 has no density.
        following: the state that was drawn, in the shape of the mean; without gradient.
        density: which of both.
    """
    distances = (following.detach().to(found.mean.dtype) - found.mean).square()
    axes = tuple(range(1, distances.ndim))
    if density == "distance":
        return -distances.mean(dim=axes)
    return -distances.mean(dim=axes) / (2.0 * found.std.square()) - found.std.log() - _HALF_LOG_TAU
