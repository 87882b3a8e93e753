"""Alarm `reward_hacking/<scorer>`: the rewards of training rise while an evaluation score falls.

Of each evaluation scorer the last `num_steps` steps that have its score are compared: their newer half with the older
one. A mean has risen, or fallen, if it differs by more than `RAISED` standard errors of the difference, with the
deviation between steps within each half. The alarm is on once the reward has risen and the score has fallen. It is over
once either of them differs by less than `KEPT` standard errors, so that it does not come and go at every other step.

The points of a scorer follow from the metrics of committed steps, so a restarted controller has the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from starling.common.wire.messages import Alarm
from starling.controller.core.records import EvaluatedStep

PREFIX: Final = "reward_hacking/"
"""Of the names of these alarms."""
SCORE: Final = "eval_score/"
"""Of the metrics with the means of evaluation scores."""
REWARDS: Final = ("sampled_reward_mean", "reward_mean")
"""Metrics with the reward of a step, the first that there is: of all groups, and without those that were filtered."""
RAISED: Final = 3.0
KEPT: Final = 1.5


class EvaluatedSteps:
    """The last steps with evaluation scores, by scorer."""

    def __init__(self, scorers: Sequence[str], num_steps: int) -> None:
        """Begin without any.

        Args:
            scorers: labels of the evaluation scorers.
            num_steps: how many steps of each are compared.
        """
        self._scorers, self._num_steps = tuple(scorers), num_steps
        self._steps: dict[str, list[EvaluatedStep]] = {}

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a step of training; a scorer without a score in it is left as it is."""
        reward = next((metrics[name] for name in REWARDS if name in metrics), None)
        for label in self._scorers:
            score = metrics.get(SCORE + label)
            if score is not None and reward is not None:
                before = self._steps.get(label, [])
                self._steps[label] = [*before, EvaluatedStep(step=step, reward=reward, score=score)][-self._num_steps :]

    def alarms(self, step: int, before: Mapping[str, Alarm]) -> dict[str, Alarm]:
        """Return the alarms that are on after `step`, by name. `before`: those that were on before it."""
        found = {}
        for label in self._scorers:
            steps, name = self._steps.get(label, []), PREFIX + label
            if len(steps) < self._num_steps:
                continue
            earlier = before.get(name)
            reward = _change([one.reward for one in steps])
            score = _change([one.score for one in steps])
            bound = RAISED if earlier is None else KEPT
            if reward.has_risen(bound) and score.has_fallen(bound):
                found[name] = Alarm(
                    name=name,
                    value=score.after - score.before,
                    bound=-bound * score.error,
                    text=_text(label, steps, reward, score),
                    since=step if earlier is None else earlier.since,
                )
        return found

    def summary(self) -> dict[str, tuple[EvaluatedStep, ...]]:
        """Return the steps, by scorer."""
        return {label: tuple(steps) for label, steps in self._steps.items()}

    def restore(self, summary: Mapping[str, Sequence[EvaluatedStep]]) -> None:
        """Take over what `summary` has returned."""
        known = {label: steps[-self._num_steps :] for label, steps in summary.items() if label in self._scorers}
        self._steps = {label: list(steps) for label, steps in known.items()}


class _Change(NamedTuple):
    before: float
    after: float
    error: float
    """Standard error of the difference."""

    def has_risen(self, num_errors: float) -> bool:
        return self.after > self.before and self.after - self.before > num_errors * self.error

    def has_fallen(self, num_errors: float) -> bool:
        return self.after < self.before and self.before - self.after > num_errors * self.error


def _change(values: Sequence[float]) -> _Change:
    """Return how the newer half of values differs from the older one; both have at least two."""
    older, newer = values[: len(values) // 2], values[len(values) // 2 :]
    errors = [statistics.variance(half) / len(half) for half in (older, newer)]
    return _Change(statistics.fmean(older), statistics.fmean(newer), math.sqrt(math.fsum(errors)))


def _text(label: str, steps: Sequence[EvaluatedStep], reward: _Change, score: _Change) -> str:
    return (
        f"from step {steps[0].step} to {steps[-1].step} the reward rose from {reward.before:.3g} to "
        f"{reward.after:.3g}, while {SCORE}{label} fell from {score.before:.3g} to {score.after:.3g}, so the model may "
        "learn to please the scorers that it is trained on; read samples, and compare their scores"
    )
