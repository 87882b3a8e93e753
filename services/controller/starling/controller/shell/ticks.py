"""When the controller's core is told that time has passed."""

from __future__ import annotations

from typing import Final

TICK_S: Final = 0.25
FULL_S: Final = 5.0
"""For so long more may come than is heard at a time, before time passes all the same."""


class TickSchedule:
    """Not before everything that came is heard: who spoke while this process stood still is not silent.

    But a controller that always has more to hear must not forget its deadlines: a flood has an end, or is one.
    """

    def __init__(self, now: float) -> None:
        self._next = now
        self._full_since: float | None = None

    def left_s(self, now: float) -> float:
        """Return the seconds until the next tick, 0 when it is due."""
        return max(0.0, self._next - now)

    def is_due(self, now: float, *, has_more: bool) -> bool:
        """Say whether to tick now, and count that as done; `has_more`: there may be more to hear already."""
        if not has_more:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        heard = self._full_since is None or now - self._full_since >= FULL_S
        if now < self._next or not heard:
            return False
        self._next = now + TICK_S
        return True
