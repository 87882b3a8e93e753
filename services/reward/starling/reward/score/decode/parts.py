"""Parts of tasks: a task with latents is scored in up to three parts, each a task with an id of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from starling.reward.core.samples import Score, ScoreTask


@dataclass(slots=True)
class _Part:
    """A part of a task that is being scored."""

    task: str
    """Id of the task."""
    num_left: int
    """Scores to come."""
    seconds: Mapping[int, float]
    """How long the decoding of each sample has taken, by its index in the group or request."""


class PartTable:
    """The parts that are being scored, by their ids."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def has_of(self, task_id: str) -> bool:
        """Whether a part of a task is being scored."""
        return any(part.task == task_id for part in self._parts.values())

    def add(
        self, task: ScoreTask, part: ScoreTask, suffix: str, seconds: Mapping[int, float] | None = None
    ) -> ScoreTask | None:
        """Note a part of a task.

        Args:
            task: the whole of it.
            part: samples and scorers of it.
            suffix: by which its id differs from those of the other parts.
            seconds: how long the decoding of each sample has taken, by its index in the group or request.

        Returns:
            The part, to be scored under an id of its own; None if it has no samples or no scorers.
        """
        num = len(part.samples) * len(part.scorers)
        if not num:
            return None
        part = replace(part, id=f"{task.id}/scored{suffix}")
        self._parts[part.id] = _Part(task.id, num, seconds or {})
        return part

    def cancel(self, task_id: str) -> list[str]:
        """Forget the parts of a task; returns their ids."""
        ids = [id for id, part in self._parts.items() if part.task == task_id]
        for id in ids:
            del self._parts[id]
        return ids

    def record(self, score: Score) -> Score:
        """Return a score as one of its task, whether it is of the task or of a part of it."""
        part = self._parts.get(score.task)
        if part is None:
            return score
        part.num_left -= 1
        if not part.num_left:
            del self._parts[score.task]
        return score._replace(task=part.task, decode_s=part.seconds.get(score.completion, 0.0))
