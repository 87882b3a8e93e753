"""Rule by which the number of rollouts follows the work (`[controller.autoscale]`, off by default). Pure.

Over a window of time three shares are measured, while nothing is evaluated:

- *waiting*: the share of the time in which the policy has no step to train;
- *starving*: the share in which it has none, and every slot of every rollout is taken;
- *idle*: the share of the slots that have no group, because the staleness bound allows no more groups.

| shares                                                | then the number of rollouts n becomes                      |
|-------------------------------------------------------|------------------------------------------------------------|
| *starving* at least `starving`, *idle* below `idle`   | n / (1 - starving), rounded up; at most 2 n, at most `max` |
| *waiting* below half of `starving`, *idle* at least `idle` | n - 1, at least `min`                                 |
| otherwise                                             | n                                                          |

The number does not go back and forth: rollouts are only taken away while half of the slots are free and the policy
hardly waits. A window begins and ends with a step, because a policy waits before each step and rollouts are idle during
it. After a change, and after a restart of the controller, the next window begins at least `cooldown_s` later.

Desired rollouts may be missing for long: they died, or the launcher finds no room for them. The number does not grow
while more than a tenth is missing, since more would be missing, too; those that are there say whether the missing ones
are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_STARVING = 0.5
"""Share up to which the growth follows it: a window at the start of a run says little, so n at most doubles."""
MOST_MISSING = 0.1
"""Share of the desired rollouts that may be missing, in the mean over a window, when their number grows."""
LEAST_STEPS = 3
"""Steps that a window has at least."""


@dataclass(frozen=True)
class AutoscaleRule:
    """The bounds and thresholds."""

    min: int = 1
    max: int = 1
    """Fewest and most rollouts."""
    starving: float = 0.2
    idle: float = 0.5
    """Shares from which the number changes, 0 to 1."""
    window_s: float = 60.0
    cooldown_s: float = 300.0


@dataclass(frozen=True)
class RolloutLoad:
    """The load of the rollouts, at one moment or over a window."""

    present: int
    """Rollouts that are there and not being drained; over a window the most at a time."""
    desired: int
    """At least as many."""
    waiting: float
    starving: float
    idle: float
    """Shares, 0 to 1."""
    missing: float = 0.0
    """Share of the desired rollouts that are not there."""


def next_count(rule: AutoscaleRule, load: RolloutLoad) -> int:
    """Return how many rollouts are desired after a window with this load.

    A number outside the bounds, which an operator has set, stays unless it changes towards them.
    """
    desired = load.desired
    if load.starving >= rule.starving and load.idle < rule.idle and load.missing <= MOST_MISSING:
        grown = math.ceil(round(desired / (1 - min(load.starving, MOST_STARVING)), 6))
        return max(desired, min(rule.max, max(desired + 1, grown)))
    if load.idle >= rule.idle and load.waiting < rule.starving / 2:
        return min(desired, max(rule.min, min(load.present, desired - 1)))
    return desired


@dataclass
class _Sums:
    """Integrals over a window, in seconds, and the most rollouts at a time."""

    total_s: float = 0.0
    waiting_s: float = 0.0
    starving_s: float = 0.0
    idle_s: float = 0.0
    missing_s: float = 0.0
    present: int = 0

    def add(self, passed_s: float, load: RolloutLoad) -> None:
        self.total_s += passed_s
        self.waiting_s += passed_s * load.waiting
        self.starving_s += passed_s * load.starving
        self.idle_s += passed_s * load.idle
        self.missing_s += passed_s * (1 - load.present / load.desired)
        self.present = max(self.present, load.present)

    def load(self, desired: int) -> RolloutLoad:
        return RolloutLoad(
            present=self.present,
            desired=desired,
            waiting=self.waiting_s / self.total_s,
            starving=self.starving_s / self.total_s,
            idle=self.idle_s / self.total_s,
            missing=self.missing_s / self.total_s,
        )


@dataclass
class AutoscaleWindow:
    """The measurement of one window."""

    rule: AutoscaleRule
    not_before: float = -math.inf
    """When the next window may begin."""
    _last: tuple[int, int] | None = None
    """Desired rollouts and trained steps at the last measurement; None when it was interrupted."""
    _last_at: float = 0.0
    _num_steps: int = -1
    """Steps of the window so far; -1 before it begins."""
    _sums: _Sums = field(default_factory=_Sums)

    def restart(self, now: float) -> None:
        """Begin with a cooldown: the journal has no clock, and the last change may have been a moment ago."""
        self.not_before = now + self.rule.cooldown_s

    def interrupt(self) -> None:
        """Discard the window: what it measures is not what the desired rollouts would do."""
        self._last, self._num_steps = None, -1

    def measure(self, now: float, version: int, load: RolloutLoad) -> int | None:
        """Add the time since the last call. Returns the number that is desired at the end of a window, else None.

        `version`: steps trained so far. `load`: as it is now. A window in which the desired number is changed begins
        anew.
        """
        if now < self.not_before:
            return None
        before, self._last = self._last, (load.desired, version)
        passed_s, self._last_at = now - self._last_at, now
        if before is None or before[0] != load.desired:
            self._num_steps = -1
            return None
        num_made = version - before[1]
        if self._num_steps < 0:
            if num_made:
                self._num_steps, self._sums = 0, _Sums()
            return None
        self._sums.add(passed_s, load)
        self._num_steps += num_made
        if not num_made or self._num_steps < LEAST_STEPS or self._sums.total_s < self.rule.window_s:
            return None
        num = next_count(self.rule, self._sums.load(load.desired))
        self._num_steps, self._sums = 0, _Sums()  # the next window begins with this step
        if num != load.desired:
            self.not_before = now + self.rule.cooldown_s
            self.interrupt()
        return num
