"""Restart policy: how often a process that died is restarted, and with which backoff. Pure: `now` is an argument."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class Restarts:
    """Counts the deaths of each process within a window of time.

    The first restart waits `FIRST_DELAY_S`, each further one within the window twice as long as the one before. That
    gives a missing peer time to come up, and limits the load of a process that dies on its own.
    """

    def __init__(self, most: int, window_s: float) -> None:
        """Allow each process `most` restarts within any `window_s` seconds."""
        self._most, self._window_s = most, window_s
        self._deaths: dict[str, list[float]] = {}

    def delay_s(self, name: str, now: float) -> float | None:
        """Record that `name` died at `now`. Returns the seconds until its restart; None when it is not restarted."""
        recent = [death for death in self._deaths.get(name, ()) if now - death < self._window_s]
        if len(recent) >= self._most:
            return None
        self._deaths[name] = [*recent, now]
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(len(recent), 32))

    def count(self, name: str) -> int:
        """Return how many of its deaths within the window were followed by a restart."""
        return len(self._deaths.get(name, ()))
