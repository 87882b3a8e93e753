"""Time limits of what needs the engine: they stand still while there is none, so that nobody fails for want of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PausableClock:
    """A clock that stands still while nobody can use the time."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._held_since: float | None = None

    def hold(self, held: bool, now: float) -> bool:
        """Stop the clock, or have it go on, at `now` (monotonic seconds). Returns whether it did the other before."""
        if held == (self._held_since is not None):
            return False
        if self._held_since is not None:
            self._lost_s += now - self._held_since
        self._held_since = now if held else None
        return True

    def at(self, now: float) -> float:
        """Return what it shows at `now`: seconds, less those for which it stood still."""
        return (now if self._held_since is None else self._held_since) - self._lost_s


class PausableTimeouts:
    """The time limits in one event loop, for it alone."""

    def __init__(self, *, held: bool = False) -> None:
        self._held = held
        self._left_s: dict[asyncio.Timeout, float] = {}
        """Of those that are in force, as of when they were begun or held last."""

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Do as `asyncio.timeout`, for so many seconds that count.

        Raises:
            TimeoutError: they are over.
        """
        async with asyncio.timeout(None if self._held else seconds) as limit:
            self._left_s[limit] = seconds
            try:
                yield limit
            finally:
                del self._left_s[limit]

    def hold(self, held: bool) -> None:
        """Let time count no more, or again."""
        if held == self._held:
            return
        self._held, now = held, asyncio.get_running_loop().time()
        for limit, left_s in self._left_s.items():
            if limit.expired():
                continue
            if held:
                when = limit.when()
                assert when is not None, "it counted until now"
                self._left_s[limit] = max(0.0, when - now)
                limit.reschedule(None)
            else:
                limit.reschedule(now + left_s)
