"""Faults that no file of a run tells of, as events: what its controller publishes, and what the dashboard finds.

A disk that is full or cannot be written takes no lines about it, and a controller that refuses this process has none.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from starling.common.observe.terminal import one_line
from starling.controller.shell.outputs.append_file import full_disk_text

MAX_NOTICES: Final = 200
"""The newest ones are kept."""
MAX_CHARACTERS: Final = 400
FORGET_S: Final = 600.0
"""A fault that was not there for so long is another event when it returns."""
MAX_PRESENT: Final = 64
FULL_BYTES: Final = 16 << 20
"""Free space below which the disk of a run counts as full, unless that is more than 1 % of it."""


class NoticeLog:
    """The newest faults, each once from its beginning to its end."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_NOTICES)
        self._present: dict[tuple[str, str], float] = {}
        """When each was seen last, the newest last."""
        self.num = 0
        """How many there were."""

    def update(self, kind: str, texts: Iterable[str]) -> None:
        """Note that these faults are there now."""
        now = time.monotonic()
        for text in texts:
            shown = one_line(text[:MAX_CHARACTERS])
            seen = self._present.pop((kind, shown), float("-inf"))
            self._present[kind, shown] = now
            if now - seen > FORGET_S:
                self.num += 1
                self._events.append({"kind": kind, "time": time.time(), "text": {"text": shown}})
        while len(self._present) > MAX_PRESENT:
            del self._present[next(iter(self._present))]

    def besides(self, written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those that the events `written` in the run's file lack, numbered below all of them."""
        known = {event["text"].get("text") for event in written if event["kind"] == "notice"}
        new = [event for event in self._events if event["kind"] != "notice" or event["text"]["text"] not in known]
        return [{"number": 0, **event} for event in new]


def volume_problem(folder: Path) -> str:
    """Return in one sentence why no more can be written to the volume of a folder; empty where it can."""
    try:
        volume = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}; see to its volume"
    if volume.f_flag & os.ST_RDONLY:
        return f"the volume of {folder} is read-only, so the run cannot go on; make it writable"
    if volume.f_bavail * volume.f_frsize < min(FULL_BYTES, volume.f_blocks * volume.f_frsize // 100):
        return full_disk_text(folder)
    return ""
