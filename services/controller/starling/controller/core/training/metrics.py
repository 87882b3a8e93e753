"""What is measured: by the policies, in evaluations, and what the groups of a step say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starling.algo.staleness import staleness
from starling.common.wire.messages import Status
from starling.controller.core.groups.buffer import TrainBuffer
from starling.controller.core.groups.group import Group


@dataclass
class LatestMetrics:
    """What was measured of the newest step, and in the newest evaluation that is over."""

    _of_step: dict[str, float] = field(default_factory=dict)
    _of_evaluation: dict[str, float] = field(default_factory=dict)

    def step(self, told: Mapping[str, Any]) -> None:
        """Keep the numbers of what was told of a step."""
        self._of_step = _numbers(told)

    def evaluation(self, told: Mapping[str, Any]) -> None:
        """Keep the numbers of what was told of an evaluation."""
        self._of_evaluation = {f"eval/{name}": value for name, value in _numbers(told).items()}

    def metrics(self) -> dict[str, float]:
        """Return what is known of the newest version."""
        return {**self._of_step, **self._of_evaluation}


def _numbers(told: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in told.items() if type(value) in (int, float)}


def filtered_metrics(ledger: TrainBuffer, step: int) -> dict[str, float]:
    """Return how many groups were passed over for those of a step in training, their share, and the reward of both.

    The reward of what is trained says little of the model: the groups that it always solves are not among them.
    """
    passed, sealed = ledger.passed(step), ledger.sealed(step)
    if not sealed:
        return {}
    num = len(passed) + len(sealed)
    kept = [sum(r for r in group.rewards if r is not None) / len(group.rewards) for group in sealed]
    return {
        "num_filtered": len(passed),
        "filtered_share": len(passed) / num,
        "sampled_reward_mean": (sum(passed) + sum(kept)) / num,
    }


def sealed_metrics(ledger: TrainBuffer, step: int) -> dict[str, float]:
    """Return what the groups of a step in training say of themselves; nothing for a supervised step."""
    sealed = ledger.sealed(step)
    if not sealed:
        return {}
    rewards = [r for group in sealed for r in group.rewards if r is not None]
    trajectories = [t for group in sealed for t in group.trajectories]
    stale = [staleness(step, t.oldest_version) for t in trajectories]
    metrics = {
        "reward_mean": sum(rewards) / len(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "completion_tokens_mean": sum(t.num_tokens - t.num_masked for t in trajectories) / len(trajectories),
        "completion_tokens_max": max(t.num_tokens - t.num_masked for t in trajectories),
        "truncated_share": sum(t.status is Status.TRUNCATED for t in trajectories) / len(trajectories),
        "staleness_mean": sum(stale) / len(stale),
        "staleness_max": max(stale),
        "num_discarded": ledger.num_discarded,
        "num_env_errors": ledger.num_env_errors,
        "turns_mean": sum(t.num_turns for t in trajectories) / len(trajectories),
    }
    return metrics | _judged(sealed)


def answered_metrics(groups: list[Group], *, is_scored: bool) -> dict[str, float]:
    """Return what the groups of a file say of themselves; what no group tells is left out."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics: dict[str, float] = {
        "num_prompts": len(groups),
        "num_failed": sum(not group.trajectories for group in groups),
        "num_tokens": sum(t.num_tokens - t.num_masked for t in trajectories),
    }
    if trajectories:
        metrics["completion_tokens_mean"] = metrics["num_tokens"] / len(trajectories)
        metrics["truncated_share"] = sum(t.status is Status.TRUNCATED for t in trajectories) / len(trajectories)
    rewards = [r for group in groups for r in group.rewards if r is not None]
    if is_scored and rewards:
        metrics |= {"reward_mean": sum(rewards) / len(rewards), **_judged(groups)}
    return metrics


def _judged(groups: list[Group]) -> dict[str, float]:
    """Return the means of what scorers and environments found."""
    metrics = {}
    trajectories = [t for group in groups for t in group.trajectories]
    for name in sorted({name for group in groups for name in group.components}):
        values = [v for group in groups for v in group.components.get(name, ()) if v is not None]
        metrics[f"score/{name}"] = sum(values) / max(1, len(values))
    for name in sorted({name for t in trajectories for name in t.metrics}):
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[f"env/{name}"] = sum(values) / len(values)
    return metrics
