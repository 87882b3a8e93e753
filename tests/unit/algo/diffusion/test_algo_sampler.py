"""Samplers: which steps are actions, and that their densities can be computed again from what is stored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from starling.algo.diffusion.sampler import STORED, make_sampler
from starling.algo.diffusion.settings import Dynamics

SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.2, 0.0)


def velocity_of(state: Tensor) -> Tensor:
    return 0.5 * state.float() + 0.1


def test_all_steps_but_the_last_are_actions() -> None:
    sampler = make_sampler(SIGMAS, "sde", 0.7)
    assert sampler.levels == (0.7, 0.7, 0.7, 0.7, 0.0)
    assert sampler.actions == range(4)
    assert make_sampler(SIGMAS, "sde", 0.7, window=range(1, 3)).actions == range(1, 3)
    assert make_sampler(SIGMAS, "ode", 0.7).actions == range(0)
    assert make_sampler([1.0, 0.5, 0.25, 0.25], "sde", 0.7).actions == range(2), "a step of no length is none"


@pytest.mark.parametrize("stored", STORED)
@given(
    dynamics=st.sampled_from(["sde", "dance", "cps"]),
    level=st.floats(0.05, 1.0),
    numbers=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_densities_follow_from_what_is_stored(
    stored: str, dynamics: Dynamics, level: float, numbers: list[int], seed: int
) -> None:
    sampler = make_sampler(SIGMAS, dynamics, level, stored=stored)
    generator = torch.Generator().manual_seed(seed)
    state, noise = (torch.randn((len(numbers), 2, 3), generator=generator) for _ in range(2))
    state, steps = state.to(STORED[stored]), torch.tensor(numbers)
    following, logprobs = sampler.advance(state, velocity_of(state), steps, noise)
    assert following.dtype == STORED[stored]
    found = sampler.transition(state, velocity_of(state), steps)
    for index, number in enumerate(numbers):
        if number not in sampler.actions:
            assert logprobs[index] == 0.0
            assert torch.equal(following[index], found.mean[index].to(following.dtype))
        else:
            assert torch.equal(sampler.log_density(found, following)[index], logprobs[index])


def test_the_density_is_the_mean_over_elements() -> None:
    sampler = make_sampler(SIGMAS, "sde", 0.7)
    state, noise, numbers = torch.ones(1, 4), torch.tensor([[0.0, 1.0, -1.0, 2.0]]), torch.tensor([2])
    following, logprobs = sampler.advance(state, velocity_of(state), numbers, noise)
    found = sampler.transition(state, velocity_of(state), numbers)
    expected = Normal(found.mean, found.std).log_prob(following).mean()
    assert math.isclose(float(logprobs[0]), float(expected), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stored": "int8"}, "cannot be stored as 'int8': give float32 or float16"),
        ({"level": -0.5}, "the noise level is -0.5"),
        ({"level": 1.5, "dynamics": "cps"}, "for cps at most 1"),
        ({"sigmas": (1.0, 0.0)}, "none of 1 steps can add noise"),
        ({"window": range(4, 5)}, "none of 5 steps can add noise"),
        ({"window": range(3, 7)}, "steps 3 to 7 are not among the 5"),
        ({"sigmas": (1.0, 0.5, 0.5, 0.2, 0.0)}, "repeat one between others"),
    ],
)
def test_what_no_trajectory_can_have_is_refused(arguments: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"sigmas": SIGMAS, "dynamics": "sde", "level": 0.7, **arguments}
    with pytest.raises(ValueError, match=message):
        make_sampler(**settings)  # type: ignore[arg-type]
