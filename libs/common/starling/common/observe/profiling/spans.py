"""Spans of one process in Chrome's trace format, bounded in number, with what aligns them with those of others.

Times are those of `time.perf_counter_ns`, which on Linux all processes of a host share since its boot. The file says
how far that clock is from the wall clock, which aligns it with files of other hosts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from starling.common.files import open_own

MAX_EVENTS: Final = 100_000
"""Events of one profile of one process; a file of so many has some 15 MB."""
MAX_OPEN: Final = 4096
"""Spans of groups that are open at a time."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CLOCK_SAMPLES: Final = 5
FIRST_TRACK: Final = 2_000_000_000
"""Number of the first track that is no thread: above those of threads."""


class SpanRecorder:
    """Records spans. Any thread may add some."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._open: dict[str, tuple[str, int, dict[str, Any]]] = {}
        self._tracks: dict[str, int] = {}
        self.num_dropped = 0
        """Events beyond the bound."""
        self._offset_ns = clock_offset_ns()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, name: str, begin_ns: int, end_ns: int, *, track: str = "", **fields: Any) -> None:
        """Add a span of the present thread, or of a `track`; those of one track nest, and do not overlap otherwise."""
        self._append(
            {
                "ph": "X",
                "name": name,
                "cat": "starling",
                "ts": begin_ns / 1e3,
                "dur": max(0, end_ns - begin_ns) / 1e3,
                "tid": self._tracks.setdefault(track, FIRST_TRACK + len(self._tracks))
                if track
                else threading.get_native_id(),
                "args": fields,
            }
        )

    def begin(self, key: str, name: str, **fields: Any) -> None:
        """Begin a span that may overlap with any others, such as that of a group; `key` names it until its end."""
        if len(self._open) < MAX_OPEN:
            self._open[key] = (name, time.perf_counter_ns(), fields)
        else:
            self.num_dropped += 1

    def end(self, key: str, **fields: Any) -> bool:
        """End the span `key`. Returns False if it did not begin here."""
        begun = self._open.pop(key, None)
        if begun is None:
            return False
        name, begin_ns, first = begun
        common = {"name": name, "cat": "starling", "id": key, "tid": threading.get_native_id()}
        self._append({"ph": "b", "ts": begin_ns / 1e3, "args": {**first, **fields}, **common})
        self._append({"ph": "e", "ts": time.perf_counter_ns() / 1e3, **common})
        return True

    def _append(self, event: dict[str, Any]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self.num_dropped += 1

    def write(self, path: Path, name: str) -> None:
        """Write the spans of the process `name`; those that have not ended end now. Raises OSError."""
        for key in list(self._open):
            self.end(key, unfinished=True)
        pid, offset_ns = os.getpid(), clock_offset_ns()
        head = {
            "name": name,
            "host": socket.gethostname(),
            "pid": pid,
            "boot": boot_id(),
            "clock_offset_ns": offset_ns,
            "clock_moved_ns": offset_ns - self._offset_ns,
            "num_dropped": self.num_dropped,
        }
        names = [
            {"ph": "M", "name": "thread_name", "ts": 0, "tid": number, "args": {"name": track}}
            for track, number in self._tracks.items()
        ]
        events = [{"pid": pid, **event} for event in [*names, *self._events]]
        write_new(path, json.dumps({"displayTimeUnit": "ms", "starling": head, "traceEvents": events}))


def clock_offset_ns() -> int:
    """Return by how much the wall clock is ahead of `time.perf_counter_ns`: of a few samples the one that took least.

    Between the two clocks of one sample another process may run.
    """
    samples = []
    for _ in range(CLOCK_SAMPLES):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        samples.append((after - before, wall - (before + after) // 2))
    return min(samples)[1]


def boot_id() -> str:
    """Return the id of this boot of the host; empty if it is unknown."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def write_new(path: Path, text: str) -> None:
    """Write a file of a profile. Raises OSError, also where a link or no regular file is in its place."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)
