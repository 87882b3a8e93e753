"""GRPO steps against a plain reference that loops over completions and tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.model.load import version_tensors
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

RAGGED = [(6, [4, 9, 1, 3]), (1, [2, 2, 7, 5]), (11, [1, 1, 1, 12])]


def settings(**changes: Any) -> PolicySettings:
    optimizer = OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.0)
    algorithm = AlgorithmSettings(aggregate="token_mean")
    return PolicySettings(**({"optimizer": optimizer, "algorithm": algorithm} | changes))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_loss(
    model: Any, groups: list[ScoredGroup], *, low: float, high: float, temperature: float, beta: float, reference: Any
) -> Tensor:
    """The loss of GRPO with a token mean, written as in the papers."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        mean, std = statistics.fmean(group.rewards), statistics.stdev(group.rewards)
        end = 0
        for length, reward in zip(group.lengths, group.rewards, strict=True):
            start, end = end, end + length
            advantage = (reward - mean) / (std + 1e-4)
            answer = group.completion_ids[start:end]
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, answer]).astype(np.int64))[None]
            divisor = group.temperature or temperature
            logits = model(ids).logits[0].double() / divisor
            known = reference(ids).logits[0].double() / divisor if reference is not None else logits
            for offset, token in enumerate(answer.tolist()):
                position = len(group.prompt_ids) - 1 + offset
                new = logits[position].log_softmax(-1)[token]
                ratio = torch.exp(new - float(group.logprobs[start + offset]))
                bounded = torch.clamp(ratio, 1 - low, 1 + high)
                total = total - torch.minimum(ratio * advantage, bounded * advantage)
                if beta:
                    delta = known[position].log_softmax(-1)[token].detach() - new
                    total = total + beta * (torch.exp(delta) - delta - 1)
                count += 1
    return total / count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize(
    ("low", "high", "temperature", "beta"), [(0.2, 0.2, 1.0, 0.0), (0.2, 0.28, 0.7, 0.0), (0.1, 0.1, 1.0, 0.04)]
)
def test_step_equals_plain_reference(
    tiny: Callable[..., Any],
    make_groups: Callable[..., list[ScoredGroup]],
    tied: bool,
    budget: int,
    low: float,
    high: float,
    temperature: float,
    beta: float,
) -> None:
    plain, model, other = tiny(tied=tied), tiny(tied=tied), tiny(tied=tied, seed=9)
    groups = make_groups(RAGGED)
    expected = reference_loss(
        plain, groups, low=low, high=high, temperature=temperature, beta=beta, reference=other if beta else None
    )
    expected.backward()  # type: ignore[no-untyped-call]
    algorithm = AlgorithmSettings(aggregate="token_mean", clip_low=low, clip_high=high, kl_coefficient=beta)
    chosen = settings(algorithm=algorithm, tokens_per_microbatch=budget)
    trainer = RlTrainer(model, chosen, total_steps=1, reference=other)
    metrics = trainer.step(groups, step=1, temperature=temperature)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    expected_gradients, found = gradients(plain), gradients(model)
    assert expected_gradients.keys() == found.keys()
    for name, gradient in expected_gradients.items():
        # Both sides round: from the gradient in double precision each differs by up to 2e-6.
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=4e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_step_groups_of_several_temperatures(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    plain, model, other = tiny(), tiny(), tiny(seed=9)
    own = (0.5, 0.0, 1.25)
    groups = [replace(group, temperature=value) for group, value in zip(make_groups(RAGGED), own, strict=True)]
    expected = reference_loss(plain, groups, low=0.2, high=0.2, temperature=0.75, beta=0.01, reference=other)
    expected.backward()  # type: ignore[no-untyped-call]
    algorithm = AlgorithmSettings(aggregate="token_mean", clip_low=0.2, clip_high=0.2, kl_coefficient=0.01)
    trainer = RlTrainer(model, settings(algorithm=algorithm, tokens_per_microbatch=30), total_steps=1, reference=other)
    metrics = trainer.step(groups, step=1, temperature=0.75)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=2e-6)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("share", [True, False])
