"""Stages of a run: running, last checkpoint, drain, over.

    running -> checkpointing -> draining -> over

A stop request takes the same way, without the remaining steps and evaluations. The policy then saves a state to resume
from, and what was not trained stays in the journal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class RunStage(enum.StrEnum):
    """The stage of the run."""

    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    DRAINING = "draining"
    OVER = "over"


STAGE_TRANSITIONS: Final[dict[tuple[RunStage, RunStage], str]] = {
    (RunStage.RUNNING, RunStage.CHECKPOINTING): "all steps, publications and evaluations are done, or it is stopped",
    (RunStage.RUNNING, RunStage.DRAINING): "there is nothing to checkpoint, or the run failed",
    (RunStage.CHECKPOINTING, RunStage.DRAINING): "every policy has written the last checkpoint, or the run failed",
    (RunStage.DRAINING, RunStage.OVER): "every replica has left, or the time is over",
    (RunStage.DRAINING, RunStage.DRAINING): "restored from the journal, where the drain had begun",
}
"""Every legal transition, with its cause."""


@dataclass
class Lifecycle:
    """The stage of the run, and why it ends."""

    drain_s: float
    """Maximum seconds for replicas to leave."""
    stop_s: float
    """Maximum seconds of a graceful stop."""
    stage: RunStage = RunStage.RUNNING
    stopping: str = ""
    """Why the run should stop early; empty when it should not."""
    stop_is_journaled: bool = False
    """The journal holds the stop that an operator was promised, until the run has stopped."""
    failure: str = ""
    """Why the run has failed; empty when it has not."""
    deadline: float = float("inf")
    """Of the stop, and then of the drain."""
    drain_sent: bool = False
    """The replicas have the command to leave."""
    is_exported: bool = False
    """A policy has written the last checkpoint."""

    @property
    def reason(self) -> str:
        """Why the run ends."""
        return self.failure or self.stopping or "the run is complete"

    @property
    def outcome(self) -> str:
        """How the run ends, or has ended: `complete`, `stopped`, or `failed`; empty as long as that is not known."""
        if self.failure:
            return "failed"
        if self.stopping:
            return "stopped"
        return "complete" if self.stage in (RunStage.DRAINING, RunStage.OVER) else ""

    def enter(self, stage: RunStage) -> None:
        """Enter another stage, by a legal transition."""
        assert (self.stage, stage) in STAGE_TRANSITIONS, f"a run may not go from {self.stage} to {stage}"
        self.stage = stage

    def stop(self, reason: str, now: float) -> None:
        """Note a stop request. The first reason stands; a run that is ending already is not affected."""
        if self.stage is RunStage.RUNNING and not self.stopping:
            self.stopping, self.deadline = reason, now + self.stop_s

    def drain(self, now: float) -> None:
        """Begin to drain: only the goodbyes of the replicas are left."""
        self.enter(RunStage.DRAINING)
        self.deadline = now + self.drain_s

    def fail(self, reason: str, now: float) -> None:
        """Fail the run: drain at once."""
        if self.stage in (RunStage.RUNNING, RunStage.CHECKPOINTING):
            self.failure = self.failure or reason
            self.drain(now)
