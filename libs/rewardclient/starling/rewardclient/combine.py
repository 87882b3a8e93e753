"""From the scores of several scorers to one reward, as clients of `/api/reward` do it. Pure.

A score is the value of one key, or the sum of several. It is clipped, then weighted; the sum of these is clipped, then
scaled. A sample that lacks one of them has no reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from starling.common.errors import ConfigError
from starling.rewardclient.rewards import OK, REWARD_ERROR, Column

CLIP: Final = 5.0
"""The usual bounds of clients of `/api/reward`; give infinities for none."""
MAX_SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One scorer, and its share of the reward."""

    name: str
    """Its label at the service, which `/api/reward` calls its type."""
    weight: float = 1.0
    """0 leaves it out."""
    score_key: str = ""
    """One of its keys, or a sum: `quality+motion`. By default its name."""
    clip_min: float = -CLIP
    clip_max: float = CLIP

    def __post_init__(self) -> None:
        if not self.name.strip() or not all(key.strip() for key in self.keys):
            raise ConfigError(
                f"a reward function has the name {self.name!r} and the key {self.score_key!r}; neither may be empty"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"the weight of {self.name!r} is {self.weight!r}; give a finite number")
        _check_bounds(f"of {self.name!r}", self.clip_min, self.clip_max)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys whose values are added."""
        return tuple(key.strip() for key in (self.score_key or self.name).split("+"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """How a reward follows from scores; without functions, the service decides."""

    functions: tuple[RewardFunction, ...] = ()
    clip_min: float = -CLIP
    clip_max: float = CLIP
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(self.functions))
        _check_bounds("of the sum", self.clip_min, self.clip_max)
        if not math.isfinite(self.scale):
            raise ConfigError(f"scale is {self.scale!r}; give a finite number")
        names = [one.name for one in self.functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"the reward function {min(twice)!r} is given twice; add its keys: score_key = 'a+b'")
        if names and not self.used:
            raise ConfigError(f"all of the reward functions {names} have the weight 0; give one of them another")

    @property
    def used(self) -> tuple[RewardFunction, ...]:
        """The functions that count."""
        return tuple(one for one in self.functions if one.weight)


class FunctionScores(NamedTuple):
    """What a scorer returned for the samples of a request."""

    columns: Mapping[str, Column]
    """By key."""
    problem: str = ""
    """Why it has none, or not all."""


class CombinedRewards(NamedTuple):
    """Rewards of the samples of a request, with a status and reasons for each."""

    rewards: Column
    statuses: tuple[str, ...]
    problems: tuple[tuple[str, ...], ...]


def combine(rule: RewardRule, scores: Mapping[str, FunctionScores], num_samples: int) -> CombinedRewards:
    """Return the rewards of samples from their scores by each function's name."""
    found = [_one(rule, scores, index) for index in range(num_samples)]
    return CombinedRewards(
        tuple(reward for reward, _ in found),
        tuple(OK if reward is not None else REWARD_ERROR for reward, _ in found),
        tuple(problems for _, problems in found),
    )


def _one(rule: RewardRule, scores: Mapping[str, FunctionScores], index: int) -> tuple[float | None, tuple[str, ...]]:
    """Return the reward of one sample, or None and the reasons."""
    terms, problems = list[float](), list[str]()
    for function in rule.used:
        value = _score(function, scores, index)
        if isinstance(value, str):
            problems.append(value)
        else:
            terms.append(function.weight * _clipped(value, function.clip_min, function.clip_max))
    if problems:
        return None, tuple(problems)
    try:
        reward = rule.scale * _clipped(math.fsum(terms), rule.clip_min, rule.clip_max)
    except (OverflowError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        return None, ("the weighted sum of its scores is too large for a float.",)
    return reward, ()


def _score(function: RewardFunction, scores_by_name: Mapping[str, FunctionScores], index: int) -> float | str:
    """Return the score of one sample, or a sentence on why it has none."""
    scores = scores_by_name.get(function.name)
    if scores is None:
        known = ", ".join(sorted(scores_by_name)[:MAX_SHOWN]) or "none"
        return f"the service has no scorer {function.name!r}; it has {known}."
    mine = f"scorer {function.name!r} "
    if scores.problem and not scores.columns:  # some services say in the reason itself which scorer failed
        return scores.problem if scores.problem.startswith(mine) else f"{mine}failed: {scores.problem}"
    unknown = [key for key in function.keys if key not in scores.columns]
    if unknown:
        known = ", ".join(sorted(scores.columns)[:MAX_SHOWN]) or "none"
        return f"scorer {function.name!r} has no score {unknown[0]!r}; it has {known}."
    values = [scores.columns[key][index] for key in function.keys]
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) < len(values):
        if scores.problem.startswith(mine):
            return scores.problem
        return f"{mine}has no score for this sample{': ' + scores.problem if scores.problem else '.'}"
    return sum(numbers)


def _clipped(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _check_bounds(what: str, least: float, most: float) -> None:
    if not least <= most:
        raise ConfigError(f"the bounds {what} are {least!r} and {most!r}; the first must not be above the second")
