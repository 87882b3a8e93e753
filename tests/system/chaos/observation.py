"""A run seen from outside, through the deaths of its controller: telemetry, the lines of its metrics, its journal."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from guarantees import JournalHistory, read_history

from starling.cli.run.attempt import Attempt, read_metrics
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.shell.journal.journal import read_journal

LOOK_S = 0.05


class Observation:
    """What is known of a run at the moment. `look` renews it."""

    def __init__(self, attempt: Attempt) -> None:
        """Begin to observe; the controller need not be there yet."""
        self.attempt = attempt
        self.snapshot: RunSnapshot | None = None
        """The last that the present controller told; None before it did."""
        self.joined: Counter[str] = Counter()
        """How often each replica joined."""
        self.step = 0
        """The last step of which the metrics tell."""
        self._offset = 0
        self._watch: TelemetrySubscriber | None = None
        self._watched = ""

    def look(self) -> None:
        """Take in what there is, for at most `LOOK_S`."""
        for line in self._new_lines():
            if line["kind"] == "joined":
                self.joined[line["replica"]] += 1
            elif line["kind"] == "step":
                self.step = line["step"]
        addresses = _read(self.attempt.address)
        if addresses and addresses != self._watched:
            self.close()
            self._watch = TelemetrySubscriber(json.loads(addresses)["telemetry"], self.attempt.key("observer-0"))
            self._watched = addresses
        if self._watch is not None:
            self.snapshot = self._watch.latest(LOOK_S) or self.snapshot

    def forget(self) -> None:
        """Forget what the controller told: it is about to be another one."""
        self.snapshot = None

    @property
    def members(self) -> frozenset[str]:
        """The replicas that the controller knows now."""
        return (
            frozenset(replica.name for replica in self.snapshot.replicas) if self.snapshot is not None else frozenset()
        )

    @property
    def all_adopted(self) -> bool:
        """Every rollout that the controller knows generates with weights of the policy's."""
        rollouts = [replica for replica in self.snapshot.replicas if replica.role == "rollout"] if self.snapshot else []
        return bool(rollouts) and all(replica.version > 0 for replica in rollouts)

    @property
    def version(self) -> int:
        """Steps made; -1 when the controller has not told."""
        return -1 if self.snapshot is None else self.snapshot.version

    def history(self, num_supervised_steps: int) -> JournalHistory:
        """Read the journal, as far as it is durable."""
        records = (kept.record for kept in read_journal(self.attempt.folder / "journal.sqlite"))
        return read_history(records, num_supervised_steps)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of the metrics."""
        return read_metrics(self.attempt.metrics)

    def close(self) -> None:
        """Stop listening to the present controller."""
        if self._watch is not None:
            self._watch.close()
        self._watch, self._watched, self.snapshot = None, "", None

    def _new_lines(self) -> list[dict[str, Any]]:
        """Return the whole lines that were added; each is read once, so that looking stays cheap."""
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
            except ValueError:  # a full disk cut it short
                continue
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
