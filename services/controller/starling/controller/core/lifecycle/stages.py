"""How a run ends: last step, last publication, last evaluation, checkpoint, drain, and only then the exit.

    running -> checkpointing -> draining -> over

A stop request takes the same road, without the steps and the evaluation that were still to come; then the policy saves
a state to continue from, and what was not trained stays in the journal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RunStage(enum.StrEnum):
    """How far the end has come."""

    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    DRAINING = "draining"
    OVER = "over"


@dataclass
class Lifecycle:
    """The end of the run."""

    drain_s: float
    """Most seconds that replicas get to leave."""
    stop_s: float
    """Most seconds that an orderly stop may take."""
    stage: RunStage = RunStage.RUNNING
    stopping: str = ""
    """Why the run is to end early; empty when it is not."""
    is_promised: bool = False
    """An operator was told that the run stops: the journal holds that until it has."""
    failure: str = ""
    """What makes the run a failure; empty when nothing does."""
    deadline: float = float("inf")
    """Of the stop, and then of the drain."""
    told: bool = False
    """The replicas were told to leave."""
    saved: set[str] = field(default_factory=set)
    """Policies that have written their part of the last checkpoint."""

    @property
    def reason(self) -> str:
        """Say in words why the run ends."""
        return self.failure or self.stopping or "the run is complete"

    def stop(self, reason: str, now: float) -> None:
        """Note a stop request; the first reason stands, and a run that is ending already goes on ending."""
        if self.stage is RunStage.RUNNING and not self.stopping:
            self.stopping, self.deadline = reason, now + self.stop_s

    def drain(self, now: float) -> None:
        """Begin to drain: nothing is left to do but farewells."""
        self.stage, self.deadline = RunStage.DRAINING, now + self.drain_s

    def fail(self, reason: str, now: float) -> None:
        """Give up: drain at once, and exit as a failure."""
        if self.stage in (RunStage.RUNNING, RunStage.CHECKPOINTING):
            self.failure = self.failure or reason
            self.drain(now)
