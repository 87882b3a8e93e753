"""From the scores of one completion to its reward: a weighted sum within bounds, or the status of a failure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from starling.common.ranges import MAX_REWARD, MAX_SCORE_CHARACTERS, MAX_SCORES
from starling.common.wire.messages import Status
from starling.reward.core.samples import Score

TASK = "task"
"""Key of the task in a prompt's metadata, for scorers of certain tasks."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """One column of every group: the scorer's name in metrics, and its share of the reward."""

    label: str
    weight: float
    tasks: tuple[str, ...] = ()
    """Tasks whose prompts it scores; empty for all prompts."""
    clip_min: float = -math.inf
    clip_max: float = math.inf
    """Bounds of the score in the reward; metrics have the score itself."""
    evaluates: bool = False
    """Its scores are never part of a reward: its weight is 0, and they are kept apart from those of the others."""

    def __post_init__(self) -> None:
        assert not (self.evaluates and self.weight), f"{self.label} evaluates, and has the weight {self.weight}"

    def scores(self, metadata: Mapping[str, Any]) -> bool:
        """Whether it scores the completions of a prompt with `metadata`."""
        return not self.tasks or metadata.get(TASK) in self.tasks


@dataclass(frozen=True, slots=True)
class RewardBounds:
    """How the weighted sum of the scores becomes the reward."""

    clip_min: float = -math.inf
    clip_max: float = math.inf
    scale: float = 1.0
    """Factor after the bounds."""


NO_BOUNDS: Final = RewardBounds()


class CombinedScores(NamedTuple):
    """What follows from the scores of one completion."""

    reward: float | None
    """None if it failed."""
    status: Status
    problems: tuple[str, ...]
    """A sentence for each failed score, observed ones too."""


def combine(
    column: Sequence[Score | None],
    scorers: Sequence[WeightedScorer],
    bounds: RewardBounds,
    *,
    wanted: Collection[int],
    status: Status,
) -> CombinedScores:
    """Return the reward of a completion that can be trained.

    If a *needed* score (of weight other than 0) fails, the completion has no reward but the status of the failure,
    never a reward of 0. A scorer of weight 0 is only observed: its failure is reported but costs no reward. A prompt
    that only evaluation scorers score has no reward.

    Args:
        column: its score by each scorer; None where there is none.
        scorers: all of them.
        bounds: of the sum.
        wanted: indices of the scorers that score its prompt; a score of theirs that is None timed out with the group.
        status: of the completion.
    """
    reported = [score.problem for score in column if score and score.problem]
    problems = tuple(dict.fromkeys(reported)) if reported else ()
    if None in [column[scorer] for scorer in wanted if scorers[scorer].weight]:
        failed = [
            score.status
            for score, scorer in zip(column, scorers, strict=True)
            if score and score.value is None and scorer.weight
        ]
        return CombinedScores(None, next(iter(failed), Status.REWARD_TIMEOUT), problems)
    if not any(score for score, scorer in zip(column, scorers, strict=True) if not scorer.evaluates):
        return CombinedScores(
            None, Status.REWARD_ERROR, ("no scorer is for the task of this prompt; add it to the `tasks` of one.",)
        )
    reward, failure = _sum(column, scorers, bounds)
    if failure and not problems:
        problems = ("the weighted sum of its scores is too large for a float.",)
    return CombinedScores(reward, failure or status, problems)


def _sum(
    column: Sequence[Score | None], scorers: Sequence[WeightedScorer], bounds: RewardBounds
) -> tuple[float | None, Status | None]:
    """Return the bounded sum of one completion's scores, or None and the status of the first needed failure."""
    terms = []
    for score, scorer in zip(column, scorers, strict=True):
        if score is None or not scorer.weight:  # None only where the scorer is not for this prompt
            continue
        if score.value is None:
            return None, score.status
        terms.append(scorer.weight * _clipped(score.value, scorer))
    try:
        total = bounds.scale * _clipped(math.fsum(terms), bounds)
    except (OverflowError, ValueError):  # a partial sum overflows, or terms of both infinities meet
        return None, Status.REWARD_ERROR
    return (total, None) if math.isfinite(total) else (None, Status.REWARD_ERROR)


def _clipped(value: float, bounds: WeightedScorer | RewardBounds) -> float:
    if bounds.clip_min <= value <= bounds.clip_max:
        return value
    return min(max(value, bounds.clip_min), bounds.clip_max)


def components(
    scorers: Sequence[WeightedScorer], rows: Sequence[Sequence[Score | None]], *, evaluates: bool = False
) -> dict[str, tuple[float | None, ...]]:
    """Return the scores of completions by the scorers' labels, and by ``label/key`` of those that name their scores.

    Args:
        scorers: all of them.
        rows: of each scorer its scores of the completions.
        evaluates: return the scores of evaluation scorers, and otherwise those of the others.
    """
    found: dict[str, tuple[float | None, ...]] = {}
    for scorer, row in zip(scorers, rows, strict=True):
        if scorer.evaluates is not evaluates:
            continue
        found[scorer.label] = tuple(score.value if score else None for score in row)
        if not any(score.parts for score in row if score):  # most scorers have one score, without a name
            continue
        parts = [dict(score.parts) if score else {} for score in row]
        for key in dict.fromkeys(key for own in parts for key in own):
            found[f"{scorer.label}/{key}"] = tuple(own.get(key) for own in parts)
    return found


def bounded(
    scores: dict[str, tuple[float | None, ...]], scorers: Sequence[WeightedScorer]
) -> dict[str, tuple[float | None, ...]]:
    """Return scores without what a controller does not take, and what no reward depends on.

    It would refuse the whole group for more names, longer ones, and larger numbers. A score that counts stays as it is.

    Args:
        scores: from `components`.
        scorers: all of them.
    """
    labels = {scorer.label for scorer in scorers}
    parts = [name for name in scores if name not in labels and len(name) <= MAX_SCORE_CHARACTERS]
    taken = set(parts[: max(0, MAX_SCORES - len(labels & scores.keys()))])
    counted = {scorer.label for scorer in scorers if scorer.weight}
    return {
        name: values if name in counted else tuple([_within(value) for value in values])
        for name, values in scores.items()
        if name in labels or name in taken
    }


def _within(value: float | None) -> float | None:
    return None if value is None or abs(value) > MAX_REWARD else value
