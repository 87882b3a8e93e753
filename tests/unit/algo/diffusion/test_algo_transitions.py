"""Steps of stochastic samplers: their formulas, their marginals, and the density of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from starling.algo.diffusion.flow import clean_of, guided, noise_of, noised
from starling.algo.diffusion.settings import Dynamics
from starling.algo.diffusion.transitions import Steps, draw, log_density, second_level, step_levels, transition

SHAPE = (3, 2, 4)
SECOND = 0.9


def tensors(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state, velocity = (torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return state, velocity


def steps_of(sigma: list[float], following: list[float], level: float) -> Steps:
    values = [torch.tensor(one, dtype=torch.float64) for one in (sigma, following, [level] * len(sigma))]
    return Steps(values[0], values[1], SECOND, values[2])


def written_out(dynamics: str, x: float, v: float, s: float, t: float, level: float) -> tuple[float, float]:
    """Mean and deviation of one element, as the papers write them."""
    dt = t - s
    if dynamics == "sde":
        a = level * math.sqrt(s / (1.0 - min(s, SECOND)))
        return x * (1 + a**2 / (2 * s) * dt) + v * (1 + a**2 * (1 - s) / (2 * s)) * dt, a * math.sqrt(-dt)
    if dynamics == "dance":
        clean = x - s * v
        score = -(x - (1 - s) * clean) / s**2
        return x + dt * v - 0.5 * level**2 * score * dt, level * math.sqrt(-dt)
    if dynamics == "cps":
        std = t * math.sin(level * math.pi / 2)
        return (1 - t) * (x - s * v) + math.sqrt(t**2 - std**2) * (x + (1 - s) * v), std
    return x + v * dt, 0.0


@pytest.mark.parametrize("dynamics", get_args(Dynamics))
def test_mean_and_deviation_are_the_papers(dynamics: Dynamics) -> None:
    state, velocity = tensors()
    sigma, following = [1.0, 0.95, 0.4], [0.9, 0.5, 0.1]
    found = transition(dynamics, state, velocity, steps_of(sigma, following, 0.7))
    for row in range(3):
        for place in np.ndindex(*SHAPE[1:]):
            x, v = float(state[row][place]), float(velocity[row][place])
            mean, std = written_out(dynamics, x, v, sigma[row], following[row], 0.7)
            assert float(found.mean[row][place]) == pytest.approx(mean, abs=1e-12)
            assert float(found.std[row]) == pytest.approx(std, abs=1e-12)


@given(
    dynamics=st.sampled_from(get_args(Dynamics)),
    sigma=st.floats(0.05, 1.0),
    share=st.floats(0.0, 0.99),
    seed=st.integers(0, 9),
)
def test_step_without_noise_is_that_of_the_probability_flow(
    dynamics: Dynamics, sigma: float, share: float, seed: int
) -> None:
    state, velocity = tensors(seed=seed)
    found = transition(dynamics, state, velocity, steps_of([sigma] * 3, [sigma * share] * 3, 0.0))
    expected = state + velocity * (sigma * share - sigma)
    assert not found.std.any()
    torch.testing.assert_close(found.mean, expected, rtol=0, atol=1e-12)
    assert torch.equal(draw(found, torch.randn(SHAPE)), found.mean)


@pytest.mark.parametrize("dynamics", get_args(Dynamics))
@pytest.mark.parametrize("sigmas", [[1.0, 1.0, 0.5, 0.0], [1.0, 0.0], [0.995, 0.9, 0.9, 0.1], [1.0, 1.0]])
def test_every_schedule_with_levels_has_finite_steps(dynamics: Dynamics, sigmas: list[float]) -> None:
    state, velocity = tensors()
    second = second_level(sigmas)
    for index, level in enumerate(step_levels(sigmas, 0.7)):
        steps = replace(steps_of([sigmas[index]] * 3, [sigmas[index + 1]] * 3, level), second=second)
        found = transition(dynamics, state, velocity, steps)
        assert found.mean.isfinite().all()
        assert found.std.isfinite().all()
        assert bool((found.std > 0).all()) == (level > 0 and dynamics != "ode")


def test_second_level_is_below_the_largest() -> None:
    assert second_level([1.0, 1.0, 0.5, 0.0]) == 0.5
    assert second_level([0.995, 0.9, 0.1]) == 0.9
    assert second_level([1.0, 1.0]) == 0.0


def test_dynamics_are_computed_in_single_precision_for_a_model_of_less() -> None:
    state, velocity = tensors(dtype=torch.bfloat16)
    found = transition("sde", state, velocity, steps_of([0.8] * 3, [0.7] * 3, 0.7))
    assert found.mean.dtype == found.std.dtype == torch.float32
    exact = transition("sde", state.double(), velocity.double(), steps_of([0.8] * 3, [0.7] * 3, 0.7))
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=1e-6)


def test_unknown_dynamics_are_refused() -> None:
    state, velocity = tensors()
    with pytest.raises(ValueError, match="dynamics is 'sed': give sde, dance, cps or ode"):
        transition("sed", state, velocity, steps_of([0.8] * 3, [0.7] * 3, 0.7))  # type: ignore[arg-type]


# --- schedules -------------------------------------------------------------------------------------------------------


def test_levels_are_of_steps_that_have_a_density() -> None:
    assert step_levels([1.0, 0.7, 0.3, 0.0], 0.8) == [0.8, 0.8, 0.0]  # The last ends without noise.
    assert step_levels([1.0, 0.7, 0.7, 0.3], 0.8) == [0.8, 0.0, 0.8]  # The second changes nothing.
    assert step_levels([1.0, 0.7, 0.5, 0.3], 0.8, range(1, 2)) == [0.0, 0.8, 0.0]
    assert step_levels([1.0, 0.7, 0.5, 0.3], 0.8, range(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sigmas", "window", "message"),
    [
        ([1.0], None, "a schedule of 1 noise levels has no step"),
        ([0.5, 1.0], None, r"the noise levels are \[0.5, 1.0\]"),
        ([1.5, 1.0], None, r"each must be in \[0, 1\]"),
        ([1.0, float("nan")], None, r"each must be in \[0, 1\]"),
        ([1.0, 0.5], range(2), "steps 0 to 2 are not among the 1 of the schedule"),
    ],
)
def test_impossible_schedule_is_refused(sigmas: list[float], window: range | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_levels(sigmas, 0.7, window)


# --- marginals -------------------------------------------------------------------------------------------------------

MEAN, DEVIATION = 0.5, 0.4


def gaussian_velocity(state: Tensor, sigma: float) -> Tensor:
    """Return ``E[e - x0 | x]`` where x0 is normal: what a perfect model predicts."""
    signal = 1.0 - sigma
    variance = signal**2 * DEVIATION**2 + sigma**2
    centred = state - signal * MEAN
    return sigma / variance * centred - (MEAN + signal * DEVIATION**2 / variance * centred)


def sample(dynamics: Dynamics, level: float, num_steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64).tolist()
    state = torch.randn(40_000, 1, generator=generator, dtype=torch.float64)
    levels = step_levels(sigmas, level)
    for index in range(num_steps):
        ends = (torch.full((len(state),), value, dtype=torch.float64) for value in sigmas[index : index + 2])
        steps = Steps(*ends, sigmas[1], torch.full((len(state),), levels[index], dtype=torch.float64))
        found = transition(dynamics, state, gaussian_velocity(state, sigmas[index]), steps)
        state = draw(found, torch.randn(state.shape, generator=generator, dtype=torch.float64))
    return state


@pytest.mark.parametrize(("dynamics", "level"), [("ode", 0.0), ("sde", 0.7), ("sde", 1.0), ("dance", 0.3)])
def test_marginals_converge_as_steps_grow(dynamics: Dynamics, level: float) -> None:
    errors = []
    for num_steps in (10, 40, 200):
        state = sample(dynamics, level, num_steps)
        assert float(state.mean()) == pytest.approx(MEAN, abs=0.01)
        errors.append(abs(float(state.std()) - DEVIATION))
    assert errors[2] < 0.012
    assert errors[2] < errors[1] < errors[0]


def test_coefficients_preserving_sampling_keeps_the_mean_but_not_the_spread() -> None:
    state = sample("cps", 0.8, 200)
    assert float(state.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(state.std()) < DEVIATION - 0.05


# --- densities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_log_density_is_that_of_a_normal_distribution(dynamics: Dynamics) -> None:
    state, velocity = tensors()
    found = transition(dynamics, state, velocity, steps_of([0.9, 0.6, 0.3], [0.7, 0.3, 0.2], 0.7))
    following = draw(found, torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    normal = Normal(found.mean, found.std[:, None, None].expand(SHAPE))
    expected = normal.log_prob(following).mean(dim=(1, 2))
    torch.testing.assert_close(log_density(found, following), expected, rtol=0, atol=1e-12)
    distance = -(following - found.mean).square().mean(dim=(1, 2))
    torch.testing.assert_close(log_density(found, following, "distance"), distance, rtol=0, atol=1e-12)


def test_gradient_of_the_density_goes_through_the_velocity_alone() -> None:
    state, velocity = tensors()
    velocity.requires_grad_()
    steps = steps_of([0.9, 0.6, 0.3], [0.7, 0.3, 0.2], 0.7)
    found = transition("sde", state, velocity, steps)
    following = draw(found, torch.randn(SHAPE, dtype=torch.float64))

    def density(values: Tensor) -> Tensor:
        return log_density(transition("sde", state, values, steps), following)

    assert torch.autograd.gradcheck(density, (velocity,))
    same = density(velocity.detach())
    assert torch.equal((density(velocity) - same).exp(), torch.ones(3, dtype=torch.float64))


def test_density_of_two_means_gives_the_divergence() -> None:
    """The mean log-ratio under the old distribution is minus the divergence: the shift that GRPO-Guard takes out."""
    generator = torch.Generator().manual_seed(0)
    state, velocity = (torch.randn(1, 400_000, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = Steps(*(torch.tensor([value], dtype=torch.float64) for value in (0.8, 0.6)), SECOND, torch.ones(1))
    old = transition("sde", state, velocity, steps)
    new = transition("sde", state, velocity + 0.3, steps)
    following = draw(old, torch.randn(state.shape, generator=generator, dtype=torch.float64))
    shift = log_density(new, following) - log_density(old, following)
    divergence = kl_divergence(Normal(old.mean, old.std[0]), Normal(new.mean, new.std[0])).mean()
    assert float(shift) == pytest.approx(-float(divergence), rel=0.05)


# --- the path --------------------------------------------------------------------------------------------------------


@given(sigma=st.floats(0.0, 1.0), seed=st.integers(0, 9))
def test_state_and_velocity_give_sample_and_noise(sigma: float, seed: int) -> None:
    clean, noise = tensors(seed=seed)
    level = torch.full((3,), sigma, dtype=torch.float64)
    state = noised(clean, noise, level)
    torch.testing.assert_close(clean_of(state, noise - clean, level), clean, rtol=0, atol=1e-12)
    torch.testing.assert_close(noise_of(state, noise - clean, level), noise, rtol=0, atol=1e-12)


def test_guidance_has_no_gradient_of_the_unconditional_half() -> None:
    parts: list[Any] = [part.requires_grad_() for part in tensors()]
    found = guided(*parts, 4.5)
    torch.testing.assert_close(found, parts[1] + 4.5 * (parts[0] - parts[1]))
    found.sum().backward()
    assert parts[1].grad is None
    assert torch.equal(parts[0].grad, torch.full(SHAPE, 4.5, dtype=torch.float64))
