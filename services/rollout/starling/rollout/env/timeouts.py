"""Clock and timeouts that pause while the engine cannot generate, so that no episode times out waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PausableClock:
    """A clock that can be paused."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._paused_since: float | None = None

    def set_paused(self, paused: bool, now: float) -> bool:
        """Pause or resume the clock at `now` (monotonic seconds). Returns whether that changed anything."""
        if paused == (self._paused_since is not None):
            return False
        if self._paused_since is not None:
            self._paused_s += now - self._paused_since
        self._paused_since = now if paused else None
        return True

    def at(self, now: float) -> float:
        """Return the clock's time at `now`: `now` less the seconds for which it was paused."""
        return (now if self._paused_since is None else self._paused_since) - self._paused_s


class PausableTimeouts:
    """The timeouts of one event loop; used from that loop only."""

    def __init__(self, *, paused: bool = False) -> None:
        self._paused = paused
        self._left_s: dict[asyncio.Timeout, float] = {}
        """Seconds left of each active timeout, as of its start or the last pause."""

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Like `asyncio.timeout`, for `seconds` in which the timeouts are not paused.

        Raises:
            TimeoutError: they have passed.
        """
        async with asyncio.timeout(None if self._paused else seconds) as limit:
            self._left_s[limit] = seconds
            try:
                yield limit
            finally:
                del self._left_s[limit]

    def set_paused(self, paused: bool) -> None:
        """Pause or resume all timeouts."""
        if paused == self._paused:
            return
        self._paused, now = paused, asyncio.get_running_loop().time()
        for limit, left_s in self._left_s.items():
            if limit.expired():
                continue
            if paused:
                when = limit.when()
                assert when is not None, "it was running until now"
                self._left_s[limit] = max(0.0, when - now)
                limit.reschedule(None)
            else:
                limit.reschedule(now + left_s)
