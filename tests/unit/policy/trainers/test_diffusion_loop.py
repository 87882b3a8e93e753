"""The loop of a diffusion model: an engine's trajectories are trained, published, and adopted between two steps."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiny_diffusion import CHANNELS, FAMILIES, NUM_TEXT_TOKENS, TEXT_WIDTH, with_diffusion

from starling.algo.diffusion.sampler import make_sampler
from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.common.wire.messages import Sampling
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.diffusion.groups import DenoisedGroup, read_group
from starling.policy.train.diffusion.trainer import DiffusionTrainer
from starling.policy.train.model.load import version_tensors
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.diffusion.engine import DiffusionEngine
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.adapters import add_adapters, base_digest, base_tensors
from starling.weightsync.tensors.modules import layout_of

SHAPE = (CHANNELS, 2, 8, 8)
SAMPLER = make_sampler((1.0, 0.9, 0.75, 0.5, 0.25, 0.0), "sde", 0.7)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def request(step: int, count: int = 8) -> GroupRequest:
    text = np.random.default_rng(step % 2).standard_normal((NUM_TEXT_TOKENS, TEXT_WIDTH), np.float32)
    return GroupRequest(f"g{step}", [0], count, Sampling(max_tokens=8, seed=step), {"text_embeddings": text})


def scored(result: GroupResult) -> DenoisedGroup:
    """Return a group with its rewards: the mean of the first channel of each end."""
    completions = result.completions
    group = ScoredGroup(
        prompt_ids=result.prompt_ids,
        completion_ids=np.concatenate([one.token_ids for one in completions]),
        logprobs=np.concatenate([one.logprobs for one in completions]),
        versions=np.concatenate([one.versions for one in completions]),
        lengths=tuple(len(one.token_ids) for one in completions),
        rewards=tuple(float(end[0].mean()) for end in result.tensors["latents"]),
        prompt_id=result.lease,
    )
    return read_group(group, result.tensors, NUM_TEXT_TOKENS, CPU)


@pytest.mark.parametrize("name", ["wan", "cosmos"])
def test_the_reward_rises_while_generation_goes_on(name: str) -> None:
    """The next group is under way while a step is made, so its steps have two versions, and a staleness of 1."""
    torch.manual_seed(0)
    model, copy = FAMILIES[name](num_layers=1), FAMILIES[name](num_layers=1)
    copy.load_state_dict(model.state_dict())
    settings = PolicySettings(
        algorithm=AlgorithmSettings(name="decoupled_ppo", clip_low=0.001, clip_high=0.001),
        optimizer=OptimizerSettings(learning_rate=3e-3),
    )
    trainer = DiffusionTrainer(model, SAMPLER, settings, total_steps=25)
    tensors = dict(model.named_parameters())
    engine = DiffusionEngine(copy.eval().requires_grad_(False), SAMPLER, SHAPE, text_length=NUM_TEXT_TOKENS)
    rewards, stale = list[float](), list[float]()
    with closing(engine), Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        plan = make_plan(publisher.layout, engine.layout())
        engine.add(request(1))
        for step in range(1, 26):
            group = finish(engine)
            engine.add(request(step + 1))
            engine.step()  # with the weights before the step
            metrics = trainer.step([group], step=step)
            rewards.append(metrics["reward_mean"])
            stale.append(metrics["staleness_max"])
            offer = publisher.publish(step, {key: tensor.detach() for key, tensor in tensors.items()})
            engine.pull(offer, plan, deadline_s=60.0, cancelled=lambda: False, progress=lambda _: None)
            assert engine.adopt("keep").proven
    assert stale == [0.0, *[1.0] * 24]
    assert np.mean(rewards[-3:]) - np.mean(rewards[:3]) > 0.1, rewards


def finish(engine: DiffusionEngine) -> DenoisedGroup:
    for _ in range(SAMPLER.num_steps + 1):
        for result in engine.step():
            assert isinstance(result, GroupResult), result
            return scored(result)
    raise AssertionError("the group does not end")


def test_adapters_alone_are_trained_published_and_adopted() -> None:
    """The reference of the divergence is then the model with its first adapters, which add nothing."""
    lora = LoraSettings(rank=2, alpha=4.0, targets=("to_q", "to_k", "to_v", "to_out.0"))
    torch.manual_seed(0)
    model, copy = FAMILIES["wan"](num_layers=1), FAMILIES["wan"](num_layers=1)
    copy.load_state_dict(model.state_dict())
    for seed, one in enumerate((model, copy)):
        add_adapters(one, lora, seed=seed)
    base = {name: tensor.clone() for name, tensor in base_tensors(model)}
    settings = PolicySettings(
        algorithm=AlgorithmSettings(kl_coefficient=0.01), optimizer=OptimizerSettings(learning_rate=1e-2)
    )
    trainer = DiffusionTrainer(
        model,
        SAMPLER,
        with_diffusion(settings, DiffusionSettings(actions_per_microbatch=10)),
        total_steps=3,
    )
    tensors = version_tensors(model)
    assert tensors
    assert all("lora_" in name for name in tensors)
    engine = DiffusionEngine(
        copy.eval().requires_grad_(False), SAMPLER, SHAPE, text_length=NUM_TEXT_TOKENS, base=base_digest(copy, lora)
    )
    layout = layout_of(tensors, "policy-0", base=base_digest(model, lora))
    with closing(engine), Publisher(layout, transport="local") as publisher:
        plan = make_plan(publisher.layout, engine.layout())
        for step in range(3):
            offer = publisher.publish(step, tensors)
            engine.pull(offer, plan, deadline_s=60.0, cancelled=lambda: False, progress=lambda _: None)
            assert engine.adopt("keep").proven
            engine.add(request(step, count=4))
            metrics = trainer.step([finish(engine)], step=step + 1)
            assert max(value for name, value in metrics.items() if name.startswith("ratio_error/")) < 2e-5
            assert (metrics["reference_kl"] > 0.0) == (step > 0), "the first adapters add nothing"
    for name, tensor in base_tensors(model):
        assert torch.equal(tensor, base[name]), name


def test_ratios_of_an_engines_own_version_are_1() -> None:
    torch.manual_seed(0)
    model = FAMILIES["wan"]()
    engine = DiffusionEngine(model.eval().requires_grad_(False), SAMPLER, SHAPE, text_length=NUM_TEXT_TOKENS)
    with closing(engine):
        engine.add(request(1))
        group = finish(engine)
    model.requires_grad_(True)
    settings = PolicySettings(algorithm=AlgorithmSettings(clip_low=1e-4, clip_high=1e-4))
    metrics = DiffusionTrainer(model, SAMPLER, settings, total_steps=1).step([group], step=1)
    errors = [value for name, value in metrics.items() if name.startswith("ratio_error/")]
    assert len(errors) == len(SAMPLER.actions)
    assert max(errors) < 2e-5, "below any clip bound in use"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": None, "latents": None}, "it has neither states nor latents"),
        ({"text_embeddings": None}, "the prompt has no text_embeddings"),
        ({"text_embeddings": np.zeros((9, TEXT_WIDTH), np.float32)}, "has 9 tokens, and the model reads 1 to 5"),
        ({"pixels": np.zeros((1, 2))}, "has the tensor 'pixels'"),
    ],
)
def test_tensors_that_are_no_trajectories_are_refused(
    changes: dict[str, npt.NDArray[Any] | None], message: str
) -> None:
    scored_group = ScoredGroup(
        prompt_ids=np.zeros(1, np.int32),
        completion_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        lengths=(1,),
        rewards=(0.0,),
        prompt_id="train/0/3",
    )
    tensors: dict[str, Any] = {
        "text_embeddings": np.zeros((2, TEXT_WIDTH), np.float32),
        "states": np.zeros((1, 2, *SHAPE), np.float32),
        "latents": np.zeros((1, *SHAPE), np.float32),
        **changes,
    }
    with pytest.raises(ConfigError, match=rf"group 'train/0/3' cannot be trained: .*{message}"):
        read_group(scored_group, {k: v for k, v in tensors.items() if v is not None}, NUM_TEXT_TOKENS, CPU)
