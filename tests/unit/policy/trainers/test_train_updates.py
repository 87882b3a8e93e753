"""Steps of several optimizer updates, and off-policy corrections, against a plain loop with torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_rl import Completion, assert_same_gradients, double, logprobs_of, near, plain_loss, rows_of

from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings, CorrectionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.errors import StepBrokenError
from starling.policy.train.loss.credit import StepGroups
from starling.policy.train.model.load import version_tensors
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
Factor = Callable[[Completion], list[float]]
SHAPES = [(3, [8, 0, 9]), (2, [1, 6, 7]), (5, [5, 4, 6]), (1, [2, 10, 0])]
PARTS = {1: [[0, 1, 2, 3]], 2: [[0, 3], [1, 2]], 9: [[0], [1], [2], [3]]}
"""What `SHAPES` are cut into: 29 and 29 tokens, or each group by itself."""
SEED = 6
"""Of rollouts that some completion of a negative advantage has drifted from."""
RATE, BOUND, EPS = 1e-2, 0.3, 1e-3
"""AdamW divides by |gradient| + EPS: with a tiny one it would make rounding errors of gradients near 0 large."""


def settings(**algorithm: Any) -> PolicySettings:
    optimizer = OptimizerSettings(learning_rate=RATE, warmup_steps=2, max_grad_norm=BOUND, eps=EPS)
    return PolicySettings(
        optimizer=optimizer, algorithm=AlgorithmSettings(**algorithm), tokens_per_microbatch=40, share_prompts=True
    )


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=EPS)


def plain_step(
    name: str,
    model: Any,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[ScoredGroup],
    *,
    rate: float,
    parts: Sequence[Sequence[int]],
    passes: int = 1,
    proximal: bool = False,
    factor: Factor | None = None,
) -> list[float]:
    """Make one version. Returns the losses of its updates."""
    rows = rows_of(name, groups)
    first = logprobs_of(model, groups)
    optimizer.param_groups[0]["lr"] = rate
    losses = []
    for part in [part for _ in range(passes) for part in parts]:
        loss = plain_loss(
            name,
            model,
            [groups[index] for index in part],
            rows=[rows[index] for index in part],
            old=[first[index] for index in part] if proximal else None,
            factor=factor,
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name].detach(), rtol=0.0, atol=1e-6, msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "proximal", "minibatches", "passes"),
    [
        ("dapo", False, 2, 1),
        ("dapo", True, 2, 2),
        ("grpo", True, 9, 1),
        ("reinforce_pp", False, 2, 2),  # whose advantages are over the whole step, not over an update
        ("gdpo", False, 2, 1),  # likewise
        ("dr_grpo", False, 1, 3),
        ("gspo", True, 2, 1),
        ("decoupled_ppo", True, 2, 2),
        ("decoupled_ppo", True, 1, 1),
    ],
)
def test_updates_equal_plain_loop(
    tiny: Make, make_groups: Make, name: str, proximal: bool, minibatches: int, passes: int
) -> None:
    plain, model = double(tiny()), tiny()
    optimizer = adamw(plain)
    old = None if name == "decoupled_ppo" else ("proximal" if proximal else "rollout")
    chosen = settings(name=name, num_minibatches=minibatches, num_passes=passes, old=old, aggregate_tokens=12)
    trainer = RlTrainer(model, chosen, total_steps=9)
    for step in (1, 2):
        groups = near(plain, make_groups(SHAPES, seed=step), 1.0 if name == "decoupled_ppo" else 0.1, seed=step)
        rate = RATE * step / 2  # the warm-up goes by steps, not by updates
        parts = PARTS[minibatches]
        losses = plain_step(name, plain, optimizer, groups, rate=rate, parts=parts, passes=passes, proximal=proximal)
        metrics = trainer.step(groups, step=step)
        assert metrics["loss"] == pytest.approx(math.fsum(losses) / len(losses), abs=2e-6)
        assert metrics["num_updates"] == len(losses) == len(parts) * passes
        assert metrics["learning_rate"] == pytest.approx(rate)
        assert trainer.optimizer.num_steps == step
        assert_same_weights(model, plain)


def test_updates_keep_group_temperatures(tiny: Make, make_groups: Make) -> None:
    """With and without a temperature per group, before the first update and in each update."""
    plain, model = double(tiny()), tiny()
    own = (0.6, 0.0, 0.0, 1.25)
    drawn = [replace(group, temperature=value) for group, value in zip(make_groups(SHAPES), own, strict=True)]
    groups = near(plain, drawn, 0.1)
    plain_step("dapo", plain, adamw(plain), groups, rate=RATE / 2, parts=PARTS[2], passes=2, proximal=True)
    chosen = settings(name="dapo", old="proximal", num_minibatches=2, num_passes=2)
    RlTrainer(model, chosen, total_steps=9).step(groups, step=1)
    assert_same_weights(model, plain)


def test_updates_old_setting_selects_denominator(tiny: Make, make_groups: Make) -> None:
    """The denominator is computed before the first update: not by the rollout, nor before each update."""
    groups = near(tiny(), make_groups(SHAPES), 0.1)
    weights = {}
    for old in ("rollout", "proximal"):
        model = tiny()
        RlTrainer(model, settings(name="dapo", old=old, num_passes=3), total_steps=9).step(groups, step=2)
        weights[old] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert (weights["rollout"] - weights["proximal"]).abs().max() > 1e-4


def weights_of(one: Completion, level: str) -> list[float]:
    logs = [old - rollout for old, rollout in zip(one.old, one.rollout, strict=True)]
    if level == "token":
        return [math.exp(value) for value in logs]
    total = math.fsum(logs) if level == "sequence" else math.fsum(logs) / max(1, len(logs))
    return [math.exp(total)] * len(logs)


def truncated(level: str, high: float) -> Factor:
    return lambda one: [min(weight, high) for weight in weights_of(one, level)]


def masked(level: str, low: float, high: float) -> Factor:
    return lambda one: [weight if low <= weight <= high else 0.0 for weight in weights_of(one, level)]


def drifted(high: float) -> Factor:
    def factor(one: Completion) -> list[float]:
        drift = math.fsum(a - b.item() for a, b in zip(one.rollout, one.new, strict=True)) / max(1, len(one.new))
        return [0.0 if one.advantage < 0 and drift > high else 1.0] * len(one.new)

    return factor


def both(one: Completion) -> list[float]:
    return [a * b for a, b in zip(truncated("token", 1.4)(one), masked("geometric", 0.8, 1.3)(one), strict=True)]


CORRECTIONS: dict[str, tuple[list[dict[str, Any]], Factor, str]] = {
    "truncate token": ([{"level": "token", "high": 1.4}], truncated("token", 1.4), "truncate_token"),
    "truncate sequence": ([{"level": "sequence", "high": 1.5}], truncated("sequence", 1.5), "truncate_sequence"),
    "truncate geometric": ([{"level": "geometric", "high": 1.1}], truncated("geometric", 1.1), "truncate_geometric"),
    "mask token": ([{"level": "token", "low": 0.6, "high": 1.5}], masked("token", 0.6, 1.5), "mask_token"),
    "mask sequence": ([{"level": "sequence", "low": 0.3, "high": 4.0}], masked("sequence", 0.3, 4.0), "mask_sequence"),
    "mask geometric": (
        [{"level": "geometric", "low": 0.9, "high": 1.2}],
        masked("geometric", 0.9, 1.2),
        "mask_geometric",
    ),
    "sequence_mask": ([{"high": 0.02}], drifted(0.02), "sequence_mask"),
    "both": (
        [
            {"kind": "truncate", "level": "token", "high": 1.4},
            {"kind": "mask", "level": "geometric", "low": 0.8, "high": 1.3},
        ],
        both,
        "mask_geometric",
    ),
}


def corrections(name: str) -> tuple[CorrectionSettings, ...]:
    kind = name.partition(" ")[0]
    return tuple(CorrectionSettings(**({"kind": kind} | given)) for given in CORRECTIONS[name][0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_equal_plain_reference(tiny: Make, make_groups: Make, name: str) -> None:
    """With one update, the proximal log-probabilities are those of its forward pass."""
    _, factor, metric = CORRECTIONS[name]
    plain, model = double(tiny()), tiny().double()
    groups = near(plain, make_groups(SHAPES), 0.4, seed=SEED)
    expected = plain_loss("dapo", plain, groups, old=logprobs_of(plain, groups), factor=factor)
    expected.backward()  # type: ignore[no-untyped-call]
    chosen = settings(name="dapo", old="proximal", corrections=corrections(name))
    still = OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0)
    trainer = RlTrainer(model, chosen.model_copy(update={"optimizer": still}), total_steps=1)
    metrics = trainer.step(groups, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=2e-7, rel=2e-6)
    assert 0.0 < metrics[f"{metric}_fraction"] < 1.0
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("name", ["truncate sequence", "mask token", "sequence_mask", "both"])
def test_corrected_updates_equal_plain_loop(tiny: Make, make_groups: Make, name: str) -> None:
    """The weights use the proximal log-probabilities in every update, the drift uses the trained ones."""
    plain, model = double(tiny()), tiny()
    groups = near(plain, make_groups(SHAPES), 0.4, seed=SEED)
    factor = CORRECTIONS[name][1]
    plain_step(
        "dapo", plain, adamw(plain), groups, rate=RATE / 2, parts=PARTS[2], passes=2, proximal=True, factor=factor
    )
    chosen = settings(name="dapo", old="proximal", corrections=corrections(name), num_minibatches=2, num_passes=2)
    RlTrainer(model, chosen, total_steps=9).step(groups, step=1)
    assert_same_weights(model, plain)


def test_empty_corrections_override_the_algorithms(tiny: Make, make_groups: Make) -> None:
    """An empty list removes the algorithm's corrections."""
    groups = near(tiny(), make_groups(SHAPES), 1.0)
    with_its_own = RlTrainer(tiny(), settings(name="decoupled_ppo"), total_steps=1).step(groups, step=1)
    without = RlTrainer(tiny(), settings(name="decoupled_ppo", corrections=()), total_steps=1).step(groups, step=1)
    assert with_its_own["mask_token_ratio_max"] > 5.0
    assert "mask_token_ratio_max" not in without
    assert with_its_own["loss"] != without["loss"]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 15))
