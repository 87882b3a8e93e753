"""Handshakes that the other end breaks off, and from when on they are no accident.

ZeroMQ tells a wrong key of the controller and a connection that is merely closed by the same event. A proxy or a
forwarded port accepts and closes connections as long as the controller behind it is down. So only time can tell them
apart: a controller that restarts is back before.
"""

from __future__ import annotations

from typing import Final

LASTING_S: Final = 30.0
"""For so long each handshake is broken off before it is said: longer than a controller takes to restart."""
WITHIN_S: Final = 10.0
"""The longest time between two of them: each attempt begins at most 2 s after the last one, and the other end answers
at once. A controller that hangs lets a handshake wait for half a minute, and one that is away refuses connections."""


class BrokenHandshakes:
    """The handshakes in a row that were broken off. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._first = self._last = float("-inf")

    def add(self, now: float) -> None:
        """Note one more."""
        if now - self._last > WITHIN_S:
            self._first = now
        self._last = now

    def clear(self) -> None:
        """Forget them: a handshake succeeded."""
        self._first = self._last = float("-inf")

    def is_lasting(self, now: float) -> bool:
        """Say whether each handshake has been broken off for `LASTING_S`, up to now."""
        return now - self._last <= WITHIN_S and self._last - self._first >= LASTING_S
