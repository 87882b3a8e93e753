"""DiffusionNFT and supervised steps of diffusion models: gradients beside formulas written out, and learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_diffusion import CHANNELS, FAMILIES, NUM_TEXT_TOKENS, TEXT_WIDTH, tiny, with_diffusion
from torch import Tensor

from starling.algo.advantage import EPSILON
from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import make_sampler
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.diffusion.base import CleanSamples
from starling.policy.train.diffusion.groups import DenoisedGroup
from starling.policy.train.diffusion.nft import NftTrainer
from starling.policy.train.diffusion.supervised import MatchingTrainer

SAMPLER = make_sampler((1.0, 0.7, 0.4, 0.0), "ode", 0.0)
SHAPE = (CHANNELS, 2, 4, 4)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def conditions_of(seed: int) -> Conditions:
    text = torch.randn((1, NUM_TEXT_TOKENS, TEXT_WIDTH), generator=torch.Generator().manual_seed(seed))
    return Conditions(text, torch.ones(1, NUM_TEXT_TOKENS, dtype=torch.bool))


@torch.no_grad()
def sampled(model: Any, count: int, *, seed: int = 0, version: int = 0) -> DenoisedGroup:
    """Return trajectories of the flow of one prompt, without rewards yet."""
    conditions = conditions_of(seed)
    state = torch.randn((count, *SHAPE), generator=torch.Generator().manual_seed(100 + seed))
    for number in range(SAMPLER.num_steps):
        numbers = torch.full((count,), number)
        speed = velocity(model, state, SAMPLER.sigma(numbers), conditions.rows([0] * count))
        state, _ = SAMPLER.advance(state, speed, numbers, torch.zeros_like(state))
    num_tokens = count * SAMPLER.num_steps
    scored = ScoredGroup(
        prompt_ids=np.zeros(1, np.int32),
        completion_ids=np.tile(np.arange(SAMPLER.num_steps, dtype=np.int32), count),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.full(num_tokens, version, np.int32),
        lengths=(SAMPLER.num_steps,) * count,
        rewards=(0.0,) * count,
        prompt_id=f"train/0/{seed}",
    )
    return DenoisedGroup(scored, torch.zeros(count, 0), conditions, state)


def rewarded(group: DenoisedGroup, rewards: Sequence[float]) -> DenoisedGroup:
    return replace(group, scored=replace(group.scored, rewards=tuple(rewards)))


def settings_of(**changes: Any) -> PolicySettings:
    optimizer = OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.0)
    return PolicySettings(
        algorithm=AlgorithmSettings(**changes), optimizer=optimizer, sft=SftStepSettings(optimizer=optimizer)
    )


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    norm = torch.stack([one.norm() for one in expected.values()]).norm()
    assert norm > 1e-6, "there is a gradient"
    for name, one in expected.items():
        assert (found[name] - one).norm() <= tolerance * norm, name


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_step_has_the_gradient_of_diffusion_nft(size: int) -> None:
    """Of its first update: the old velocities are those of the model itself."""
    groups = [
        rewarded(sampled(tiny("wan"), count, seed=seed), rewards)
        for seed, (count, rewards) in enumerate([(3, (0.0, 1.0, 5.0)), (2, (2.0, -1.0))])
    ]
    reference, beta, bound, kl, num_levels = tiny("wan", seed=1), 0.5, 2.0, 0.3, 2
    model = tiny("wan")
    diffusion = DiffusionSettings(
        actions_per_microbatch=size, nft_beta=beta, advantage_bound=bound, levels_per_sample=num_levels
    )
    trainer = NftTrainer(
        model,
        SAMPLER,
        with_diffusion(settings_of(kl_coefficient=kl), diffusion),
        total_steps=4,
        reference=reference,
    )
    metrics = trainer.step(groups, step=1)
    found = gradients_of(model)

    model, generator = tiny("wan"), torch.Generator().manual_seed(1)
    ends = torch.cat([group.latents for group in groups if group.latents is not None])
    clean = ends.repeat_interleave(num_levels, dim=0)
    noise = torch.randn(clean.shape, generator=generator)
    sigmas = torch.tensor([1.0, 0.7, 0.4])[torch.randint(3, (len(clean),), generator=generator)]
    advantages = []
    for group in groups:
        rewards = torch.tensor(group.scored.rewards)
        advantages += [(rewards - rewards.mean()) / (rewards.std() + EPSILON)]
    total = torch.zeros(())
    owner = [0] * 6 + [1] * 4
    for number, advantage in enumerate(torch.cat(advantages).repeat_interleave(num_levels)):
        x0, e, s = clean[number], noise[number], sigmas[number : number + 1]
        state = (1 - s) * x0 + s * e
        given = groups[owner[number]].conditions
        v = velocity(model, state[None], s, given)[0]
        old = v.detach()
        with torch.no_grad():
            v_ref = velocity(reference, state[None], s, given)[0]
        r = (advantage.clamp(-bound, bound) / bound + 1) / 2
        for weight, implied in ((r, beta * v + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * v)):
            error = state - s * implied - x0
            total = total + weight * bound / beta * (error**2).mean() / error.detach().abs().mean()
        total = total + kl * ((v - v_ref) ** 2).mean()
    torch.autograd.backward(total / len(clean))
    assert_close(found, gradients_of(model))
    assert math.isclose(metrics["loss"], float(total / len(clean)), rel_tol=1e-4)
    assert metrics["staleness/0"] == 1.0


def test_equal_rewards_have_no_gradient() -> None:
    """An advantage of 0 is half a positive and half a negative sample."""
    group = rewarded(sampled(tiny("wan"), 2), (0.0, 0.0))
    model = tiny("wan")
    trainer = NftTrainer(model, SAMPLER, settings_of(), total_steps=1)
    metrics = trainer.step([group], step=1)
    assert metrics["grad_norm"] < 1e-6


def test_samples_that_cannot_be_trained_change_nothing() -> None:
    model = tiny("wan")
    group = rewarded(sampled(model, 2), (0.0, 1.0))
    assert group.latents is not None
    broken = group.latents.clone()
    broken[1, 0, 0, 0, 0] = math.nan
    other = replace(rewarded(sampled(model, 2, seed=1), (0.0, 1.0)), latents=group.latents[:, :, :1])
    trainer = NftTrainer(model, SAMPLER, settings_of(), total_steps=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for groups, message in (
        ([replace(group, latents=broken)], "the end of a trajectory is not finite"),
        ([replace(group, latents=None)], "the ends of 0 trajectories out of 2"),
        ([group, other], "different shapes"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.step(groups, step=1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_reward_rises_by_diffusion_nft() -> None:
    torch.manual_seed(0)
    model = FAMILIES["wan"](num_layers=1)
    settings = PolicySettings(
        algorithm=AlgorithmSettings(num_passes=2), optimizer=OptimizerSettings(learning_rate=3e-3)
    )
    diffusion = DiffusionSettings(actions_per_microbatch=64, levels_per_sample=3)
    trainer = NftTrainer(model, SAMPLER, with_diffusion(settings, diffusion), total_steps=30)
    means = []
    for step in range(1, 31):
        group = sampled(model, 8, seed=step, version=step - 1)
        assert group.latents is not None
        rewards = [float(one[0].mean()) for one in group.latents]
        means.append(sum(rewards) / len(rewards))
        trainer.step([rewarded(group, rewards)], step=step)
    assert np.mean(means[-3:]) - np.mean(means[:3]) > 0.1, means


def samples_of(count: int) -> CleanSamples:
    generator = torch.Generator().manual_seed(11)
    clean, noise = (torch.randn((count, *SHAPE), generator=generator) for _ in range(2))
    conditions = conditions_of(3).rows([0] * count)
    return CleanSamples(clean, conditions, torch.rand(count, generator=generator), noise)


@pytest.mark.parametrize("size", [2, 64])
def test_a_supervised_step_has_the_gradient_of_flow_matching(size: int) -> None:
    samples, model, plain = samples_of(5), tiny("cosmos"), tiny("cosmos")
    trainer = MatchingTrainer(
        model,
        with_diffusion(settings_of(), DiffusionSettings(actions_per_microbatch=size)),
        total_steps=2,
    )
    metrics = trainer.step(samples)
    s = samples.sigma.view(-1, 1, 1, 1, 1)
    state = (1 - s) * samples.clean + s * samples.noise
    loss = (velocity(plain, state, samples.sigma, samples.conditions) - (samples.noise - samples.clean)).square().mean()
    torch.autograd.backward(loss)
    assert_close(gradients_of(model), gradients_of(plain))
    assert math.isclose(metrics["loss"], float(loss), rel_tol=1e-5)
    with pytest.raises(ConfigError, match="has no samples"):
        trainer.step(samples.take(np.zeros(0, np.int64)))
    samples.clean[0, 0] = math.inf
    with pytest.raises(ConfigError, match="not finite"):
        trainer.step(samples)
