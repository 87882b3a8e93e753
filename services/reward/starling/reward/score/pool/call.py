"""Tasks in hand, samples of them that wait, and calls: one scorer on one or several samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from starling.reward.core.samples import Sample, ScoreTask


@dataclass(slots=True, eq=False)
class TaskState:
    """A task that is being scored."""

    task: ScoreTask
    num_left: int
    """Scores to come: one of each sample by each scorer."""
    is_cancelled: bool = False


class UndividedSamples(NamedTuple):
    """Samples that a scorer has to score, and that wait for its form to be divided into calls."""

    state: TaskState
    scorer: int
    """Index of the scorer in the settings."""
    positions: tuple[int, ...]
    """Indices of the samples in the task."""


class Call(NamedTuple):
    """One scorer on one sample, or on a batch of them."""

    state: TaskState
    scorer: int
    """Index of the scorer in the settings."""
    positions: tuple[int, ...]
    """Indices of the samples in the task."""
    num_retries: int = 0
    """How often it has ended its worker, or exceeded the limit."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What is scored."""
        return tuple(self.state.task.samples[position] for position in self.positions)

    @property
    def description(self) -> str:
        """Which samples these are, for a person who asks what a worker does."""
        first = self.samples[0].index
        if len(self.positions) == 1:
            return f"completion {first}"
        return f"{len(self.positions)} completions from {first} on"
