"""External view of a run that outlives its controllers: telemetry, metrics and journal."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from archive import JournalArchive

from starling.cli.run.attempt import Attempt, read_metrics
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.shell.journal.resume import JOURNAL

POLL_S = 0.05


class Observation:
    """State of a run as last observed; `refresh` updates it."""

    def __init__(self, attempt: Attempt, archive: Path) -> None:
        """Start to observe; the controller need not run yet. What its journal loses is kept in the file `archive`."""
        self.attempt = attempt
        self.journal = JournalArchive(attempt.folder / JOURNAL, archive)
        self.snapshot: RunSnapshot | None = None
        """Latest snapshot of the present controller; None before its first."""
        self.joined: Counter[str] = Counter()
        """Number of joins of each replica."""
        self.step = 0
        """Last step in the metrics."""
        self._offset = 0
        self._subscriber: TelemetrySubscriber | None = None
        self._addresses = ""

    def refresh(self) -> None:
        """Read new metrics, and wait at most `POLL_S` for a snapshot."""
        for line in self._new_lines():
            if line["kind"] == "joined":
                self.joined[line["replica"]] += 1
            elif line["kind"] == "step":
                self.step = line["step"]
        addresses = _read(self.attempt.address)
        if addresses and addresses != self._addresses:
            self.close()
            self._subscriber = TelemetrySubscriber(json.loads(addresses)["telemetry"], self.attempt.key("observer-0"))
            self._addresses = addresses
        if self._subscriber is not None:
            self.snapshot = self._subscriber.latest(POLL_S) or self.snapshot

    def clear_snapshot(self) -> None:
        """Drop the snapshot, because the controller is about to be replaced."""
        self.snapshot = None

    @property
    def members(self) -> frozenset[str]:
        """Replicas in the latest snapshot."""
        return (
            frozenset(replica.name for replica in self.snapshot.replicas) if self.snapshot is not None else frozenset()
        )

    @property
    def all_adopted(self) -> bool:
        """Whether there are rollouts and all of them have adopted a version of the policy."""
        rollouts = [replica for replica in self.snapshot.replicas if replica.role == "rollout"] if self.snapshot else []
        return bool(rollouts) and all(replica.version > 0 for replica in rollouts)

    @property
    def version(self) -> int:
        """Number of completed steps; -1 without a snapshot."""
        return -1 if self.snapshot is None else self.snapshot.version

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of the metrics."""
        return read_metrics(self.attempt.metrics)

    def close(self) -> None:
        """Stop listening to the present controller."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber, self._addresses, self.snapshot = None, "", None

    def _new_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines added since the last call, so that `refresh` stays cheap."""
        if not self.attempt.metrics.exists():
            return []
        with self.attempt.metrics.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for text in whole.splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:  # truncated by a full disk
                continue
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
