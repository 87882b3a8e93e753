"""Settings that operators change in a running job apply from their step, exactly as if set in the recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states_on_disk import resume, save

from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import CHANGEABLE, PolicySettings, changed
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.learner import Learner

torch.set_num_threads(1)

SHAPES = [(6, [4, 9, 1, 3]), (3, [2, 2, 7, 5])]
NUM_STEPS = 6
Make = Callable[..., Any]


def settings(**changes: float) -> PolicySettings:
    """Return a recipe's settings with changes by the last parts of their keys."""
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 2, "schedule": "cosine", "max_grad_norm": 0.5}
    optimizer |= {key: value for key, value in changes.items() if key in optimizer}
    algorithm = {key: value for key, value in changes.items() if key not in optimizer}
    made = OptimizerSettings(**optimizer)
    return PolicySettings(optimizer=made, sft=SftStepSettings(optimizer=made), algorithm=AlgorithmSettings(**algorithm))


def reinforce(learner: Learner, make_groups: Make, step: int, **changes: float) -> dict[str, float]:
    groups = make_groups(SHAPES, seed=step, version=step - 1)
    settings_changes = {f"policy.{key.replace('__', '.')}": value for key, value in changes.items()}
    return learner.reinforce(groups, step=step, num_steps=NUM_STEPS, changes=settings_changes)


def supervise(learner: Learner, make_groups: Make, step: int, changes: dict[str, float]) -> dict[str, float]:
    examples = [SftExample(group.prompt_ids, group.completion_ids) for group in make_groups(SHAPES, seed=step)]
    return learner.supervise(examples, num_steps=NUM_STEPS, changes=changes)


def same(one: Learner, other: Learner) -> bool:
    return all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())


CHANGES = [
    ("optimizer.learning_rate", 1e-2),
    ("optimizer.max_grad_norm", 0.01),
    ("optimizer.max_grad_norm", 0.0),
    ("algorithm.clip_low", 0.95),
    ("algorithm.clip_high", 3.0),
    ("algorithm.kl_coefficient", 0.3),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("key", "value"), CHANGES)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_changed_setting_equals_setting_in_recipe(
    tiny: Make, make_groups: Make, tmp_path: Path, key: str, value: float, first: int
) -> None:
    learner, plain = (Learner(lambda: tiny(), settings()) for _ in range(2))
    for step in range(1, first):
        reinforce(learner, make_groups, step)
        reinforce(plain, make_groups, step)
    save(learner, tmp_path, first - 1)
    recipe = Learner(lambda: tiny(), settings(**{key.rpartition(".")[2]: value}))
    resume(recipe, tmp_path)
    for step in (first, first + 1):
        metrics = reinforce(learner, make_groups, step, **{key.replace(".", "__"): value})
        assert metrics == reinforce(recipe, make_groups, step)
        reinforce(plain, make_groups, step)
    assert same(learner, recipe)
    assert not same(learner, plain), "the change must be seen in the weights for this to prove anything"
    if key != "optimizer.learning_rate":  # whose metric is the rate of the step, not its peak
        assert metrics[key.rpartition(".")[2]] == value


def test_changed_setting_applies_only_to_its_steps(tiny: Make, make_groups: Make) -> None:
    learner = Learner(lambda: tiny(), settings())
    rates = []
    for step, changes in enumerate(({}, {"optimizer__learning_rate": 1.0}, {}), 1):
        rates.append(reinforce(learner, make_groups, step, **changes)["learning_rate"])
    assert rates == [3e-3 / 2, 1.0, 3e-3], "half of the peak in the first step of the warm-up of two"


def test_kl_term_can_be_removed_and_added_again(tiny: Make, make_groups: Make) -> None:
    learner, other = (Learner(lambda: tiny(), settings(kl_coefficient=0.1)) for _ in range(2))
    without = Learner(lambda: tiny(), settings())
    metrics = reinforce(learner, make_groups, 1, algorithm__kl_coefficient=0.0)
    assert metrics == reinforce(without, make_groups, 1)
    assert same(learner, without)
    back = reinforce(learner, make_groups, 2)
    reinforce(other, make_groups, 1, algorithm__kl_coefficient=0.0)
    assert back == reinforce(other, make_groups, 2)
    assert back["kl_reference"] > 0.0


def test_unavailable_reference_is_refused_without_change(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    learner = Learner(lambda: tiny(), settings())
    supervise(learner, make_groups, 1, {})
    reinforce(learner, make_groups, 2)
    save(learner, tmp_path, 2)
    before = {name: tensor.clone() for name, tensor in learner.tensors.items()}
    resumed = Learner(lambda: tiny(), settings())
    resume(resumed, tmp_path)
    for tried in (learner, resumed):
        with pytest.raises(
            ConfigError, match=r"kl_coefficient = 0\.5 needs version 1, with which these steps began, as its reference"
        ):
            reinforce(tried, make_groups, 3, algorithm__kl_coefficient=0.5)
        assert all(torch.equal(tensor, before[name]) for name, tensor in tried.tensors.items())
    assert reinforce(learner, make_groups, 3) == reinforce(resumed, make_groups, 3)


def test_changed_learning_rate_applies_to_its_kind_of_step(tiny: Make, make_groups: Make) -> None:
    learner = Learner(lambda: tiny(), settings())
    changes = {"policy.optimizer.learning_rate": 0.7, "policy.sft.optimizer.learning_rate": 0.5}
    supervise(learner, make_groups, 1, changes)
    assert supervise(learner, make_groups, 2, changes)["learning_rate"] == 0.5
    learner = Learner(lambda: tiny(), settings())
    examples = [SftExample(group.prompt_ids, group.completion_ids) for group in make_groups(SHAPES, seed=1)]
    metrics = learner.supervise(examples, num_steps=1, changes={"policy.sft.optimizer.max_grad_norm": 0.25})
    assert metrics["max_grad_norm"] == 0.25


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("policy.optimizer.learning_rat", 1.0, "policy.optimizer.learning_rat = 1 cannot be changed from one step"),
        ("policy.tokens_per_microbatch", 9.0, "policy.tokens_per_microbatch = 9 cannot be changed from one step"),
        ("sampling.temperature", 0.5, "sampling.temperature = 0.5 cannot be changed from one step"),
        ("policy.optimizer.learning_rate", -1.0, "policy.optimizer.learning_rate = -1.0: Input should be greater than"),
        ("policy.algorithm.clip_low", 1.5, "policy.algorithm.clip_low = 1.5: Input should be less than or equal to 1"),
        ("policy.algorithm.kl_coefficient", float("nan"), "policy.algorithm.kl_coefficient = nan: "),
    ],
)
def test_unchangeable_setting_is_refused(tiny: Make, make_groups: Make, key: str, value: float, sentence: str) -> None:
    learner = Learner(lambda: tiny(), settings())
    before = {name: tensor.clone() for name, tensor in learner.tensors.items()}
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        learner.reinforce(make_groups(SHAPES), step=1, num_steps=1, changes={key: value})
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors.items())
    assert learner.trainer is None


def test_changeable_keys_are_settings() -> None:
    one = changed(settings(), dict.fromkeys(CHANGEABLE, 0.5))
    assert (one.optimizer.learning_rate, one.optimizer.max_grad_norm) == (0.5, 0.5)
    assert (one.sft.optimizer.learning_rate, one.sft.optimizer.max_grad_norm) == (0.5, 0.5)
    assert (one.algorithm.clip_low, one.algorithm.clip_high, one.algorithm.kl_coefficient) == (0.5, 0.5, 0.5)
    assert changed(settings(), {}) == settings()
