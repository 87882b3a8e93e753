"""Metrics of the run as the controller knows it: its notes, its state, its journal, and the spread of weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from starling.common.observe.metrics import Histogram, Samples
from starling.common.wire.telemetry import ReplicaView, RunSnapshot
from starling.controller.core.state import ControllerState
from starling.controller.shell.metrics.families import GAUGES, LAG_BOUNDS_S, OUTCOMES, SPREAD_BOUNDS_S
from starling.controller.shell.metrics.notes import RunNotes

MAX_UNSPREAD: Final = 64
"""Publications that are not yet held by all rollouts and are waited for."""


class RunMetrics:
    """The metrics of one controller. It belongs to the working thread.

    Args:
        journal: its file.
        step: the fields of the last step before, empty if there is none.
        evaluation: likewise of the last evaluation.
        incarnation: of the controller, from 1.
    """

    def __init__(self, journal: Path, step: Mapping[str, Any], evaluation: Mapping[str, Any], incarnation: int) -> None:
        self._files = (journal, journal.with_name(f"{journal.name}-wal"))
        self._notes = RunNotes(step, evaluation)
        self._incarnation = incarnation
        self._lag = Histogram("starling_journal_lag_seconds", LAG_BOUNDS_S)
        self._spread = Histogram("starling_weights_spread_seconds", SPREAD_BOUNDS_S)
        self._published_at: dict[int, float] = {}
        """When each version was published that some rollout does not hold yet, in monotonic seconds."""
        self._num_adopted: Counter[int] = Counter()
        """Adoptions of each of these versions."""

    def add(self, kind: str, fields: Mapping[str, Any], state: ControllerState) -> None:
        """Add a note that was just made."""
        self._notes.add(kind, fields)
        if kind == "published" and isinstance(version := fields.get("version"), int):
            self._published_at[version] = time.monotonic()
            if len(self._published_at) > MAX_UNSPREAD:
                oldest = next(iter(self._published_at))
                del self._published_at[oldest], self._num_adopted[oldest]
        elif kind == "adopted" and (version := fields.get("version")) in self._published_at:
            self._num_adopted[version] += 1
            if self._num_adopted[version] >= state.replicas.membership.num("rollout"):  # not at each of thousands
                self._note_spread(state)

    def note_lag(self, seconds: float) -> None:
        """Note how long the oldest record of a commit has waited for it."""
        self._lag.observe(seconds)

    def samples(self, state: ControllerState, view: RunSnapshot, now: float, waiting_s: float) -> Samples:
        """Return all samples.

        Args:
            state: of the run.
            view: its snapshot.
            now: monotonic seconds.
            waiting_s: for how long the oldest record waits to be durable.
        """
        self._note_spread(state)
        found = {
            **self._notes.samples(),
            **self._lag.samples(),
            **self._spread.samples(),
            ("starling_run_phase", (("phase", view.phase),)): 1,
            ("starling_run_incarnation", ()): self._incarnation,
            ("starling_run_version", ()): view.version,
            ("starling_run_last_step", ()): view.last_step,
            ("starling_run_staleness_bound_versions", ()): state.buffer.max_staleness,
            ("starling_run_refused_messages_total", ()): view.dropped,
            ("starling_run_journal_bytes", ()): sum(map(_size_bytes, self._files)),
            ("starling_journal_waiting_seconds", ()): waiting_s,
        }
        for one in OUTCOMES:
            found["starling_run_outcome", (("outcome", one),)] = int(one == state.lifecycle.outcome)
        for name in state.training.alarms:
            found["starling_run_alarm", (("alarm", name),)] = 1
        for group_state, number in view.groups.items():
            found["starling_run_groups", (("state", group_state),)] = number
        for replica in view.replicas:
            _add_replica(found, replica)
        for member in state.replicas.membership.members.values():
            labels = (("replica", member.name), ("role", str(member.role)))
            found["starling_replica_silent_seconds", labels] = max(0.0, now - member.heard_at)
        return found

    def _note_spread(self, state: ControllerState) -> None:
        """Note how long the versions took that all rollouts hold by now."""
        if not self._published_at:
            return
        held = [member.version for member in state.replicas.membership.of("rollout")]
        now, oldest = time.monotonic(), min(held, default=-1)
        for version in [one for one in self._published_at if one <= oldest]:
            self._spread.observe(now - self._published_at.pop(version))
            self._num_adopted.pop(version, None)


def _add_replica(samples: Samples, replica: ReplicaView) -> None:
    labels = (("replica", replica.name), ("role", replica.role))
    samples["starling_replica_version", labels] = replica.version
    samples["starling_replica_leases", labels] = replica.num_leases
    if replica.pulling >= 0:
        samples["starling_replica_pulling_version", labels] = replica.pulling
    for name, value in replica.gauges.items():
        if name in GAUGES:
            samples[GAUGES[name].name, labels] = value


def _size_bytes(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
