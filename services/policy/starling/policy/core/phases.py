"""Where the wall clock of a step went: every moment of it belongs to exactly one phase, so the shares sum to 1. Pure.

A step's time runs from the end of the step before to its own end: it holds the wait for its data, and whatever was
published or saved in between. What another thread does meanwhile is *hidden*: told beside the sum, for it overlaps.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol, get_args

Phase = Literal["wait_data", "forward", "backward", "optimizer", "publish_exposed", "checkpoint", "other"]
"""What the training thread does: wait for the groups of a step; compute losses; compute gradients; change the weights;
wait for the snapshot of a publication; write a state or a checkpoint; anything else (credit, packing, messages)."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


class PhaseClock(Protocol):
    """What a trainer tells when it begins a phase."""

    def enter(self, phase: Phase) -> None:
        """From now on time belongs to `phase`, until another is entered."""


class NullClock:
    """For when nobody asks where the time goes."""

    def enter(self, phase: Phase) -> None:
        """Do nothing."""


class PhaseTimes:
    """Adds up seconds by phase. A clock that goes back counts as one that stands still."""

    def __init__(self, now: float) -> None:
        """Begin at `now` (seconds), in the phase `other`."""
        self._phase: Phase = "other"
        self._since = now
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._hidden_s = 0.0

    def enter(self, phase: Phase, now: float) -> Phase:
        """Let time belong to `phase` from `now` on. Returns the phase that ends here, to go back to."""
        self._seconds[self._phase] += max(0.0, now - self._since)
        self._since = max(self._since, now)
        before, self._phase = self._phase, phase
        return before

    def hide(self, seconds: float) -> None:
        """Note `seconds` of a publication that training did not wait for."""
        self._hidden_s += seconds

    def take(self, now: float) -> dict[str, float]:
        """End the step at `now` and begin the next one, in the same phase.

        Returns:
            ``time/step_s``, and of each phase ``time/<phase>_s`` and ``time/<phase>_share``, which sum to 1; a step
            that took no time is all `other`. Beside them ``time/publish_hidden_s``.
        """
        self.enter(self._phase, now)
        total_s = sum(self._seconds.values())
        metrics = {"time/step_s": total_s, "time/publish_hidden_s": self._hidden_s}
        for phase, seconds in self._seconds.items():
            metrics[f"time/{phase}_s"] = seconds
            metrics[f"time/{phase}_share"] = seconds / total_s if total_s > 0.0 else float(phase == "other")
        self._seconds, self._hidden_s = dict.fromkeys(PHASES, 0.0), 0.0
        return metrics
