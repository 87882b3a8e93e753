"""Check of the rule by which the number of rollouts follows the work, from outside: by the records of its changes.

| guarantee                                                       | checked at                                 |
|-----------------------------------------------------------------|--------------------------------------------|
| the number stays within `min` and `max`                         | each change                                |
| it at most doubles, and falls by one, or by those that lack     | each change                                |
| a cooldown and a window lie between two changes                 | each change, also across restarts          |
"""

from __future__ import annotations

from dataclasses import dataclass

from starling.controller.core.plan import RunPlan
from starling.controller.core.records import Record, ReplicasScaled
from starling.sim.environment.clock import SimulatedClock
from starling.sim.errors import require


@dataclass(frozen=True)
class Change:
    """One change of the number of rollouts by the rule."""

    at: float
    """Simulated seconds since the beginning."""
    num: int


class AutoscaleChecks:
    """Follows one run. A change that a crashed controller had not committed is forgotten with it."""

    def __init__(self, plan: RunPlan, clock: SimulatedClock) -> None:
        self._rule, self._clock = plan.autoscale, clock
        self.changes: list[Change] = []

    def begin(self, desired: int | None) -> None:
        """A controller has started, which has restored this number of rollouts from its journal."""
        if self._rule is not None and self.changes and self.changes[-1].num != desired:
            self.changes.pop()

    def on_write(self, record: Record) -> None:
        """Check a record of the journal."""
        rule = self._rule
        if rule is None or not isinstance(record, ReplicasScaled) or record.role != "rollout" or record.request:
            return
        change = Change(self._clock.now, record.num)
        require(rule.min <= change.num <= rule.max, f"{change.num} rollouts are desired, of {rule.min} to {rule.max}")
        if self.changes:
            before = self.changes[-1]
            require(change.num <= 2 * before.num, f"{change.num} rollouts are desired after {before.num}")
            passed_s = change.at - before.at
            least_s = rule.cooldown_s + rule.window_s
            require(passed_s >= least_s, f"the number of rollouts changed again after {passed_s:.1f} s")
        self.changes.append(change)
