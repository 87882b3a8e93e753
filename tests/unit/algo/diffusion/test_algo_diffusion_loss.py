"""Losses of diffusion models against formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.algo.diffusion.transitions import Steps, Transition, draw, log_density, transition
from starling.algo.loss.diffusion import (
    Forward,
    data_term,
    matching,
    mean_kl,
    negative_aware,
    normalised_log_ratio,
    velocity_kl,
)
from starling.algo.loss.ppo import ppo_clip
from starling.algo.loss.terms import Tokens

SHAPE = (4, 2, 3)


def random(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


STEPS = Steps(row([1.0, 0.8, 0.5, 0.3]), row([0.8, 0.5, 0.3, 0.1]), 0.8, row([0.7] * 4))


def flow_grpo(velocity: Tensor, state: Tensor, following: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Return the mean loss of all steps, as the services compute it."""
    logprobs = log_density(transition("sde", state, velocity, STEPS), following)
    tokens = Tokens(logprobs, old, old, advantages, torch.arange(4), 4)
    return ppo_clip(tokens, clip_low=1e-4, clip_high=1e-4).loss.mean()


def test_steps_are_trained_by_the_clipped_loss_of_tokens() -> None:
    """Loss and gradient equal Flow-GRPO's, written out element by element."""
    state, velocity, change, noise = random(4)
    old = transition("sde", state, velocity, STEPS)
    following, advantages = draw(old, noise), row([1.5, -0.5, 0.3, -2.0])
    old_logprobs = log_density(old, following)
    trained = (velocity + 1e-3 * change).requires_grad_()
    found = flow_grpo(trained, state, following, old_logprobs, advantages)
    found.backward()

    total, gradient = 0.0, torch.zeros(SHAPE, dtype=torch.float64)
    for i in range(4):
        s, t = float(STEPS.sigma[i]), float(STEPS.sigma_next[i])
        a, dt = 0.7 * math.sqrt(s / (1 - min(s, 0.8))), t - s
        std = a * math.sqrt(-dt)
        factor = (1 + a**2 * (1 - s) / (2 * s)) * dt
        mean = state[i] * (1 + a**2 / (2 * s) * dt) + trained[i].detach() * factor
        logs = -((following[i] - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
        ratio = math.exp(float(logs.mean() - old_logprobs[i]))
        unclipped = -float(advantages[i]) * ratio
        clipped = -float(advantages[i]) * min(max(ratio, 1 - 1e-4), 1 + 1e-4)
        total += max(unclipped, clipped) / 4
        if unclipped >= clipped:
            gradient[i] = unclipped / 4 * (following[i] - mean) / std**2 * factor / mean.numel()
    assert float(found.detach()) == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(trained.grad, gradient, rtol=1e-9, atol=1e-15)


def test_ratio_is_exactly_one_on_policy() -> None:
    state, velocity, noise = (one.float() for one in random(3))
    found = transition("sde", state, velocity, STEPS)
    following = draw(found, noise)
    again = transition("sde", state, velocity.clone(), STEPS)
    logprobs, old = log_density(again, following), log_density(found, following)
    assert torch.equal(logprobs, old)
    assert torch.equal(normalised_log_ratio(again, found.mean, logprobs, old), torch.zeros(4))


def test_guard_takes_out_shift_and_spread() -> None:
    """Over many draws its log-ratio has the mean 0, and the spread of the difference of the means alone."""
    generator = torch.Generator().manual_seed(0)
    num, width = 4000, 8
    for sigma, following in ((0.9, 0.7), (0.3, 0.2)):
        steps = Steps(row([sigma]), row([following]), 0.8, row([0.7]))
        state, velocity = (torch.randn(1, width, generator=generator, dtype=torch.float64) for _ in range(2))
        old = transition("sde", state, velocity, steps)
        new = transition("sde", state, velocity + 0.2, steps)
        difference = new.mean - old.mean
        plain, guarded = [], []
        for _ in range(num):
            drawn = draw(old, torch.randn(1, width, generator=generator, dtype=torch.float64))
            logs = log_density(new, drawn), log_density(old, drawn)
            plain.append(float(logs[0] - logs[1]))
            guarded.append(float(normalised_log_ratio(new, old.mean, *logs)))
        spread = float(difference.norm()) / width
        assert sum(plain) / num < -1e-4
        assert sum(guarded) / num == pytest.approx(0.0, abs=4 * spread / math.sqrt(num))
        assert torch.tensor(guarded).std().item() == pytest.approx(spread, rel=0.05)


def test_divergences_are_means_over_elements() -> None:
    mean, reference = random(2)
    found = Transition(mean, row([0.1] * 4), row([0.2, 0.5, 1.0, 2.0]))
    expected = [(mean[i] - reference[i]).square().mean() / (2 * float(found.rate[i]) ** 2) for i in range(4)]
    torch.testing.assert_close(mean_kl(found, reference), torch.stack(expected))
    torch.testing.assert_close(velocity_kl(mean, reference), (mean - reference).square().mean(dim=(1, 2)))


def test_matching_is_least_at_the_target_and_weighed_by_ddrl() -> None:
    velocity, target = random(2)
    assert not matching(target, target).any()
    sigma = row([0.0, 0.25, 0.5, 1.0])
    weights = data_term(velocity, target, sigma) / matching(velocity, target)
    torch.testing.assert_close(weights, row([1.0, 0.625, 0.5, 1.0]))


def forward_of(advantages: list[float], *, seed: int = 0) -> Forward:
    clean, noise, velocity, old, reference = random(5, seed)
    sigma = row([0.1, 0.4, 0.7, 0.95])
    state = (1 - sigma)[:, None, None] * clean + sigma[:, None, None] * noise
    return Forward(clean, state, sigma, velocity.requires_grad_(), old, reference, row(advantages))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_negative_aware_loss_is_the_papers(beta: float) -> None:
    forward = forward_of([-9.0, -1.0, 0.0, 4.0])
    found = negative_aware(forward, beta=beta, kl=0.01, bound=5.0)
    for i in range(4):
        r = (max(min(float(forward.advantages[i]), 5.0), -5.0) / 5.0) / 2 + 0.5
        v, old, t = forward.velocity[i].detach(), forward.old_velocity[i], float(forward.sigma[i])

        def error(velocity: Tensor, i: int = i, t: float = t) -> float:
            off = forward.state[i] - t * velocity - forward.clean[i]
            return float(off.square().mean() / off.abs().mean())

        policy = r * error(beta * v + (1 - beta) * old) / beta + (1 - r) * error((1 + beta) * old - beta * v) / beta
        kl = float((v - forward.reference_velocity[i]).square().mean())
        assert float(found.loss[i].detach()) == pytest.approx(5.0 * policy + 0.01 * kl, rel=1e-9)


def test_negative_aware_gradient_has_the_direction_of_the_reward() -> None:
    """A good sample pulls the prediction to it, a bad one pushes it off, and one of no advantage does neither."""
    for advantage, sign in ((5.0, -1), (-5.0, 1), (0.0, 0)):
        forward = forward_of([advantage] * 4)
        same = replace(forward, old_velocity=forward.velocity.detach().clone())
        negative_aware(same, kl=0.0).loss.sum().backward()
        gradient: Any = forward.velocity.grad
        error = (same.state - same.sigma[:, None, None] * same.velocity.detach() - same.clean) * -same.sigma[
            :, None, None
        ]
        aligned = float((gradient * error).sum())
        if sign:
            # Down the gradient, the error of a good sample shrinks.
            assert math.copysign(1, aligned) == -sign
        else:
            assert abs(aligned) < 1e-12


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"kl": -1.0}, {"bound": 0.0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="the first two must be above 0, kl 0 or more"):
        negative_aware(forward_of([0.0] * 4), **options)
