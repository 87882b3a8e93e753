"""Statistics of a run for its report, gathered from the lines of metrics.jsonl one at a time, in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MAX_POINTS: Final = 4096
"""Points of a curve, and values of which a median is taken: a run with more of them gets means, or a sample."""
MAX_LISTED: Final = 64
"""Kinds of alarms, evaluation scores, checkpoints, and losses of loggers that are listed."""
EVALUATION_SCORE: Final = "eval_score/"
"""Of the names of metrics with the scores of evaluation scorers."""
NUM_SPANS: Final = 3
"""Spans of an alarm that are listed; the others are counted."""


def reward_of(step: Mapping[str, Any]) -> float:
    """Return the mean reward of a step; with dynamic sampling that of all sampled groups, also the filtered ones."""
    reward: float = step.get("sampled_reward_mean", step["reward_mean"])
    return reward


class Curve:
    """A curve of at most `MAX_POINTS` points: when there are more, pairs of points become their mean."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._pending: list[tuple[float, float]] = []
        self._per_point = 1
        """Pairs of the data in each point; a power of 2."""

    def add(self, x: float, y: float) -> None:
        """Add the next pair."""
        self._pending.append((x, y))
        if len(self._pending) < self._per_point:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) == MAX_POINTS:
            self._points = [_mean(pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)]
            self._per_point *= 2

    def points(self) -> list[tuple[float, float]]:
        """Return all points; the last may be of fewer pairs than the others."""
        return [*self._points, *([_mean(self._pending)] if self._pending else [])]


class Sample:
    """At most `MAX_POINTS` of many values: all, or a sample in which each of them is equally likely."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._num, self._random = 0, random.Random(0)

    def add(self, value: float) -> None:
        """Add a value (algorithm R of Vitter, doi:10.1145/3147.3165)."""
        self._num += 1
        if len(self._values) < MAX_POINTS:
            self._values.append(value)
        elif (place := self._random.randrange(self._num)) < MAX_POINTS:
            self._values[place] = value

    def is_empty(self) -> bool:
        """Return whether there is no value."""
        return not self._values

    def median(self) -> float:
        """Return the upper median of the values, of which there is one."""
        return sorted(self._values)[len(self._values) // 2]


class AlarmSpans:
    """When each alarm was on."""

    def __init__(self) -> None:
        self._spans: dict[str, list[str]] = {}
        self._num: dict[str, int] = {}
        self._meanings: dict[str, str] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line `alarm` or `alarm_over`."""
        name = line["name"]
        if line["kind"] == "alarm":
            meaning = f"{line['value']:.3g} against a bound of {line['bound']:g}: {line['text']}"
            if name not in self._num and len(self._num) == MAX_LISTED:
                return
            self._num[name] = self._num.get(name, 0) + 1
            self._meanings.setdefault(name, meaning)
            if self._num[name] <= NUM_SPANS:
                self._spans.setdefault(name, []).append(f"since step {line['step']}")
        elif 0 < self._num.get(name, 0) <= NUM_SPANS:
            began = self._spans[name][-1].removeprefix("since step ")
            self._spans[name][-1] = f"steps {began} to {line['step'] - 1}"

    def rows(self) -> list[tuple[str, str]]:
        """Return one row for each kind of alarm: the steps, the first value with its bound, and the meaning."""
        return [(f"alarm {name}", f"{self._listed(name)}; {self._meanings[name]}") for name in self._spans]

    def _listed(self, name: str) -> str:
        more = self._num[name] - NUM_SPANS
        return ", ".join(self._spans[name]) + (f", and {more} times more" if more > 0 else "")


@dataclass
class FileStatistics:
    """Files of a run without a policy."""

    num: int = 0
    num_prompts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_rewarded: int = 0
    reward_sum: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the line of a file."""
        self.num += 1
        self.num_prompts += line["num_prompts"]
        self.num_failed += line["num_failed"]
        self.num_tokens += line["num_tokens"]
        if "reward_mean" in line:
            num = line["num_prompts"] - line["num_failed"]
            self.num_rewarded += num
            self.reward_sum += line["reward_mean"] * num


@dataclass
class AdoptionStatistics:
    """Adoptions of weight versions."""

    num: int = 0
    num_attested: int = 0
    transport: str = ""
    """Of the first."""
    pull_s: Sample = field(default_factory=Sample)
    pause_s: Sample = field(default_factory=Sample)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line `adopted`."""
        self.num += 1
        self.num_attested += bool(line["attested"])
        self.transport = self.transport or line["transport"]
        self.pull_s.add(line["pull_s"])
        self.pause_s.add(line["pause_s"])


@dataclass
class RunStatistics:
    """What the report of a run says."""

    num_steps: int = 0
    num_rl_steps: int = 0
    rewards: Curve = field(default_factory=Curve)
    """Of steps of reinforcement learning."""
    evaluation_scores: dict[str, Curve] = field(default_factory=dict)
    """By scorer, over the steps that have a score of it."""
    staleness_sum: float = 0.0
    staleness_max: float = 0.0
    files: FileStatistics = field(default_factory=FileStatistics)
    adoptions: AdoptionStatistics = field(default_factory=AdoptionStatistics)
    alarms: AlarmSpans = field(default_factory=AlarmSpans)
    num_evaluations: int = 0
    first_evaluation: dict[str, Any] = field(default_factory=dict)
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    held_out: Curve = field(default_factory=Curve)
    """Reward by version."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    """Lines of loggers that lost entries: one per logger and start of the controller."""
    checkpoints: list[str] = field(default_factory=list)
    """Paths of the last checkpoints, one per policy."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        match line["kind"]:
            case "step":
                self._add_step(line)
            case "evaluation":
                self.num_evaluations += 1
                self.first_evaluation = self.first_evaluation or line
                self.last_evaluation = line
                if line["reward_mean"] is not None:
                    self.held_out.add(line["version"], line["reward_mean"])
            case "adopted":
                self.adoptions.add(line)
            case "alarm" | "alarm_over":
                self.alarms.add(line)
            case "logger":
                self.losses += [line][: MAX_LISTED - len(self.losses)]
            case "checkpoint":
                self.checkpoints = [*self.checkpoints, str(line["path"])][-MAX_LISTED:]

    def _add_step(self, line: Mapping[str, Any]) -> None:
        self.num_steps += 1
        if "num_prompts" in line:
            self.files.add(line)
        if "staleness_max" in line:
            self.num_rl_steps += 1
            self.rewards.add(line["step"], reward_of(line))
            for name, value in line.items():
                if name.startswith(EVALUATION_SCORE):
                    self._add_evaluation_score(name.removeprefix(EVALUATION_SCORE), line["step"], value)
            self.staleness_sum += line["staleness_mean"]
            self.staleness_max = max(self.staleness_max, line["staleness_max"])

    def _add_evaluation_score(self, scorer: str, step: int, value: float) -> None:
        if scorer in self.evaluation_scores or len(self.evaluation_scores) < MAX_LISTED:
            self.evaluation_scores.setdefault(scorer, Curve()).add(step, value)


def gather(lines: Iterable[dict[str, Any]]) -> RunStatistics:
    """Return the statistics of the lines of metrics.jsonl, of which none is kept but those of the report."""
    statistics = RunStatistics()
    for line in lines:
        statistics.add(line)
    return statistics


def _mean(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*points, strict=True)
    return sum(xs) / len(xs), sum(ys) / len(ys)
