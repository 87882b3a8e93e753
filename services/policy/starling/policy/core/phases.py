"""Wall-clock time of a step by phase: every moment belongs to exactly one phase, so the shares sum to 1. Pure.

A step's time runs from the end of the step before to its own end, and includes waiting for its data and any publication
or save in between. The work of other threads overlaps with it and is reported separately as *hidden*.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol, get_args

Phase = Literal["wait_data", "forward", "backward", "optimizer", "publish_exposed", "checkpoint", "other"]
"""Activity of the training thread: waiting for the groups of a step; computing losses; computing gradients; updating
the weights; waiting for the snapshot of a publication; saving a state or a checkpoint; anything else (credit, packing,
messages)."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


class PhaseClock(Protocol):
    """Receives the phases of a trainer."""

    def enter(self, phase: Phase) -> None:
        """Start `phase`, which lasts until another one is entered."""


class NullClock:
    """A clock that measures nothing."""

    def enter(self, phase: Phase) -> None:
        """Do nothing."""


class PhaseTimes:
    """Seconds by phase. A clock that goes backwards counts as standing still."""

    def __init__(self, now: float) -> None:
        """Start at `now` (seconds), in the phase `other`."""
        self._phase: Phase = "other"
        self._since = now
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._hidden_s = 0.0

    def enter(self, phase: Phase, now: float) -> Phase:
        """Start `phase` at `now`. Returns the phase that ends."""
        self._seconds[self._phase] += max(0.0, now - self._since)
        self._since = max(self._since, now)
        before, self._phase = self._phase, phase
        return before

    def hide(self, seconds: float) -> None:
        """Add `seconds` of a publication that overlapped with training."""
        self._hidden_s += seconds

    def take(self, now: float) -> dict[str, float]:
        """End the step at `now` and start the next one, in the same phase.

        Returns:
            ``time/step_s``, and for each phase ``time/<phase>_s`` and ``time/<phase>_share``, which sum to 1; a step
            that took no time is all `other`. In addition ``time/publish_hidden_s``.
        """
        self.enter(self._phase, now)
        total_s = sum(self._seconds.values())
        metrics = {"time/step_s": total_s, "time/publish_hidden_s": self._hidden_s}
        for phase, seconds in self._seconds.items():
            metrics[f"time/{phase}_s"] = seconds
            metrics[f"time/{phase}_share"] = seconds / total_s if total_s > 0.0 else float(phase == "other")
        self._seconds, self._hidden_s = dict.fromkeys(PHASES, 0.0), 0.0
        return metrics
