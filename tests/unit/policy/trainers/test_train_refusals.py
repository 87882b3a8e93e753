"""Steps that are refused or have no gradient: the error, and that nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from plain_rl import RAGGED
from torch import Tensor

from starling.algo.algorithm import Algorithm
from starling.algo.loss.reinforce import reinforce
from starling.algo.loss.terms import LossTerms, Tokens
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
Rows = Sequence[Sequence[float]]


def too_few(groups: Rows) -> list[list[float]]:
    return [[0.5] * len(group) for group in groups[1:]]


def too_short(groups: Rows) -> list[list[float]]:
    return [[0.5] * (len(group) - (at == 1)) for at, group in enumerate(groups)]


def not_a_number(groups: Rows) -> list[list[float]]:
    return [[math.nan if (at, index) == (2, 3) else 0.5 for index in range(4)] for at in range(len(groups))]


def broken(groups: Rows) -> list[list[float]]:
    return [[1.0 / (len(groups) - 3)] for _ in groups]


def objecting(groups: Rows) -> list[list[float]]:
    raise ValueError(f"{len(groups)} groups are too many")


def nothing(groups: Rows) -> Any:
    return None


def nan_loss(tokens: Tokens) -> LossTerms:
    """NaN in the last completion only, so not all microbatches are affected."""
    bad = tokens.sequence == tokens.num_sequences - 1
    return LossTerms(torch.where(bad, math.nan, tokens.logprobs), {})


def hidden_nan_loss(tokens: Tokens) -> LossTerms:
    """NaN in value with a gradient of 0."""
    return LossTerms(tokens.logprobs.detach() * math.nan + 0.0 * tokens.logprobs, {})


def failing(tokens: Tokens) -> LossTerms:
    raise KeyError("kernel")


def averaged(tokens: Tokens) -> LossTerms:
    return LossTerms((-tokens.advantages * tokens.logprobs).mean(), {})


def summed_metric(tokens: Tokens) -> LossTerms:
    return LossTerms(-tokens.logprobs, {"surprise": tokens.logprobs.detach().sum()})


def detached(tokens: Tokens) -> LossTerms:
    return LossTerms(-tokens.logprobs.detach(), {})


def bare(tokens: Tokens) -> Tensor:
    return -tokens.logprobs


ADVANTAGES = {
    "too_few": (too_few, "the 3 groups of step 2 got 2 lists of advantages: the advantage function"),
    "too_short": (too_short, "the 4 completions of group 'train/0/1' got 3 advantages"),
    "not_a_number": (not_a_number, "completion 3 of group 'train/0/2' got the advantage nan"),
    "broken": (broken, r"advantage function raised ZeroDivisionError\("),
    "objecting": (objecting, r"the groups of step 2 \(train/0/0, .*\) cannot be trained: 3 groups are too many"),
    "nothing": (nothing, r"advantage function raised TypeError\("),
}
LOSSES = {
    "failing": (failing, r"the loss function of policy.algorithm failed: KeyError\('kernel'\)"),
    "averaged": (averaged, r"gave 'loss' in the shape \[\] for 43 tokens: it must give one number per token"),
    "summed_metric": (summed_metric, r"gave 'surprise' in the shape \[\]"),
    "detached": (detached, "does not depend on tokens.logprobs"),
    "bare": (bare, r"loss function of policy.algorithm failed: AttributeError\("),
}
algorithms = {name: Algorithm(reinforce, function) for name, (function, _) in ADVANTAGES.items()}
algorithms |= {name: Algorithm(function) for name, (function, _) in LOSSES.items()}
algorithms |= {"nan_loss": Algorithm(nan_loss), "hidden_nan_loss": Algorithm(hidden_nan_loss)}
# Where the settings find them.
globals().update({f"{name}_algorithm": algorithm for name, algorithm in algorithms.items()})


def own(name: str, **changes: Any) -> PolicySettings:
    algorithm = AlgorithmSettings(name=f"{__name__}:{name}_algorithm", skip_zero_advantage=False, **changes)
    return settings(algorithm)


def settings(algorithm: AlgorithmSettings) -> PolicySettings:
    return PolicySettings(optimizer=OptimizerSettings(learning_rate=1e-3), algorithm=algorithm)


def begun(model: Any, groups: list[ScoredGroup]) -> RlTrainer:
    """Return a trainer after one step, so that its moments are not 0."""
    trainer = RlTrainer(model, settings(AlgorithmSettings()), total_steps=9)
    trainer.step(groups, step=1)
    return trainer


def held(model: torch.nn.Module, trainer: RlTrainer) -> dict[str, Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return found | {name: tensor.clone() for name, tensor in trainer.optimizer.state_tensors().items()}


def assert_held(model: torch.nn.Module, trainer: RlTrainer, before: dict[str, Tensor]) -> None:
    after = held(model, trainer)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", [*ADVANTAGES, *LOSSES])
def test_failing_user_function_is_refused_without_change(tiny: Make, make_groups: Make, name: str) -> None:
    model, groups = tiny(), make_groups(RAGGED)
    chosen = own(name)
    trainer = begun(model, groups)
    before = held(model, trainer)
    with pytest.raises(ConfigError, match=(ADVANTAGES | LOSSES)[name][1]):
        trainer.step(groups, step=2, settings=chosen)
    assert_held(model, trainer, before)
    assert trainer.optimizer.num_steps == 1


def test_option_unknown_to_the_loss_is_refused(tiny: Make, make_groups: Make) -> None:
    trainer = RlTrainer(tiny(), settings(AlgorithmSettings(name="dual_clip", dual_clip=0.5)), total_steps=1)
    with pytest.raises(ConfigError, match=r"policy.algorithm failed: dual_clip is 0\.5: it must be above 1"):
        trainer.step(make_groups(RAGGED), step=1)


@pytest.mark.parametrize("name", ["nan_loss", "hidden_nan_loss"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_nan_loss_skips_the_step(tiny: Make, make_groups: Make, name: str, minibatches: int) -> None:
    model, groups = tiny(), make_groups(RAGGED)
    chosen = own(name, num_minibatches=minibatches)
    trainer = begun(model, groups)
    before = held(model, trainer)
    metrics = trainer.step(groups, step=2, settings=chosen)
    assert metrics["skipped_step"] == 1.0
    assert metrics["num_updates"] == minibatches
    assert math.isnan(metrics["loss"])
    assert_held(model, trainer, before)
    assert trainer.optimizer.num_steps == 2  # skipped steps count for the schedule
    assert trainer.step(groups, step=3)["skipped_step"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_group_and_index(tiny: Make, make_groups: Make, bad: float) -> None:
    groups = make_groups(RAGGED)
    groups[1] = replace(groups[1], rewards=(0.1, 0.2, bad, 0.4))
    model = tiny()
    trainer = begun(model, make_groups(RAGGED))
    before = held(model, trainer)
    with pytest.raises(ConfigError, match=f"group 'train/0/1' cannot be trained: reward 2 of the group is {bad}"):
        trainer.step(groups, step=2)
    assert_held(model, trainer, before)


def test_groups_without_scores_are_refused_where_the_advantage_takes_them(tiny: Make, make_groups: Make) -> None:
    groups = make_groups(RAGGED)
    groups[1] = replace(groups[1], scores=())
    model = tiny()
    trainer = begun(model, make_groups(RAGGED))
    before = held(model, trainer)
    with pytest.raises(ConfigError, match=r"'train/0/1' cannot be trained: .* takes the scores of each scorer"):
        trainer.step(groups, step=2, settings=settings(AlgorithmSettings(name="gdpo")))
    assert_held(model, trainer, before)


def test_equal_scores_have_no_gradient_whatever_the_rewards(tiny: Make, make_groups: Make) -> None:
    [group] = make_groups([(4, [5, 5, 5])])
    equal = tuple(msgspec.structs.replace(one, values=(0.1, 0.1, 0.1)) for one in group.scores)
    trainer = RlTrainer(tiny(), settings(AlgorithmSettings(name="gdpo")), total_steps=9)
    metrics = trainer.step([replace(group, scores=equal)], step=1)
    assert (metrics["loss"], metrics["grad_norm"], metrics["zero_advantage_share"]) == (0.0, 0.0, 1.0)
    assert metrics["reward_std"] > 0.0


NOTHING_FROM_ONE = ["grpo", "dr_grpo", "gspo", "rloo", "aipo", "reinforce_pp_baseline", "decoupled_ppo"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NOTHING_FROM_ONE)
@pytest.mark.parametrize("rewards", [(0.7,), (0.1, 0.1, 0.1)])
def test_group_of_one_has_no_gradient(tiny: Make, make_groups: Make, name: str, rewards: tuple[float, ...]) -> None:
    """A group of one, and equal rewards, of which a mean in floating point would differ in the last bit."""
    group = replace(make_groups([(4, [5] * len(rewards))])[0], rewards=rewards)
    model = tiny()
    trainer = RlTrainer(model, settings(AlgorithmSettings(name=name)), total_steps=9)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    metrics = trainer.step([group], step=1)
    assert (metrics["loss"], metrics["grad_norm"], metrics["zero_advantage_share"]) == (0.0, 0.0, 1.0)
    assert metrics["num_trained_tokens"] == 0.0
    assert metrics["skipped_step"] == 0.0
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.named_parameters())


def test_groups_of_one_learn_with_batch_normalised_advantages(tiny: Make, make_groups: Make) -> None:
    groups = make_groups([(4, [5]), (3, [6]), (2, [1])])
    metrics = RlTrainer(tiny(), settings(AlgorithmSettings(name="reinforce_pp")), total_steps=9).step(groups, step=1)
    assert metrics["zero_advantage_share"] == 0.0
    assert metrics["num_trained_tokens"] == 12.0
    assert metrics["grad_norm"] > 0.0


def test_update_without_tokens_is_made(tiny: Make, make_groups: Make) -> None:
    """An update without tokens moves by momentum only."""
    groups = make_groups([(4, [3, 2]), (5, [0, 0]), (2, [6, 1])])
    chosen = settings(AlgorithmSettings(num_minibatches=3, old="proximal"))
    metrics = RlTrainer(tiny(), chosen, total_steps=9).step(groups, step=1)
    assert (metrics["num_updates"], metrics["skipped_step"]) == (3.0, 0.0)
    assert metrics["num_trained_tokens"] == 12.0
    assert math.isfinite(metrics["loss"])