def test_minibatches_balance_groups_and_tokens(num_tokens: list[int], count: int) -> None:
    """The largest differencing method guarantees a spread of at most the longest group."""
    groups = tuple(
        ScoredGroup(
            prompt_ids=np.array([1], dtype=np.int32),
            completion_ids=np.zeros(tokens, dtype=np.int32),
            logprobs=np.zeros(tokens, dtype=np.float32),
            versions=np.zeros(tokens, dtype=np.int32),
            lengths=(tokens,),
            rewards=(0.0,),
        )
        for tokens in num_tokens
    )
    scored = StepGroups(groups, tuple([float(at)] for at in range(len(groups))), tuple([0.0] for _ in groups))
    parts = scored.split(count)
    assert len(parts) == min(count, len(groups))
    sizes = [len(part.groups) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    totals = [sum(part_group.lengths[0] for part_group in part.groups) for part in parts]
    assert sum(totals) == sum(num_tokens)
    assert max(totals) - min(totals) <= max(num_tokens)
    order = [int(row[0]) for part in parts for row in part.advantages]
    assert sorted(order) == list(range(len(groups)))  # each once
    for part in parts:
        assert all(group is groups[int(row[0])] for group, row in zip(part.groups, part.advantages, strict=True))
    again = replace(scored).split(count)
    assert [part.advantages for part in again] == [part.advantages for part in parts]


def test_loss_failing_between_updates_breaks_the_step(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]], tmp_path: Path
) -> None:
    """Then the weights are not a version; before the first update they are unchanged."""
    (tmp_path / "moody.py").write_text(
        "from starling.algo.algorithm import Algorithm\n"
        "from starling.algo.loss.ppo import ppo_clip\n"
        "calls = []\n"
        "def loss(tokens, *, calm=1):\n"
        "    calls.append(1)\n"
        "    if len(calls) > calm:\n"
        "        raise KeyError('tea')\n"
        "    return ppo_clip(tokens)\n"
        "algorithm = Algorithm(loss=loss)\n"
    )
    for calm, kind in ((0, ConfigError), (2, StepBrokenError)):  # of all calls, and one is over
        model = tiny()
        name = f"{tmp_path / 'moody.py'}:algorithm"
        algorithm = AlgorithmSettings(name=name, options={"calm": calm}, num_passes=3, skip_zero_advantage=False)
        trainer = RlTrainer(model, PolicySettings(algorithm=algorithm), total_steps=1)
        before = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
        with pytest.raises(ConfigError, match="tea") as caught:
            trainer.step(make_groups([(3, [4, 2])]), step=1)
        assert type(caught.value) is kind
        kept = all(torch.equal(tensor, before[name]) for name, tensor in version_tensors(model).items())
        assert kept == (kind is ConfigError)


def test_minibatch_without_tokens_keeps_step_and_metrics(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    equal, other = make_groups([(3, [4, 2]), (5, [3, 3])])
    equal = replace(equal, rewards=(1.0, 1.0))
    algorithm = AlgorithmSettings(num_minibatches=2)
    trainer = RlTrainer(tiny(), PolicySettings(algorithm=algorithm), total_steps=1)
    metrics = trainer.step([equal, other], step=1)
    assert metrics["num_updates"] == 2.0
    assert metrics["num_trained_tokens"] == 6.0
    assert {"mismatch_kl", "ess_token"} <= metrics.keys()
    assert metrics["clip_low"] == metrics["clip_high"] == 0.2  # the loss's own
