"""Scores of single scorers, for algorithms that take them besides the rewards.

A reward is the weighted sum of the scores of the recipe's scorers. Most algorithms take only this sum. For those that
take the scores one by one, a group must have a score of each scorer that counts in the sum, as the weights, the bounds
and the tasks of the recipe say; a reward replica only sends the scores.

Evaluation scorers are none of them. They score a share of the groups of training, drawn by the seed of the run, so that
a group that is scored again has them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starling.common.wire.messages import Prompt, ScorerScores

Scores = Mapping[str, Sequence[float | None]]
"""The scores of a group's completions, by scorer."""
TASK = "task"
"""Key of the task in a prompt's metadata, for scorers of certain tasks."""


@dataclass(frozen=True)
class TrainedScorer:
    """A scorer that counts in the reward."""

    label: str
    weight: float
    clip_min: float | None = None
    clip_max: float | None = None
    """Bounds of its scores; None for none."""
    tasks: tuple[str, ...] = ()
    """Tasks whose prompts it scores; empty for all prompts."""

    def scores(self, prompt: Prompt) -> bool:
        """Say whether it scores the completions of `prompt`."""
        return not self.tasks or prompt.metadata.get(TASK) in self.tasks

    def bounded(self, value: float | None) -> float | None:
        """Return a score within the bounds."""
        if value is None:
            return None
        value = value if self.clip_min is None else max(value, self.clip_min)
        return value if self.clip_max is None else min(value, self.clip_max)


def scores_of(scores: Scores, scorers: Sequence[TrainedScorer], num: int) -> tuple[ScorerScores, ...]:
    """Return the scores of the `num` completions of a group as a policy gets them.

    A scorer that the recipe did not have when the group was scored has no scores.
    """
    missing = (None,) * num
    return tuple(
        ScorerScores(
            label=scorer.label,
            weight=scorer.weight,
            values=tuple(scorer.bounded(value) for value in scores.get(scorer.label, missing)),
        )
        for scorer in scorers
    )


def are_equal(scores: Scores, scorers: Sequence[TrainedScorer]) -> bool:
    """Say whether each scorer gives all completions of a group the same score, so that none of them is better."""
    return all(len({scorer.bounded(value) for value in scores.get(scorer.label, ())}) <= 1 for scorer in scorers)


def is_drawn(seed: int, ordinal: int, share: float) -> bool:
    """Say whether the group of training `ordinal` is one of the `share` that evaluation scorers score."""
    digest = hashlib.sha256(f"evaluated/{seed}/{ordinal}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * (1 << 64)
