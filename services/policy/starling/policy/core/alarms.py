"""When a step's numbers are a cause for alarm: rules over metrics, and which alarms are on after each step. Pure.

An alarm goes on when its metric has been out of bounds for so many steps in a row, and off when the metric is back
inside by a margin, so that one which hovers at its bound is told once and not at every other step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import Alarm

MARGIN: Final = 0.2
"""By this share of its bound a metric must be inside again before its alarm goes off."""


@dataclass(frozen=True)
class AlarmRule:
    """What one metric must not do."""

    name: str
    metric: str
    bound: float
    says: str
    """One sentence: what it means and what to do."""
    is_floor: bool = False
    """The bound is the least value and not the greatest; at 0 the metric must be above it."""
    num_steps: int = 1
    """Steps in a row out of bounds before it is an alarm."""
    beside: str = ""
    """Only steps with this metric too are judged; empty for all."""

    def is_broken_by(self, value: float) -> bool:
        """Say whether `value` is out of bounds; a value that is no number always is."""
        if self.is_floor:
            return not (value > self.bound if self.bound == 0.0 else value >= self.bound)
        return not value <= self.bound

    def is_cleared_by(self, value: float) -> bool:
        """Say whether `value` is so far inside its bounds that the alarm goes off."""
        if self.bound == 0.0:
            return not self.is_broken_by(value)
        return value >= self.bound * (1.0 + MARGIN) if self.is_floor else value <= self.bound * (1.0 - MARGIN)


class Alarms:
    """Which alarms are on. A step without a rule's metric is no evidence either way."""

    def __init__(self, rules: Sequence[AlarmRule], fail_on: Collection[str] = ()) -> None:
        """Watch by `rules`; alarms named in `fail_on` are to end the run."""
        self._rules, self._fail_on = tuple(rules), frozenset(fail_on)
        self._num_broken: dict[str, int] = {}
        self._since: dict[str, int] = {}

    def after(self, step: int, metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
        """Take in the metrics of `step`. Returns the alarms that are on now, in the order of the rules."""
        on = []
        for rule in self._rules:
            value = metrics.get(rule.metric)
            if value is not None and (not rule.beside or rule.beside in metrics):
                self._judge(rule, step, value)
            since = self._since.get(rule.name)
            if since is not None:
                on.append(
                    Alarm(
                        name=rule.name,
                        value=float("nan") if value is None else value,
                        bound=rule.bound,
                        text=rule.says,
                        since=since,
                        fatal=rule.name in self._fail_on,
                    )
                )
        return tuple(on)

    def _judge(self, rule: AlarmRule, step: int, value: float) -> None:
        if rule.is_broken_by(value):
            self._num_broken[rule.name] = self._num_broken.get(rule.name, 0) + 1
            if self._num_broken[rule.name] >= rule.num_steps:
                self._since.setdefault(rule.name, step)
        else:
            self._num_broken[rule.name] = 0
            if rule.is_cleared_by(value):
                self._since.pop(rule.name, None)
