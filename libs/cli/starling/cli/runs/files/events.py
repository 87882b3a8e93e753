"""Tables of a run besides its curves: replicas, publications, failures, events, evaluations; each of limited length."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starling.cli.report.statistics import Sample
from starling.cli.runs.files.lines import number, text_of

MAX_REPLICAS: Final = 256
MAX_REASONS: Final = 64
MAX_LISTED: Final = 200
"""Evaluations, and events, that are listed: the first and the last ones."""
NUM_SLOWEST: Final = 10
LISTED: Final = frozenset(
    {
        *("set", "alarm", "alarm_over", "checkpoint", "step_dispatched_again", "reopened", "evaluation_moved"),
        *("offers_no_more", "relays_no_more", "refused", "invalid", "set_aside", "names_left_out", "logger", "tail"),
        *("notice", "checkpoint_requested", "scaled", "draining"),
    }
)
"""Kinds that the table of events lists one by one."""
FAILURES: Final = frozenset({"waiting", "discarded", "failed", "begun_anew"})
"""Kinds that are counted by their reason."""


class FirstAndLast:
    """The first and the last entries of a long list."""

    def __init__(self, limit: int = MAX_LISTED) -> None:
        self._first: list[Any] = []
        self._last: deque[Any] = deque(maxlen=limit // 2)
        self._half = limit // 2
        self.num = 0

    def add(self, entry: Any) -> None:
        """Add an entry."""
        self.num += 1
        if len(self._first) < self._half:
            self._first.append(entry)
        else:
            self._last.append(entry)

    def entries(self) -> list[Any]:
        """Return the entries that are kept, in their order."""
        return [*self._first, *self._last]

    @property
    def num_left_out(self) -> int:
        """Entries between the first and the last ones."""
        return self.num - len(self._first) - len(self._last)


@dataclass
class ReplicaRow:
    """Membership and adoptions of a replica."""

    role: str = ""
    host: str = ""
    num_joined: int = 0
    num_left: int = 0
    num_lost: int = 0
    """Without a goodbye: dead, evicted, or silent."""
    first_joined: float | None = None
    last_reason: str = ""
    """Of the last loss; without any, of the last goodbye."""
    num_adopted: int = 0
    num_attested: int = 0
    transport: str = ""
    size_bytes: float = 0.0
    pull_s: Sample = field(default_factory=Sample)
    pause_s: Sample = field(default_factory=Sample)
    pull_max_s: float = 0.0


@dataclass
class Reason:
    """Failures with the same reason."""

    num: int = 0
    first: float | None = None
    last: float | None = None


@dataclass
class Events:
    """Everything of metrics.jsonl but the steps."""

    replicas: dict[str, ReplicaRow] = field(default_factory=dict)
    num_published: int = 0
    publish_s: Sample = field(default_factory=Sample)
    slowest: list[tuple[float, int, float, str, float]] = field(default_factory=list)
    """A heap of the slowest adoptions: pull (s), order, version, replica, pause (s)."""
    failures: dict[tuple[str, str, str], Reason] = field(default_factory=dict)
    """By kind, status and reason."""
    num_other_failures: int = 0
    """With further reasons than `MAX_REASONS`."""
    listed: FirstAndLast = field(default_factory=FirstAndLast)
    """Time and line of each event."""
    evaluations: FirstAndLast = field(default_factory=FirstAndLast)
    num_replaced: int = 0
    """Lines of steps that a later line replaces, or without a number."""
    num_filtered: int = 0
    num_interrupted: int = 0
    num_lines: int = 0

    def add(self, kind: str, line: Mapping[str, Any], time: float | None) -> None:
        """Add a line that is no step; an unknown kind is counted only."""
        self.num_lines += 1
        match kind:
            case "joined" | "left":
                self._add_membership(kind, line, time)
            case "published":
                self.num_published += 1
                if (publish_s := number(line.get("publish_s"))) is not None:
                    self.publish_s.add(publish_s)
            case "adopted":
                self._add_adoption(line)
            case "evaluation":
                self.evaluations.add((time, line))
            case "filtered":
                self.num_filtered += 1
            case "interrupted":
                self.num_interrupted += 1
        if kind in FAILURES:
            self._add_failure(kind, line, time)
        elif kind in LISTED:
            self.listed.add((time, line))

    def _replica(self, line: Mapping[str, Any]) -> ReplicaRow | None:
        name = text_of(line, "replica", 80)
        row = self.replicas.get(name)
        if row is None and len(self.replicas) < MAX_REPLICAS:
            row = self.replicas[name] = ReplicaRow()
        return row

    def _add_membership(self, kind: str, line: Mapping[str, Any], time: float | None) -> None:
        row = self._replica(line)
        if row is None:
            return
        if kind == "joined":
            row.role, row.host = text_of(line, "role", 40), text_of(line, "host", 80)
            row.num_joined += 1
            row.first_joined = time if row.first_joined is None else row.first_joined
            return
        reason = text_of(line, "reason")
        if reason.startswith("it left"):
            row.num_left += 1
            row.last_reason = reason if not row.num_lost else row.last_reason
        else:
            row.num_lost += 1
            row.last_reason = reason

    def _add_adoption(self, line: Mapping[str, Any]) -> None:
        row, pull_s, pause_s = self._replica(line), number(line.get("pull_s")), number(line.get("pause_s"))
        if row is not None:
            row.num_adopted += 1
            row.num_attested += line.get("attested") is True
            row.transport = row.transport or text_of(line, "transport", 40)
            row.size_bytes = number(line.get("size_bytes")) or row.size_bytes
            if pull_s is not None and pause_s is not None:
                row.pull_s.add(pull_s)
                row.pause_s.add(pause_s)
                row.pull_max_s = max(row.pull_max_s, pull_s)
        version = number(line.get("version"))
        if pull_s is not None and version is not None:
            entry = (pull_s, self.num_lines, version, text_of(line, "replica", 80), pause_s or 0.0)
            (heapq.heappush if len(self.slowest) < NUM_SLOWEST else heapq.heappushpop)(self.slowest, entry)

    def _add_failure(self, kind: str, line: Mapping[str, Any], time: float | None) -> None:
        key = (kind, text_of(line, "status", 40), text_of(line, "reason"))
        if key not in self.failures and len(self.failures) == MAX_REASONS:
            self.num_other_failures += 1
            return
        reason = self.failures.setdefault(key, Reason())
        reason.num += 1
        reason.first = time if reason.first is None else reason.first
        reason.last = time


def event_text(line: Mapping[str, Any]) -> str:
    """Return what a line says besides its time and kind."""
    if line.get("kind") == "set":
        return f"{text_of(line, 'key')} = {text_of(line, 'value')} from step {text_of(line, 'step')} on"
    names = [name for name in line if name not in ("time", "kind")][:8]
    return ", ".join(f"{name}: {text_of(line, name)}" for name in names)
