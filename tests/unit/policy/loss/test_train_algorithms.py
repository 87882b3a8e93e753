"""Every algorithm's step against a plain reference that loops over completions and tokens in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from plain_rl import (
    ALGORITHMS,
    CUT,
    RAGGED,
    Completion,
    assert_same_gradients,
    by_constant,
    double,
    mean_of_means,
    mean_of_sums,
    near,
    plain_loss,
    token_mean,
)
from torch import Tensor

from starling.algo import algorithm as built_in
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.model.load import frozen_copy
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
WAYS = [(30, True), (30, False), (10_000, True), (10_000, False)]
"""Cells of a microbatch, and whether completions share their prompt."""
BOUNDED = {"reinforce_pp": "clip_fraction", "decoupled_ppo": "mask_token_fraction"}


def ragged(make_groups: Make) -> list[ScoredGroup]:
    return [replace(group, cut=cut) for group, cut in zip(make_groups(RAGGED), CUT, strict=True)]


def settings(algorithm: AlgorithmSettings, budget: int = 10_000, share: bool = True) -> PolicySettings:
    still = OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0)
    return PolicySettings(optimizer=still, algorithm=algorithm, tokens_per_microbatch=budget, share_prompts=share)


def test_every_algorithm_has_a_case() -> None:
    assert ALGORITHMS.keys() == built_in.ALGORITHMS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_step_equals_plain_reference(tiny: Make, make_groups: Make, name: str) -> None:
    plain = double(tiny())
    groups = near(plain, ragged(make_groups), ALGORITHMS[name].noise)
    expected = plain_loss(name, plain, groups)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share in WAYS:
        # In double precision except for log-probabilities, so that only the step's own rounding remains.
        model = tiny().double()
        chosen = settings(AlgorithmSettings(name=name), budget, share)
        metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert (metrics["num_microbatches"] == 1.0) == (budget == 10_000)
        assert_same_gradients(model, plain, 1e-6)
        assert 0.0 < metrics[BOUNDED.get(name, "clip_fraction")] < 1.0, "the rollouts must exceed the bounds"
    assert ("dual_clip_fraction" in metrics) == (name == "dual_clip")
    assert metrics.get("dual_clip_fraction", 1.0) > 0.0
    single = tiny()
    RlTrainer(single, settings(AlgorithmSettings(name=name), 30), total_steps=1).step(groups, step=1)
    # The plain loop over a float32 model is as far off: 3.05e-6 with rloo_sequence, at most 1.9e-6 with the others.
    assert_same_gradients(single, plain, 4e-6)


MASKED = ["grpo", "dr_grpo", "dapo", "rloo"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MASKED)
def test_step_mask_truncated_excludes_truncated_completions(tiny: Make, make_groups: Make, name: str) -> None:
    """Its reward counts in the baseline; the mean counts neither it nor its tokens."""
    plain = double(tiny())
    groups = near(plain, ragged(make_groups), 0.2)
    expected = plain_loss(name, plain, groups, mask_truncated=True)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share in WAYS:
        model = tiny().double()
        chosen = settings(AlgorithmSettings(name=name, mask_truncated=True), budget, share)
        metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert metrics["num_trained_tokens"] == 43 - 9 - 7 - 1
        assert metrics["num_tokens"] == 43
        assert_same_gradients(model, plain, 1e-6)


def test_step_of_only_truncated_completions_has_no_gradient(tiny: Make, make_groups: Make) -> None:
    groups = [replace(group, cut=(True,) * len(group.lengths)) for group in make_groups(RAGGED)]
    chosen = settings(AlgorithmSettings(mask_truncated=True))
    metrics = RlTrainer(tiny(), chosen, total_steps=1).step(groups, step=1)
    assert (metrics["grad_norm"], metrics["loss"], metrics["skipped_step"]) == (0.0, 0.0, 0.0)
    assert metrics["num_trained_tokens"] == 0.0


def positive(one: Completion) -> list[Tensor]:
    return [-0.3 * new if one.advantage > 0 else 0.0 * new for new in one.new]


def entropy(one: Completion) -> list[Tensor]:
    return [-0.2 * value for value in one.entropy]


def kl(kind: str) -> Callable[[Completion], list[Tensor]]:
    def estimates(one: Completion) -> list[Tensor]:
        found = []
        for new, known, rollout in zip(one.new, one.reference, one.rollout, strict=True):
            log_ratio = new - known
            k3 = torch.exp(-log_ratio) - 1 + log_ratio
            value = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": k3, "unbiased": torch.exp(new - rollout) * k3}[kind]
            found.append(0.4 * value)
        return found

    return estimates


TERMS = {
    "positive_nll": (positive, {"positive_nll_coefficient": 0.3}),
    "entropy": (entropy, {"entropy_coefficient": 0.2}),
    **{kind: (kl(kind), {"kl_coefficient": 0.4, "kl_estimator": kind}) for kind in ("k1", "k2", "k3", "unbiased")},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("term", "name"), covering(TERMS, ["dapo", "grpo"]))
def test_regulariser_is_weighted_like_the_loss(tiny: Make, make_groups: Make, term: str, name: str) -> None:
    extra, chosen = TERMS[term]
    plain, other = double(tiny()), tiny(seed=9)
    groups = near(plain, ragged(make_groups), 0.2, temperature=0.8)
    groups[0] = replace(groups[0], rewards=(0.5,) * 4)  # Without an advantage: other terms train it all the same.
    expected = plain_loss(name, plain, groups, extra=extra, reference=double(other), temperature=0.8)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share in WAYS:
        model = tiny().double()
        algorithm = AlgorithmSettings(name=name, **chosen)  # type: ignore[arg-type]
        trainer = RlTrainer(
            model, settings(algorithm, budget, share), total_steps=1, reference=frozen_copy(other.double())
        )
        metrics = trainer.step(groups, step=1, temperature=0.8)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert_same_gradients(model, plain, 1e-6)
        assert metrics["num_trained_tokens"] == (29 if term == "positive_nll" else 43)


AGGREGATES = {
    "token_mean": ({}, token_mean),
    "sequence_mean_token_mean": ({}, mean_of_means),
    "sequence_mean_token_sum": ({}, mean_of_sums),
    "constant": ({}, by_constant(12)),
    "constant of its own": ({"aggregate_tokens": 7}, by_constant(7)),
}


@pytest.mark.parametrize(("aggregate", "mask"), covering(AGGREGATES, [False, True]))
def test_step_aggregates_equal_plain_reference(tiny: Make, make_groups: Make, aggregate: str, mask: bool) -> None:
    chosen, plainly = AGGREGATES[aggregate]
    plain = double(tiny())
    groups = near(plain, ragged(make_groups), 0.2)
    expected = plain_loss("dapo", plain, groups, aggregate=plainly, mask_truncated=mask)
    expected.backward()  # type: ignore[no-untyped-call]
    kind = aggregate.partition(" ")[0]
    algorithm = AlgorithmSettings(name="dapo", aggregate=kind, mask_truncated=mask, **chosen)  # type: ignore[arg-type]
    model = tiny().double()
    metrics = RlTrainer(model, settings(algorithm, 30), total_steps=1).step(groups, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
    assert_same_gradients(model, plain, 1e-6)


def test_aggregate_constant_defaults_to_longest_possible_completion(tiny: Make, make_groups: Make) -> None:
    """Or to the longest completion of the step, for all of its updates."""
    losses = {}
    for longest in (0, 24):
        chosen = settings(AlgorithmSettings(aggregate="constant", num_minibatches=3))
        trainer = RlTrainer(tiny(), chosen, total_steps=1)
        losses[longest] = trainer.step(make_groups(RAGGED), step=1, longest_completion=longest)["loss"]
    assert losses[0] == pytest.approx(2 * losses[24], rel=1e-6)
