"""A sampler of denoising trajectories: its noise levels, and its steps as actions.

A rollout draws trajectories with a sampler, and a policy computes the densities of their steps again with an equal one.
The steps that add noise are the actions. They are consecutive, so a trajectory is stored as the states from the first
action's to the last one's successor. States are rounded to the type that stores them as they are drawn: densities are
those of what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from starling.algo.diffusion.settings import Dynamics
from starling.algo.diffusion.transitions import (
    Density,
    Steps,
    Transition,
    draw,
    log_density,
    second_level,
    step_levels,
    transition,
)

STORED: Final = {"float32": torch.float32, "float16": torch.float16}
"""Types that states are stored in, by name."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Noise levels of a trajectory and the dynamics of its steps."""

    dynamics: Dynamics
    sigmas: tuple[float, ...]
    """N + 1 noise levels, from at most 1 down to at least 0."""
    levels: tuple[float, ...]
    """How much noise each of the N steps adds; 0 for none."""
    density: Density = "gaussian"
    stored: str = "float32"
    """Type of the states, of `STORED`."""

    @property
    def num_steps(self) -> int:
        """Steps of a trajectory."""
        return len(self.levels)

    @property
    def actions(self) -> range:
        """The steps that add noise."""
        noisy = [number for number, level in enumerate(self.levels) if level > 0.0]
        return range(noisy[0], noisy[-1] + 1) if noisy else range(0)

    @property
    def recorded(self) -> range:
        """The steps whose versions and log-densities are recorded: the actions, or all steps where there are none."""
        return self.actions or range(self.num_steps)

    def transition(self, state: Tensor, velocity: Tensor, numbers: Tensor) -> Transition:
        """Return the distribution of the next states.

        Args:
            state: [B, ...].
            velocity: the model's there.
            numbers: int64 [B], the step that each trajectory is at.
        """
        levels, sigmas = (torch.tensor(values, device=state.device) for values in (self.levels, self.sigmas))
        steps = Steps(sigmas[numbers], sigmas[numbers + 1], second_level(self.sigmas), levels[numbers])
        return transition(self.dynamics, state, velocity, steps)

    def sigma(self, numbers: Tensor) -> Tensor:
        """Return the noise level before each step, float32 [B]."""
        return torch.tensor(self.sigmas, device=numbers.device)[numbers]

    def advance(self, state: Tensor, velocity: Tensor, numbers: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next states, in the type that stores them, and their log-densities; 0 where no noise is added.

        Args:
            state: [B, ...], in the type that stores it.
            velocity: the model's there.
            numbers: int64 [B], the step that each trajectory is at.
            noise: standard normal, in the shape of `state`.
        """
        found = self.transition(state, velocity, numbers)
        following = draw(found, noise).to(STORED[self.stored])
        noisy = found.std > 0.0
        safe = Transition(found.mean, torch.where(noisy, found.std, 1.0), found.rate)
        return following, torch.where(noisy, log_density(safe, following, self.density), 0.0)

    def log_density(self, found: Transition, following: Tensor) -> Tensor:
        """Return the log-density of drawn states [B, ...] under `transition`, [B]; differentiable in the mean."""
        return log_density(found, following, self.density)


def without_noise(sampler: Sampler) -> Sampler:
    """Return the sampler that follows the probability flow through the same noise levels."""
    return replace(sampler, dynamics="ode", levels=(0.0,) * sampler.num_steps)


def make_sampler(
    sigmas: Sequence[float],
    dynamics: Dynamics,
    level: float,
    *,
    window: range | None = None,
    density: Density | None = None,
    stored: str = "float32",
) -> Sampler:
    """Return a sampler over the noise levels of a scheduler.

    Args:
        sigmas: N + 1 noise levels, none above the one before it.
        dynamics: see `starling.algo.diffusion.transitions`.
        level: noise of the steps.
        window: the steps that may add noise; None for all.
        density: by default the one that belongs to the dynamics.
        stored: type of the states.

    Raises:
        ValueError: the levels or the window do not fit (see `step_levels`), no step adds noise although the dynamics
            do, those that do are not consecutive, or there is no such type.
    """
    if stored not in STORED:
        raise ValueError(f"states cannot be stored as {stored!r}: give {' or '.join(STORED)}")
    if not level >= 0.0 or (dynamics == "cps" and level > 1.0):
        raise ValueError(f"the noise level is {level} with dynamics {dynamics!r}: give 0 or more, for cps at most 1")
    levels = step_levels(sigmas, 0.0 if dynamics == "ode" else level, window)
    sampler = Sampler(
        dynamics,
        tuple(float(sigma) for sigma in sigmas),
        tuple(levels),
        density or ("distance" if dynamics == "cps" else "gaussian"),
        stored,
    )
    if any(sampler.levels[number] <= 0.0 for number in sampler.actions):
        raise ValueError(f"the noise levels {list(sigmas)} repeat one between others: the scheduler must not do that")
    if dynamics != "ode" and level > 0.0 and not sampler.actions:
        raise ValueError(
            f"none of {len(levels)} steps can add noise, as each in the window ends without any: give more steps, or "
            "an earlier window"
        )
    return sampler
