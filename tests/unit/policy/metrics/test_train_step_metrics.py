"""Metrics of a step: means over tokens, independent of microbatches and updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plain_rl import ALGORITHMS, CUT, RAGGED, gradients, logprobs_of, near
from property_tests import examples
from torch import Tensor
from vocabulary import VOCABULARY

from starling.algo.algorithm import Algorithm
from starling.policy.settings.algorithm import AlgorithmSettings, CorrectionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
SHAPES = [(3, [8, 0, 9]), (2, [1, 6, 7]), (5, [5, 4, 6]), (1, [2, 10, 0])]
PARTS = [[0, 3], [1, 2]]
"""What two updates train of `SHAPES`."""


def settings(budget: int = 10_000, share: bool = True, rate: float = 1e-2, **algorithm: Any) -> PolicySettings:
    return PolicySettings(
        optimizer=OptimizerSettings(learning_rate=rate, max_grad_norm=0.0),
        algorithm=AlgorithmSettings(**algorithm),
        tokens_per_microbatch=budget,
        share_prompts=share,
    )


def aged(model: Any, make_groups: Make) -> list[ScoredGroup]:
    """Groups close to `model` for step 7: fresh ones, a stale one, and two completions begun under older weights."""
    groups = near(model, make_groups(SHAPES, version=6), 0.3)
    groups[0].versions[8] = 5  # the beginning of its last completion
    groups[1].versions[1:3] = 4  # the beginning of its second completion
    return [*groups[:2], replace(groups[2], versions=np.full_like(groups[2].versions, 3)), groups[3]]


class ExpectedMetrics:
    """Expected metrics of some groups, by a loop over completions."""

    def __init__(self, model: Any, groups: Sequence[ScoredGroup], begun_with: int) -> None:
        self.differences: list[float] = []
        self.sums: list[float] = []
        self.fresh: list[float] = []
        for group, own in zip(groups, logprobs_of(model, groups), strict=True):
            end = 0
            for new in own:
                start, end = end, end + len(new)
                rollout = group.logprobs[start:end].tolist()
                difference = [a - b for a, b in zip(new, rollout, strict=True)]
                self.differences += difference
                self.sums += [math.fsum(difference)] if new else []
                if all(version == begun_with for version in group.versions[start:end]):
                    self.fresh += difference

    def check(self, metrics: dict[str, float]) -> None:
        expected = {
            "ess_token": effective(self.differences),
            "ess_sequence": effective(self.sums),
            "mismatch_mean": np.mean(np.abs(self.fresh)),
            "mismatch_max": max(abs(value) for value in self.fresh),
            "mismatch_k1": -np.mean(self.fresh),
            "mismatch_kl": np.mean([math.exp(value) - 1 - value for value in self.fresh]),
        }
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def effective(logs: Sequence[float]) -> float:
    weights = [math.exp(value) for value in logs]
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


@pytest.mark.parametrize(
    ("chosen", "known"),
    [
        ({}, [0, 1, 2, 3]),
        ({"num_passes": 3}, [0, 1, 2, 3]),
        ({"old": "proximal", "num_minibatches": 2, "num_passes": 2}, [0, 1, 2, 3]),
        ({"old": "rollout", "num_minibatches": 2}, PARTS[0]),
    ],
)
def test_step_mismatch_uses_weights_at_start_of_step(
    tiny: Make, make_groups: Make, chosen: dict[str, Any], known: list[int]
) -> None:
    """Over all tokens if they were computed before an update, otherwise over those of the first update."""
    model = tiny()
    groups = aged(model, make_groups)
    expected_metrics = ExpectedMetrics(model, [groups[index] for index in known], begun_with=6)
    assert 0 < len(expected_metrics.fresh) < len(expected_metrics.differences)
    metrics = RlTrainer(model, settings(30, **chosen), total_steps=9).step(groups, step=7)
    expected_metrics.check(metrics)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_step_staleness_covers_all_trained_tokens(tiny: Make, make_groups: Make, minibatches: int) -> None:
    model = tiny()
    groups = aged(model, make_groups)
    chosen = settings(30, num_minibatches=minibatches, num_passes=2)
    metrics = RlTrainer(model, chosen, total_steps=9).step(groups, step=7)
    ages = Counter(6 - version for group in groups for version in group.versions.tolist())
    shares = {name: value for name, value in metrics.items() if name.startswith("staleness/")}
    assert shares == {f"staleness/{age}": ages[age] / 58 for age in range(4)}
    assert metrics["staleness_max"] == 3.0
    assert metrics["staleness_mean"] == pytest.approx((1 + 2 + 3 * 3) / 12)  # of completions, by their oldest token


def test_step_fractions_equal_plain_count(tiny: Make, make_groups: Make) -> None:
    model = tiny()
    groups = near(model, make_groups(SHAPES), 0.3)
    rows = ALGORITHMS["dapo"].advantage([group.rewards for group in groups])
    clipped, ratios = [], []
    for group, own, row in zip(groups, logprobs_of(model, groups), rows, strict=True):
        end = 0
        for new, advantage in zip(own, row, strict=True):
            start, end = end, end + len(new)
            for one, rollout in zip(new, group.logprobs[start:end].tolist(), strict=True):
                ratio = math.exp(one - rollout)
                ratios.append(ratio)
                clipped.append((advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8))
    for budget in (20, 10_000):
        metrics = RlTrainer(tiny(), settings(budget, name="dapo"), total_steps=9).step(groups, step=1)
        assert metrics["clip_fraction"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-6)
        assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-5)
        k3 = [ratio - 1 - math.log(ratio) for ratio in ratios]
        assert metrics["approx_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)
    assert 0.0 < metrics["clip_fraction"] < 1.0


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_step_metrics_are_independent_of_microbatches(tiny: Make, make_groups: Make, name: str) -> None:
    groups = [replace(group, cut=cut) for group, cut in zip(make_groups(RAGGED), CUT, strict=True)]
    groups = near(tiny(), groups, ALGORITHMS[name].noise)
    chosen = {"name": name, "kl_coefficient": 0.1, "positive_nll_coefficient": 0.1, "entropy_coefficient": 0.01}
    if name == "dapo":
        chosen |= {"old": "proximal", "corrections": (CorrectionSettings(kind="truncate", level="sequence", high=1.2),)}
    found = []
    for budget, share in ((10_000, True), (25, True), (1, False)):
        trainer = RlTrainer(tiny(), settings(budget, share, **chosen), total_steps=9, reference=tiny(seed=9))
        found.append(trainer.step(groups, step=1))
    whole, *others = found
    apart = {"num_microbatches", "padding_waste", "shared_token_fraction", "model_flops"}
    assert {"entropy", "approx_kl", "kl_reference", "positive_nll", "ess_token"} <= whole.keys()
    for metrics in others:
        assert metrics["num_microbatches"] > 2
        assert metrics.keys() == whole.keys()
        for key in whole.keys() - apart:
            assert metrics[key] == pytest.approx(whole[key], rel=2e-5, abs=2e-6), key


def test_step_metrics_of_updates_are_token_means(tiny: Make, make_groups: Make) -> None:
    """Updates of unequal size with tiny changes: each token counts once per pass."""
    groups = near(tiny(), make_groups([(3, [12, 9]), (2, [1, 2])]), 0.3)
    found = []
    for updates in ({}, {"num_minibatches": 2}, {"num_passes": 2}):
        chosen = settings(15, rate=1e-12, name="dapo", **updates)
        found.append(RlTrainer(tiny(), chosen, total_steps=9).step(groups, step=1))
    assert [metrics["num_updates"] for metrics in found] == [1.0, 2.0, 2.0]
    for key in ("clip_fraction", "approx_kl", "entropy", "ratio_max"):
        assert [metrics[key] for metrics in found] == pytest.approx([found[0][key]] * 3, rel=1e-5), key
    assert [metrics["num_trained_tokens"] for metrics in found] == [24.0] * 3


def test_step_flops_exclude_padding(tiny: Make, make_groups: Make) -> None:
    """Neither padding nor the number of microbatches counts; a shared prompt is computed once."""
    groups = make_groups(RAGGED)

    def flops(budget: int, share: bool, **chosen: Any) -> float:
        trainer = RlTrainer(tiny(), settings(budget, share, **chosen), total_steps=9)
        return trainer.step(groups, step=1)["model_flops"]

    alone = [flops(budget, share=False) for budget in (1, 25, 100, 10_000)]
    assert alone[0] > 0.0
    assert alone == [alone[0]] * 4
    assert flops(10_000, share=True) < alone[0]
    assert flops(25, share=False, num_passes=3) == pytest.approx(3 * alone[0], rel=1e-12)
    assert flops(25, share=False, num_minibatches=3) == pytest.approx(alone[0], rel=1e-12)


def given_advantages(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(group) for group in groups]


ADDITIVE = Algorithm("starling.algo.loss.ppo:ppo_clip", given_advantages, aggregate="constant")
"""Its loss of a step is the mean of the losses of steps of one completion each."""

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
SHAPE = st.tuples(st.integers(1, 8), LENGTHS)


@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(SHAPE, min_size=1, max_size=4).filter(lambda shapes: any(any(lengths) for _, lengths in shapes)),
    budget=st.integers(1, 80),
    share=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_step_gradient_is_mean_over_completions(
    tiny: Make, make_groups: Make, shapes: list[tuple[int, list[int]]], budget: int, share: bool, seed: int
) -> None:
    """For any packing, with and without shared prompts."""
    model = tiny().double()
    groups = near(model, make_groups(shapes, seed=seed), 0.2)
    chosen = settings(
        budget, share, rate=1e-12, name=f"{__name__}:ADDITIVE", aggregate_tokens=8, skip_zero_advantage=False
    )
    whole = gradient(model, groups, chosen)
    singles = [one for group in groups for one in alone(group)]
    parts = [gradient(model, [one], chosen) for one in singles if one.lengths[0]]
    for name, found in whole.items():
        expected = sum((part[name] for part in parts), torch.zeros_like(found)) / len(singles)
        scale = sum(float(torch.linalg.vector_norm(part[name])) for part in parts) / len(singles)
        # Some gradients are 0 but for rounding: behind a prompt of one token, the queries of a single cell.
        assert torch.linalg.vector_norm(found - expected) <= 1e-6 * scale + 1e-14, name


def gradient(model: Any, groups: Sequence[ScoredGroup], chosen: PolicySettings) -> dict[str, Tensor]:
    RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
    return gradients(model)


def alone(group: ScoredGroup) -> list[ScoredGroup]:
    """Return each completion of a group as a separate group."""
    ends = np.cumsum(group.lengths).tolist()
    found = []
    for end, length, reward in zip(ends, group.lengths, group.rewards, strict=True):
        own = slice(end - length, end)
        found.append(
            replace(
                group,
                completion_ids=group.completion_ids[own],
                logprobs=group.logprobs[own],
                versions=group.versions[own],
                lengths=(length,),
                rewards=(reward,),
                scores=(),
            )
        )
    return found


def test_step_entropy_is_of_sampling_distribution(tiny: Make, make_groups: Make) -> None:
    """It is lower at a lower temperature, and the logarithm of the vocabulary if uniform."""
    entropies = []
    for temperature in (0.25, 1.0, 1e6):
        trainer = RlTrainer(tiny(), settings(30), total_steps=9)
        entropies.append(trainer.step(make_groups(RAGGED), step=1, temperature=temperature)["entropy"])
    assert entropies == sorted(entropies)
    assert entropies[-1] == pytest.approx(math.log(VOCABULARY), rel=1e-5)