def test_step_microbatches_accumulate_to_full_gradient(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]], kind: str, share: bool
) -> None:
    groups = make_groups(RAGGED)
    results = []
    for budget in (10_000, 60, 25, 1):
        model = tiny(kind)
        chosen = settings(tokens_per_microbatch=budget, share_prompts=share)
        metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
        results.append((metrics, gradients(model)))
    whole_metrics, whole = results[0]
    assert whole_metrics["num_microbatches"] == 1.0
    assert [metrics["num_microbatches"] for metrics, _ in results] == sorted(
        metrics["num_microbatches"] for metrics, _ in results
    )
    assert results[-1][0]["num_microbatches"] >= 8.0
    for metrics, parts in results[1:]:
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-6)
        for name in ("loss", "entropy", "clip_fraction", "approx_kl", "ratio_max", "mismatch_kl"):
            assert metrics[name] == pytest.approx(whole_metrics[name], abs=2e-6, rel=1e-5)


def test_step_skip_zero_advantage_keeps_gradient(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    groups = make_groups(RAGGED)
    equal = make_groups([(5, [3, 6])], seed=4)[0]
    groups.append(
        ScoredGroup(equal.prompt_ids, equal.completion_ids, equal.logprobs, equal.versions, equal.lengths, (1.0, 1.0))
    )
    found = {}
    for skip in (True, False):
        model = tiny()
        chosen = settings(algorithm=AlgorithmSettings(aggregate="token_mean", skip_zero_advantage=skip))
        found[skip] = RlTrainer(model, chosen, total_steps=1).step(groups, step=1), gradients(model)
    assert found[True][0]["num_trained_tokens"] == found[False][0]["num_trained_tokens"] - 9
    assert found[True][0]["num_tokens"] == found[False][0]["num_tokens"]
    assert found[True][0]["loss"] == pytest.approx(found[False][0]["loss"], abs=1e-6)
    for name, gradient in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("skip", [True, False])
def test_step_of_equal_rewards_moves_by_momentum_only(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]], skip: bool
) -> None:
    groups = make_groups(RAGGED)
    equal = [
        ScoredGroup(g.prompt_ids, g.completion_ids, g.logprobs, g.versions, g.lengths, (0.3,) * len(g.lengths))
        for g in groups
    ]
    model = tiny()
    trainer = RlTrainer(
        model, settings(algorithm=AlgorithmSettings(aggregate="token_mean", skip_zero_advantage=skip)), total_steps=2
    )
    start = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
    metrics = trainer.step(equal, step=1)
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss"] == 0.0
    assert metrics["zero_advantage_share"] == 1.0
    assert all(torch.equal(tensor, start[name]) for name, tensor in version_tensors(model).items())
    trainer.step(groups, step=2)
    moved = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
    trainer.step(equal, step=3)
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in version_tensors(model).items())


