"""Metrics of steps and evaluations: from the policies, and derived from the groups of a step or of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from starling.algo.staleness import staleness
from starling.common.wire.messages import Status, TrajectoryMeta
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.groups.group import Group

MAX_NAMES: Final = 256
"""Different names of scores and of environments' metrics in a run, besides as many as the recipe has scorers. Each may
be stored for every completion, and be in every step's line of metrics.jsonl and in each snapshot of the telemetry."""
NAME_CHARACTERS: Final = 64
"""Characters of these names, in the mean."""

T = TypeVar("T")


@dataclass
class MetricNames:
    """The names of scores and of environments' metrics that this controller has seen, up to a limit.

    Scores have the names of the recipe's scorers. A replica that makes up others for each group could otherwise make a
    line of 100 MB for each step, or be the only one whose names are known.
    """

    num_scorers: int = 0
    """Of the recipe."""
    labels: Sequence[str] = ()
    """Names that are always kept: those of scorers whose scores the controller itself reads."""
    _names: dict[str, str] = field(default_factory=dict)
    """By name: the name, as the one object that all groups share."""
    _senders: dict[str, str] = field(default_factory=dict)
    """By name: the replica that sent it first."""
    _nums: Counter[str] = field(default_factory=Counter)
    """By replica: the names of which it was the first."""
    _num_characters: int = 0
    is_full: bool = False
    """A name was left out."""

    def __post_init__(self) -> None:
        self._names.update((name, name) for name in self.labels)

    @property
    def limit(self) -> int:
        """How many names there may be."""
        return MAX_NAMES + self.num_scorers

    def known(self, replica: str, values: dict[str, T]) -> dict[str, T]:
        """Return `values` without those whose names are beyond `limit`, or beyond the characters of so many.

        Where there is no room, the newest name of the replica with the most makes room for one of a replica with fewer.
        """
        names = self._names
        if not names.keys() >= values.keys():
            self._add(replica, values)
        return {names[name]: value for name, value in values.items() if name in names}

    def _add(self, replica: str, values: Iterable[str]) -> None:
        for name in values:
            if name in self._names:
                continue
            if not self._has_room(replica, name):
                self.is_full = True
                return
            self._names[name], self._senders[name] = name, replica
            self._nums[replica] += 1
            self._num_characters += len(name)

    def _has_room(self, replica: str, name: str) -> bool:
        limit = self.limit
        while len(self._names) >= limit or self._num_characters + len(name) > NAME_CHARACTERS * limit:
            if not self._make_room(replica):
                return False
        return True

    def _make_room(self, replica: str) -> bool:
        most, num = self._nums.most_common(1)[0]
        if num <= self._nums[replica] + 1:
            return False
        newest = next(name for name in reversed(self._senders) if self._senders[name] == most)
        del self._names[newest], self._senders[newest]
        self._nums[most] -= 1
        self._num_characters -= len(newest)
        return True


