"""Alarms: rules over the metrics of steps, and the alarms that are active after each step. Pure.

An alarm is raised after its metric was out of bounds for a number of consecutive steps, and cleared when the metric is
inside by a margin, so a metric that hovers at its bound raises one alarm and not one at every other step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import Alarm

MARGIN: Final = 0.2
"""Share of its bound by which a metric must be inside before its alarm is cleared."""


@dataclass(frozen=True)
class AlarmRule:
    """Bound of one metric."""

    name: str
    metric: str
    bound: float
    text: str
    """One sentence: the meaning and the remedy."""
    is_floor: bool = False
    """The bound is a minimum and not a maximum; a minimum of 0 is exclusive."""
    num_steps: int = 1
    """Consecutive steps out of bounds that raise the alarm."""
    requires: str = ""
    """Only steps that also have this metric are judged; empty for all."""

    def is_broken_by(self, value: float) -> bool:
        """Return whether `value` is out of bounds; NaN always is."""
        if self.is_floor:
            return not (value > self.bound if self.bound == 0.0 else value >= self.bound)
        return not value <= self.bound

    def is_cleared_by(self, value: float) -> bool:
        """Return whether `value` is far enough inside its bounds to clear the alarm."""
        if self.bound == 0.0:
            return not self.is_broken_by(value)
        return value >= self.bound * (1.0 + MARGIN) if self.is_floor else value <= self.bound * (1.0 - MARGIN)


class Alarms:
    """The active alarms. A step without a rule's metric neither raises nor clears its alarm."""

    def __init__(self, rules: Sequence[AlarmRule], fail_on: Collection[str] = ()) -> None:
        """Evaluate `rules`; alarms named in `fail_on` end the run."""
        self._rules, self._fail_on = tuple(rules), frozenset(fail_on)
        self._num_broken: dict[str, int] = {}
        self._since: dict[str, int] = {}

    def after(self, step: int, metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
        """Evaluate the metrics of `step`. Returns the active alarms, in the order of the rules."""
        active = []
        for rule in self._rules:
            value = metrics.get(rule.metric)
            if value is not None and (not rule.requires or rule.requires in metrics):
                self._judge(rule, step, value)
            since = self._since.get(rule.name)
            if since is not None:
                active.append(
                    Alarm(
                        name=rule.name,
                        value=float("nan") if value is None else value,
                        bound=rule.bound,
                        text=rule.text,
                        since=since,
                        fatal=rule.name in self._fail_on,
                    )
                )
        return tuple(active)

    def _judge(self, rule: AlarmRule, step: int, value: float) -> None:
        if rule.is_broken_by(value):
            self._num_broken[rule.name] = self._num_broken.get(rule.name, 0) + 1
            if self._num_broken[rule.name] >= rule.num_steps:
                self._since.setdefault(rule.name, step)
        else:
            self._num_broken[rule.name] = 0
            if rule.is_cleared_by(value):
                self._since.pop(rule.name, None)
