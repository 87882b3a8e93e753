"""Notices as lines of metrics.jsonl: each fault once when it begins, and again when it returns after a while.

A snapshot shows a fault as long as it lasts; who looks later finds it in the events of the run. A stranger can cause
faults with ever new texts, so that a run has a limited number of these lines per hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

FORGET_S: Final = 600.0
"""A fault that was not there for so long is written again when it returns."""
MAX_LINES: Final = 60
"""Lines within `WINDOW_S`."""
WINDOW_S: Final = 3600.0
MAX_TEXTS: Final = 64
"""Faults that are remembered."""


class NoticeLines:
    """Decides which of the present faults are written."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        """When each fault was last there; the newest last."""
        self._written: deque[float] = deque(maxlen=MAX_LINES)
        """Times of the last lines."""

    def new(self, texts: Iterable[str], now: float) -> list[str]:
        """Return the faults of `texts` that are to be written at the time `now`, in seconds."""
        found = []
        for text in texts:
            seen = self._seen.pop(text, float("-inf"))
            is_new = now - seen > FORGET_S
            if is_new and not self._may_write(now):
                continue  # not remembered: it is written once there may be lines again
            self._seen[text] = now
            if is_new:
                self._written.append(now)
                found.append(text)
        while len(self._seen) > MAX_TEXTS:
            del self._seen[next(iter(self._seen))]
        return found

    def _may_write(self, now: float) -> bool:
        return len(self._written) < MAX_LINES or now - self._written[0] > WINDOW_S