@dataclass
class LatestMetrics:
    """The metrics of the newest step, and of the newest evaluation that is over."""

    _of_step: dict[str, float] = field(default_factory=dict)
    _of_evaluation: dict[str, float] = field(default_factory=dict)

    def note_step(self, metrics: Mapping[str, Any]) -> None:
        """Keep the numbers among the metrics of a step."""
        self._of_step = _numbers(metrics)

    def note_evaluation(self, summary: Mapping[str, Any]) -> None:
        """Keep the numbers among the results of an evaluation."""
        self._of_evaluation = {f"eval/{name}": value for name, value in _numbers(summary).items()}

    def summary(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the metrics of the step and those of the evaluation."""
        return self._of_step, self._of_evaluation

    def restore(self, of_step: dict[str, float], of_evaluation: dict[str, float]) -> None:
        """Take over what `summary` has returned."""
        self._of_step, self._of_evaluation = of_step, of_evaluation

    def all(self) -> dict[str, float]:
        """Return all metrics of the newest version."""
        return {**self._of_step, **self._of_evaluation}


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in fields.items() if type(value) in (int, float)}


def filtered_metrics(buffer: GroupBuffer, step: int) -> dict[str, float]:
    """Return the number and share of the groups that were filtered out for a step, and the reward of all its groups.

    The reward of the trained groups says little of the model: groups that it always solves are not among them.
    """
    filtered, frozen = buffer.filtered_rewards(step), buffer.frozen_groups(step)
    if not frozen:
        return {}
    num = len(filtered) + len(frozen)
    kept = [sum(r for r in group.rewards if r is not None) / len(group.rewards) for group in frozen]
    return {
        "num_filtered": len(filtered),
        "filtered_share": len(filtered) / num,
        "sampled_reward_mean": (sum(filtered) + sum(kept)) / num,
    }


def step_metrics(buffer: GroupBuffer, step: int) -> dict[str, float]:
    """Return the metrics of the groups of a step; nothing for a step of examples."""
    groups = buffer.frozen_groups(step)
    if not groups:
        return {}
    rewards = [r for group in groups for r in group.rewards if r is not None]
    trajectories = [t for group in groups for t in group.trajectories]
    versions = [t.oldest_version for t in trajectories]
    lengths = [t.num_tokens - t.num_masked for t in trajectories]
    metrics = {
        "reward_mean": sum(rewards) / len(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "completion_tokens_mean": sum(lengths) / len(lengths),
        "completion_tokens_max": max(lengths),
        "truncated_share": _truncated_share(trajectories),
        "staleness_mean": staleness(step, 0) - sum(versions) / len(versions),
        "staleness_max": staleness(step, min(versions)),
        "num_discarded": buffer.num_discarded,
        "num_env_errors": buffer.num_env_errors,
        "turns_mean": sum([t.num_turns for t in trajectories]) / len(trajectories),
    }
    return metrics | _truncation(trajectories) | _score_means(groups)


def _truncated_share(trajectories: list[TrajectoryMeta]) -> float:
    truncated = Status.TRUNCATED  # each look at a member of an enumeration takes as long as a call
    return sum([t.status is truncated for t in trajectories]) / len(trajectories)


def file_metrics(groups: list[Group], *, is_scored: bool) -> dict[str, float]:
    """Return the metrics of the groups of a file; a metric that no group has is left out."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics: dict[str, float] = {
        "num_prompts": len(groups),
        "num_failed": sum(not group.trajectories for group in groups),
        "num_tokens": sum(t.num_tokens - t.num_masked for t in trajectories),
    }
    if trajectories:
        metrics["completion_tokens_mean"] = metrics["num_tokens"] / len(trajectories)
        metrics["truncated_share"] = _truncated_share(trajectories)
        metrics |= _truncation(trajectories)
    rewards = [r for group in groups for r in group.rewards if r is not None]
    if is_scored and rewards:
        metrics |= {"reward_mean": sum(rewards) / len(rewards), **_score_means(groups)}
    return metrics


def _truncation(trajectories: list[TrajectoryMeta]) -> dict[str, float]:
    """Return how far truncated sampling is from the whole distribution: the mean over the sampled tokens, in nats."""
    known = [(t.truncation_nats, t.num_tokens - t.num_masked) for t in trajectories if t.truncation_nats is not None]
    num = sum(length for _, length in known)
    return {"sampling/truncation_nats": sum(nats * length for nats, length in known) / num} if num else {}


def mean_by_name(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the policies that report it."""
    if len(metrics) == 1:
        return metrics[0]
    names = dict.fromkeys(name for one in metrics for name in one)
    values = {name: [one[name] for one in metrics if name in one] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def _score_means(groups: list[Group]) -> dict[str, float]:
    """Return the means of the scores and of the environments' metrics."""
    scores = ((name, v) for group in groups for name, values in group.components.items() for v in values)
    metrics = {f"score/{name}": mean or 0.0 for name, mean in means_by_name(scores).items()}
    metrics |= {name: mean for name, mean in evaluation_means(groups).items() if mean is not None}
    measured = (item for group in groups for t in group.trajectories if t.metrics for item in t.metrics.items())
    return metrics | {f"env/{name}": mean or 0.0 for name, mean in means_by_name(measured).items()}


def evaluation_means(groups: Iterable[Group]) -> dict[str, float | None]:
    """Return the means of the evaluation scores as metrics; None for a scorer that failed everywhere."""
    scores = ((name, v) for group in groups for name, values in group.evaluation_scores.items() for v in values)
    return {f"eval_score/{name}": mean for name, mean in means_by_name(scores).items()}


def means_by_name(values: Iterable[tuple[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of the values of each name, in the order of the names; None for a name without a value."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        known = found.setdefault(name, [])
        if value is not None:
            known.append(value)
    return {name: sum(known) / len(known) if known else None for name, known in sorted(found.items())}