def test_steps_are_bitwise_reproducible(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    runs = []
    for _ in range(2):
        model = tiny()
        chosen = settings(
            tokens_per_microbatch=40, algorithm=AlgorithmSettings(aggregate="token_mean", kl_coefficient=0.01)
        )
        trainer = RlTrainer(model, chosen, total_steps=3)
        metrics = [trainer.step(make_groups(RAGGED, seed=s), step=s) for s in (1, 2, 3)]
        runs.append((metrics, {name: tensor.clone() for name, tensor in version_tensors(model).items()}))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_step_on_policy_has_no_mismatch(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    model = tiny()
    groups = []
    for g in make_groups([(4, [5, 3]), (7, [2, 6])], version=2):
        parts, end = [], 0
        for length in g.lengths:
            start, end = end, end + length
            ids = torch.from_numpy(np.concatenate([g.prompt_ids, g.completion_ids[start:end]]).astype(np.int64))[None]
            with torch.no_grad():
                logprobs = (model(ids).logits[0, len(g.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
            parts.append(logprobs.gather(-1, ids[0, len(g.prompt_ids) :, None])[:, 0].numpy())
        groups.append(
            ScoredGroup(g.prompt_ids, g.completion_ids, np.concatenate(parts), g.versions, g.lengths, g.rewards)
        )
    metrics = RlTrainer(model, settings(), total_steps=1).step(groups, step=3, temperature=0.8)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-10)
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["staleness_max"] == 0.0


def test_step_stale_completions_are_excluded_from_mismatch(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    g = make_groups([(4, [5, 3])], version=6)[0]
    versions = g.versions.copy()
    versions[0] = 4
    groups = [ScoredGroup(g.prompt_ids, g.completion_ids, g.logprobs, versions, g.lengths, g.rewards)]
    metrics = RlTrainer(tiny(), settings(), total_steps=1).step(groups, step=7)
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (2.0, 1.0)
    assert metrics["mismatch_max"] > 0.0
    stale = RlTrainer(tiny(), settings(), total_steps=1).step(groups, step=9)
    assert (stale["staleness_max"], stale["staleness_mean"]) == (4.0, 3.0)
    assert "mismatch_kl" not in stale


def test_step_empty_completions_count_only_in_baseline(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]
) -> None:
    plain, model = tiny(), tiny()
    groups = make_groups([(4, [5, 0, 3]), (2, [0, 1, 4])])
    reference_loss(plain, groups, low=0.2, high=0.2, temperature=1.0, beta=0.0, reference=None).backward()  # type: ignore[no-untyped-call]
    metrics = RlTrainer(model, settings(), total_steps=1).step(groups, step=1)
    assert metrics["num_sequences"] == 6.0
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-5, atol=1e-6)


def test_steps_learn_the_rewarded_token(tiny: Callable[..., Any]) -> None:
    model = tiny(initializer_range=0.02)
    trainer = RlTrainer(model, settings(optimizer=OptimizerSettings(learning_rate=1e-2)), total_steps=30)
    prompt, chosen = np.array([1, 2, 3], dtype=np.int32), 7
    generator = torch.Generator().manual_seed(0)

    def distribution() -> Tensor:
        with torch.no_grad():
            return model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1)

    before = float(distribution()[chosen])
    for step in range(1, 31):
        probabilities = distribution()
        drawn = torch.multinomial(probabilities, 64, replacement=True, generator=generator)
        group = ScoredGroup(
            prompt_ids=prompt,
            completion_ids=drawn.numpy().astype(np.int32),
            logprobs=probabilities[drawn].log().numpy(),
            versions=np.full(64, step - 1, dtype=np.int32),
            lengths=(1,) * 64,
            rewards=tuple(float(token == chosen) for token in drawn.tolist()),
        )
        trainer.step([group], step=step)
    assert before < 0.1
    assert float(distribution()[chosen]) > 0.9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_non_finite_weights_are_skipped(
    tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]], bad: float
) -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[3] = bad
    before = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
    metrics = RlTrainer(model, settings(), total_steps=1).step(make_groups([(4, [5, 3])]), step=1)
    assert metrics["skipped_step"] == 1.0
    assert all(
        torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in version_tensors(model).items()
    )


def test_invalid_steps_are_refused(tiny: Callable[..., Any], make_groups: Callable[..., list[ScoredGroup]]) -> None:
    trainer = RlTrainer(tiny(max_position_embeddings=16), settings(), total_steps=1)
    groups = make_groups([(4, [5, 3])])
    with pytest.raises(ConfigError, match="temperature is 0"):
        trainer.step(groups, step=1, temperature=0.0)
    with pytest.raises(ConfigError, match="nothing to train"):
        trainer.step([], step=1)
    with pytest.raises(ConfigError, match="20 tokens exceeds the 16"):
        trainer.step(make_groups([(8, [12, 3])]), step=1)
    g = groups[0]
    nan = ScoredGroup(g.prompt_ids, g.completion_ids, g.logprobs, g.versions, g.lengths, (1.0, math.nan), "train/0/9")
    with pytest.raises(ConfigError, match="'train/0/9' cannot be trained: reward 1"):
        trainer.step([nan], step=1)
    bad = ScoredGroup(
        g.prompt_ids, g.completion_ids, g.logprobs * math.nan, g.versions, g.lengths, g.rewards, "train/0/9"
    )
    with pytest.raises(ConfigError, match="'train/0/9' cannot be trained: a log-probability"):
        trainer.step([bad], step=1)
