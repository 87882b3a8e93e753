"""Steps of diffusion models: their gradients beside formulas written out, any division into microbatches, learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_diffusion import CHANNELS, FAMILIES, IMAGES, NUM_TEXT_TOKENS, TEXT_WIDTH, tiny, with_diffusion
from torch import Tensor

from starling.algo.advantage import EPSILON
from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import Sampler, make_sampler
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.diffusion.base import CleanSamples
from starling.policy.train.diffusion.groups import DenoisedGroup
from starling.policy.train.diffusion.trainer import DiffusionTrainer

SIGMAS = (1.0, 0.8, 0.5, 0.2, 0.0)
CLIP = 0.05
Gradients = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sampler_of(**changes: Any) -> Sampler:
    return make_sampler(**{"sigmas": SIGMAS, "dynamics": "sde", "level": 0.7, **changes})


def shape_of(name: str) -> tuple[int, ...]:
    return (CHANNELS, 4, 4) if name in IMAGES else (CHANNELS, 2, 4, 4)


def conditions_of(name: str, seed: int) -> Conditions:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn((1, NUM_TEXT_TOKENS, TEXT_WIDTH), generator=generator)
    pooled = torch.randn((1, 6), generator=generator) if name == "sd3" else None
    return Conditions(text, torch.ones(1, NUM_TEXT_TOKENS, dtype=torch.bool), pooled)


@torch.no_grad()
def sampled(
    model: Any, name: str, sampler: Sampler, rewards: Sequence[float], *, seed: int = 0, version: int = 0
) -> DenoisedGroup:
    """Return the trajectories of one prompt by `model`, one for each reward."""
    count, conditions = len(rewards), conditions_of(name, seed)
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn((count, *shape_of(name)), generator=generator)
    states, logprobs = [state], []
    for number in range(sampler.num_steps):
        numbers = torch.full((count,), number)
        speed = velocity(model, state, sampler.sigma(numbers), conditions.rows([0] * count))
        noise = torch.randn(state.shape, generator=generator)
        state, logprob = sampler.advance(state, speed, numbers, noise)
        if number in sampler.actions:
            states.append(state)
            logprobs.append(logprob)
    num_actions = len(sampler.actions)
    scored = ScoredGroup(
        prompt_ids=np.zeros(1, np.int32),
        completion_ids=np.tile(np.array(sampler.actions, np.int32), count),
        logprobs=torch.stack(logprobs, 1).flatten().numpy(),
        versions=np.full(count * num_actions, version, np.int32),
        lengths=(num_actions,) * count,
        rewards=tuple(rewards),
        prompt_id=f"train/0/{seed}",
    )
    return DenoisedGroup(scored, torch.stack(states, 1), conditions)


def settings_of(**changes: Any) -> PolicySettings:
    algorithm = {"name": "grpo", "clip_low": CLIP, "clip_high": CLIP, **changes}
    return PolicySettings(
        algorithm=AlgorithmSettings(**algorithm), optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.0)
    )


def gradients(
    model: Any,
    groups: Sequence[DenoisedGroup],
    sampler: Sampler,
    settings: PolicySettings,
    diffusion: DiffusionSettings,
    **options: Any,
) -> tuple[Gradients, dict[str, float]]:
    """Return the gradient of the only update of a step, and its metrics."""
    data = options.pop("data", None)
    trainer = DiffusionTrainer(model, sampler, with_diffusion(settings, diffusion), total_steps=4, **options)
    metrics = trainer.step(groups, step=1, data=data)
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, metrics


def assert_close(found: Gradients, expected: Gradients, tolerance: float = 5e-6) -> None:
    assert found.keys() == expected.keys()
    norm = torch.stack([one.norm() for one in expected.values()]).norm()
    assert norm > 1e-6, "there is a gradient"
    for name, one in expected.items():
        assert (found[name] - one).norm() <= tolerance * norm, name


def written_out(
    model: Any, name: str, groups: Sequence[DenoisedGroup], *, kl: float = 0.0, reference: Any = None
) -> Gradients:
    """Flow-GRPO as its paper writes it, one action after another: the gradient of a step."""
    pairs = sum(len(group.states) * (len(SIGMAS) - 2) for group in groups)
    total = torch.zeros(())
    for group in groups:
        rewards = torch.tensor(group.scored.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        logprobs = torch.from_numpy(group.scored.logprobs).view(len(rewards), -1)
        for index, advantage in enumerate(advantages):
            for number in range(len(SIGMAS) - 2):
                sigma, following = SIGMAS[number], SIGMAS[number + 1]
                x, drawn = group.states[index, number], group.states[index, number + 1]

                def step(of: Any, x: Tensor = x, s: float = sigma, t: float = following, g: Any = group) -> Any:
                    v = velocity(of, x[None], torch.tensor([s]), g.conditions)[0]
                    a = 0.7 * math.sqrt(s / (1.0 - min(s, SIGMAS[1])))
                    mean = x * (1 + a**2 / (2 * s) * (t - s)) + v * (1 + a**2 * (1 - s) / (2 * s)) * (t - s)
                    return mean, a

                mean, a = step(model)
                std = a * math.sqrt(sigma - following)
                density = -((drawn - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
                ratio = (density.mean() - logprobs[index, number]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                total = total + torch.maximum(-advantage * ratio, -advantage * clipped) / pairs
                if kl:
                    with torch.no_grad():
                        theirs, _ = step(reference)
                    total = total + kl * ((mean - theirs) ** 2).mean() / (2 * a**2) / pairs
    model.zero_grad()
    torch.autograd.backward(total)
    return {one: parameter.grad for one, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_has_the_gradient_of_flow_grpo(name: str) -> None:
    model, reference = tiny(name), tiny(name, seed=1)
    rollout = tiny(name)
    with torch.no_grad():  # a version before
        for parameter in rollout.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    rewards = [(0.0, 1.0, 3.0), (2.0, -1.0)]
    groups = [sampled(rollout, name, sampler_of(), one, seed=seed) for seed, one in enumerate(rewards)]
    expected = written_out(model, name, groups, kl=0.3, reference=reference)
    diffusion = DiffusionSettings(actions_per_microbatch=4)
    settings = settings_of(kl_coefficient=0.3, aggregate="token_mean")
    found, metrics = gradients(tiny(name), groups, sampler_of(), settings, diffusion, reference=reference)
    assert_close(found, expected, 2e-5)
    assert metrics["reference_kl"] > 0.0
    assert metrics["num_tokens"] == 15


@given(
    size=st.integers(1, 16),
    name=st.sampled_from(["grpo", "gspo", "cispo", "dapo", "rloo_sequence", "decoupled_ppo"]),
    divergence=st.sampled_from(["mean", "velocity"]),
    rewards=st.lists(st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=3), min_size=1, max_size=2),
)
def test_any_division_into_microbatches_has_the_same_gradient(
    size: int, name: str, divergence: Any, rewards: list[list[float]]
) -> None:
    """Losses of whole trajectories, too, whose actions are then in several microbatches."""
    rewards[0][0] = 3.0
    clip = {} if name == "rloo_sequence" else {"clip_high": CLIP}
    settings = PolicySettings(algorithm=AlgorithmSettings(name=name, kl_coefficient=0.1, **clip))
    groups = [sampled(tiny("wan"), "wan", sampler_of(), one, seed=seed) for seed, one in enumerate(rewards)]
    whole, parts = (
        gradients(
            tiny("wan"),
            groups,
            sampler_of(),
            settings,
            DiffusionSettings(actions_per_microbatch=number, divergence=divergence),
            reference=tiny("wan", seed=1),
        )[0]
        for number in (64, size)
    )
    assert_close(parts, whole)


def test_ratios_are_1_where_the_same_batch_is_computed_again() -> None:
    """Ratios of an identical batch are exactly 1; in others, the order of sums differs."""
    group = sampled(tiny("cosmos"), "cosmos", sampler_of(), (0.0, 1.0))
    _, metrics = gradients(
        tiny("cosmos"), [group], sampler_of(), settings_of(), DiffusionSettings(actions_per_microbatch=64)
    )
    errors = {name: value for name, value in metrics.items() if name.startswith("ratio_error/")}
    assert list(errors) == ["ratio_error/0", "ratio_error/1", "ratio_error/2"]
    assert max(errors.values()) < 2e-5
    assert metrics["mismatch_max"] < 2e-5
    assert metrics["staleness/0"] == 1.0


def test_the_digest_of_a_step_does_not_depend_on_the_order_of_its_groups() -> None:
    sampler, digests = sampler_of(), set()
    groups = [sampled(tiny("wan"), "wan", sampler, (0.0, 1.0), seed=seed) for seed in range(2)]
    for order in (groups, groups[::-1]):
        trainer = DiffusionTrainer(tiny("wan"), sampler, settings_of(), total_steps=1)
        trainer.step(order, step=1)
        digests.add(trainer.batch_digest)
    assert len(digests) == 1
    assert 0 not in digests


def test_normalised_ratios_lose_their_bias_and_their_spread() -> None:
    """After one update in a minibatch of two passes, ratios differ from 1, normalised ones by less."""
    groups = [sampled(tiny("wan"), "wan", sampler_of(), (0.0, 1.0, 0.5, 2.0), seed=seed) for seed in range(2)]
    spread = {}
    for ratio in ("plain", "normalised"):
        settings = settings_of(old="proximal", num_passes=2)
        _, metrics = gradients(
            tiny("wan"), groups, sampler_of(), settings, DiffusionSettings(ratio=ratio, actions_per_microbatch=5)
        )
        spread[ratio] = metrics["approx_kl"]
    assert 0.0 < spread["normalised"] < spread["plain"]


def clean_samples(name: str, count: int = 3) -> CleanSamples:
    generator = torch.Generator().manual_seed(11)
    clean, noise = (torch.randn((count, *shape_of(name)), generator=generator) for _ in range(2))
    sigma = torch.rand(count, generator=generator)
    return CleanSamples(clean, conditions_of(name, 3).rows([0] * count), sigma, noise)


@pytest.mark.parametrize("size", [2, 64])
def test_the_data_term_is_added_to_the_policy_gradient(size: int) -> None:
    group, data = sampled(tiny("wan"), "wan", sampler_of(), (0.0, 1.0)), clean_samples("wan")
    plain, _ = gradients(tiny("wan"), [group], sampler_of(), settings_of(), DiffusionSettings())
    model = tiny("wan")
    state = (1 - data.sigma.view(-1, 1, 1, 1, 1)) * data.clean + data.sigma.view(-1, 1, 1, 1, 1) * data.noise
    predicted = velocity(model, state, data.sigma, data.conditions)
    error = (predicted - (data.noise - data.clean)).square().flatten(1).mean(1)
    term = (((1 - data.sigma) ** 2 + data.sigma**2) * error).mean()
    torch.autograd.backward(term)
    of_data = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    diffusion = DiffusionSettings(data_coefficient=0.25, actions_per_microbatch=size)
    found, metrics = gradients(tiny("wan"), [group], sampler_of(), settings_of(), diffusion, data=data)
    assert_close(found, {name: plain[name] + 0.25 * of_data[name] for name in plain}, 2e-5)
    for name, parts in (("policy_grad_norm", plain), ("data_grad_norm", {n: 0.25 * g for n, g in of_data.items()})):
        expected = torch.stack([one.norm() for one in parts.values()]).norm()
        assert math.isclose(metrics[name], float(expected), rel_tol=1e-4)
    assert math.isclose(metrics["data_loss"], float(term), rel_tol=1e-5)
    with pytest.raises(ConfigError, match="came without samples of the dataset"):
        gradients(tiny("wan"), [group], sampler_of(), settings_of(), diffusion)


def test_trajectories_that_cannot_be_trained_change_nothing() -> None:
    model, sampler = tiny("wan"), sampler_of()
    group = sampled(model, "wan", sampler, (0.0, 1.0))
    broken = group.states.clone()
    broken[1, 2, 0] = math.nan
    other = sampled(model, "wan", sampler_of(window=range(1, 3)), (0.0, 1.0))
    others = np.array([1, 2, 3] * 2, np.int32)
    cases = [
        (replace(group, states=broken), "a state is not finite"),
        (replace(group, states=group.states[:, :-1]), "has states of the shape"),
        (replace(group, states=group.states.half()), "float16"),
        (other, "a trajectory of 2 actions, and the sampler has 3"),
        (
            replace(group, scored=replace(group.scored, completion_ids=others)),
            "other actions",
        ),
        (replace(group, scored=replace(group.scored, rewards=(0.0, math.inf))), "reward 1 of the group is inf"),
        (replace(group, scored=replace(group.scored, versions=np.full(6, 7, np.int32))), "a token is of version 7"),
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = DiffusionTrainer(model, sampler, settings_of(), total_steps=4)
    for one, message in cases:
        with pytest.raises(ConfigError, match=message):
            trainer.step([one], step=1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    trainer.step([group], step=1)


@pytest.mark.parametrize(
    ("algorithm", "diffusion", "message"),
    [
        ({"entropy_coefficient": 0.1}, {}, "set it to 0"),
        ({"old": "rollout"}, {"ratio": "normalised"}, "set policy.algorithm.old = 'proximal'"),
    ],
)
def test_settings_without_a_meaning_are_refused(algorithm: Any, diffusion: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiffusionTrainer(
            tiny("wan"),
            sampler_of(),
            with_diffusion(settings_of(**algorithm), DiffusionSettings(**diffusion)),
            total_steps=1,
        )


def reward_of(ends: Tensor) -> list[float]:
    """Reward of latents: the mean of their first channel."""
    return [float(one[0].mean()) for one in ends]


@pytest.mark.parametrize("name", ["wan", "cosmos"])
def test_the_reward_rises(name: str) -> None:
    """Of a random model, within a few steps (reference: world-models, "fast CPU learning test")."""
    model = FAMILIES[name](num_layers=1)
    sampler = sampler_of(sigmas=(1.0, 0.9, 0.75, 0.5, 0.25, 0.0))
    settings = settings_of(clip_low=0.001, clip_high=0.001)
    settings = settings.model_copy(update={"optimizer": OptimizerSettings(learning_rate=3e-3)})
    trainer = DiffusionTrainer(
        model,
        sampler,
        with_diffusion(settings, DiffusionSettings(actions_per_microbatch=64)),
        total_steps=25,
    )
    means = []
    for step in range(1, 26):
        probe = sampled(model, name, sampler, [0.0] * 8, seed=step, version=step - 1)
        rewards = reward_of(probe.states[:, -1])
        means.append(sum(rewards) / len(rewards))
        group = replace(probe, scored=replace(probe.scored, rewards=tuple(rewards)))
        trainer.step([group], step=step)
    assert np.mean(means[-3:]) - np.mean(means[:3]) > 0.1, means
