"""Schedule of the ticks by which the controller's core learns the time."""

from __future__ import annotations

from typing import Final

TICK_S: Final = 0.25
MAX_BACKLOG_S: Final = 5.0
"""After this time with a constant backlog of messages, a tick happens all the same."""


class TickSchedule:
    """Ticks at a fixed interval, each after all messages that have arrived are handled.

    Otherwise a replica whose heartbeats wait in the socket, because this process stood still, would seem to be silent.
    `MAX_BACKLOG_S` keeps a controller that always has more messages from missing its deadlines.
    """

    def __init__(self, now: float) -> None:
        self._next = now
        self._backlog_since: float | None = None

    def left_s(self, now: float) -> float:
        """Return the seconds until the next tick, 0 when it is due."""
        return max(0.0, self._next - now)

    def is_due(self, now: float, *, has_more: bool) -> bool:
        """Return whether to tick now, and if so schedule the next tick; `has_more`: more messages may be waiting."""
        if not has_more:
            self._backlog_since = None
        elif self._backlog_since is None:
            self._backlog_since = now
        is_ready = self._backlog_since is None or now - self._backlog_since >= MAX_BACKLOG_S
        if now < self._next or not is_ready:
            return False
        self._next = now + TICK_S
        return True
