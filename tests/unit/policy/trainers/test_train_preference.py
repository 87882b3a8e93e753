"""Preference steps against plain references that process one response at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import DpoSettings, RewardModelSettings
from starling.policy.train.data.examples import PreferencePair
from starling.policy.train.model.load import load_model
from starling.policy.train.preference import DpoTrainer, RewardModelTrainer

torch.set_num_threads(1)

SHAPES = [(4, 6, 2), (1, 1, 9), (7, 3, 1), (2, 12, 5)]
STILL = OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0)


def make_pairs(seed: int = 0, shapes: list[tuple[int, int, int]] = SHAPES) -> list[PreferencePair]:
    generator = np.random.default_rng(seed)
    return [
        PreferencePair(*(generator.integers(2, 31, size=size).astype(np.int32) for size in shape), prompt_id=str(index))
        for index, shape in enumerate(shapes)
    ]


def plain_sum(model: Any, prompt: Any, response: Any) -> Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logprobs = model(ids).logits[0].double().log_softmax(-1)
    start = len(prompt) - 1
    picked = [logprobs[start + offset, token] for offset, token in enumerate(response.tolist())]
    return torch.stack(picked).sum()


def plain_dpo(model: Any, reference: Any, pairs: list[PreferencePair], settings: DpoSettings) -> Tensor:
    losses = []
    for pair in pairs:
        sides = []
        for response in (pair.chosen_ids, pair.rejected_ids):
            value = plain_sum(model, pair.prompt_ids, response)
            if reference is not None:
                value = value - plain_sum(reference, pair.prompt_ids, response).detach()
            sides.append(value / len(response) if settings.loss == "ipo" else value)
        difference = sides[0] - sides[1]
        if settings.loss == "ipo":
            losses.append((difference - 1 / (2 * settings.beta)) ** 2)
        else:
            smooth = settings.label_smoothing
            logit = settings.beta * difference
            losses.append(-(1 - smooth) * logsigmoid(logit) - smooth * logsigmoid(-logit))
    return torch.stack(losses).mean()


def assert_same_gradients(plain: torch.nn.Module, model: torch.nn.Module) -> None:
    expected_gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert expected_gradients
    for name, parameter in model.named_parameters():
        if name in expected_gradients:
            assert parameter.grad is not None, name
            difference = torch.linalg.vector_norm(parameter.grad - expected_gradients[name])
            assert difference <= 2e-6 * torch.linalg.vector_norm(expected_gradients[name]) + 1e-7, name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", [20, 10_000])
@pytest.mark.parametrize(
    "dpo",
    [
        DpoSettings(optimizer=STILL),
        DpoSettings(optimizer=STILL, beta=0.5, label_smoothing=0.1),
        DpoSettings(optimizer=STILL, use_reference=False),
        DpoSettings(optimizer=STILL, loss="ipo", beta=0.3),
    ],
)
def test_dpo_step_equals_plain_reference(tiny: Callable[..., Any], budget: int, dpo: DpoSettings) -> None:
    plain, model, first = tiny(seed=3), tiny(seed=3), tiny(seed=1)
    pairs = make_pairs()
    settings = PolicySettings(dpo=dpo, tokens_per_microbatch=budget)
    trainer = DpoTrainer(model, settings, total_steps=2, reference=first)
    expected = plain_dpo(plain, first if dpo.use_reference else None, pairs, dpo)
    expected.backward()  # type: ignore[no-untyped-call]
    metrics = trainer.step(pairs, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["num_sequences"] == 8.0
    assert metrics["num_tokens"] == 39.0
    assert (metrics["num_microbatches"] == 1.0) == (budget > 100)
    assert_same_gradients(plain, model)


def test_dpo_learns_relative_to_initial_model(tiny: Callable[..., Any]) -> None:
    model = tiny()
    settings = PolicySettings(dpo=DpoSettings(optimizer=OptimizerSettings(learning_rate=1e-2)))
    trainer = DpoTrainer(model, settings, total_steps=15)
    first = trainer.step(make_pairs(), step=1)
    assert first["loss"] == pytest.approx(np.log(2.0), abs=1e-6)  # it is its own reference
    assert first["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    for step in range(2, 16):
        last = trainer.step(make_pairs(), step=step)
    assert last["accuracy"] == 1.0
    assert last["loss"] < 0.3
    assert trainer.reference.version == 0


def scorer(folder: Any, tiny: Callable[..., Any]) -> Any:
    tiny().save_pretrained(folder)
    return load_model(folder, scores=True)


@pytest.mark.parametrize("budget", [20, 10_000])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_reward_model_step_equals_plain_reference(
    tiny: Callable[..., Any], tmp_path: Any, budget: int, center: float
) -> None:
    plain, model = scorer(tmp_path, tiny), scorer(tmp_path, tiny)
    pairs, losses = make_pairs(), []
    for pair in pairs:
        scores = []
        for response in (pair.chosen_ids, pair.rejected_ids):
            ids = torch.from_numpy(np.concatenate([pair.prompt_ids, response]).astype(np.int64))[None]
            scores.append(plain.score(plain.base_model(ids).last_hidden_state[0, -1]).double()[0])
        losses.append(-logsigmoid(scores[0] - scores[1]) + center * (scores[0] + scores[1]) ** 2)
    expected = torch.stack(losses).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    chosen = RewardModelSettings(optimizer=STILL, center_coefficient=center)
    settings = PolicySettings(reward_model=chosen, tokens_per_microbatch=budget)
    metrics = RewardModelTrainer(model, settings, total_steps=1).step(pairs, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(plain, model)


def test_reward_model_learns_the_order(tiny: Callable[..., Any], tmp_path: Any) -> None:
    chosen = RewardModelSettings(optimizer=OptimizerSettings(learning_rate=1e-2))
    trainer = RewardModelTrainer(scorer(tmp_path, tiny), PolicySettings(reward_model=chosen), total_steps=15)
    metrics = [trainer.step(make_pairs(), step=step) for step in range(1, 16)]
    assert metrics[-1]["accuracy"] == 1.0
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_invalid_pairs_are_refused(tiny: Callable[..., Any]) -> None:
    ids = np.array([3, 4], dtype=np.int32)
    with pytest.raises(ConfigError, match="'p' has no rejected tokens"):
        PreferencePair(ids, ids, ids[:0], "p")
    with pytest.raises(ConfigError, match="'p' has equal responses"):
        PreferencePair(ids, ids, ids.copy(), "p")
    trainer = DpoTrainer(tiny(max_position_embeddings=12), PolicySettings(), total_steps=1)
    with pytest.raises(ConfigError, match="14 tokens exceeds the 12"):
        trainer.step(make_pairs(), step=1)
    with pytest.raises(ConfigError, match="has no pairs"):
        trainer.step([], step=1)
