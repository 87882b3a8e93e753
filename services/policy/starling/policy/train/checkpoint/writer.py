"""Writing beside the steps: one thread, one thing at a time.

What is to be written lies in memory already, in a place that the next copy takes again. So a save that comes while
another is being written waits for it; nothing is left out and nothing overtakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import Wait

WriteOutcome = str | StarlingError
"""Where it was written, or why not."""


def _nobody() -> None:
    """Nobody wants to know."""


class BackgroundWriter:
    """Writes one thing at a time. All but the writing is done by the thread that makes the steps."""

    def __init__(
        self, patience_s: float, broken: Callable[[Future[None]], None], changed: Callable[[], None] = _nobody
    ) -> None:
        """Start nothing yet.

        Args:
            patience_s: how long a save may hold up the next one.
            broken: takes the future of a save that ended in an exception that is nobody's failure.
            changed: told when `waits` are others than before.
        """
        self._patience_s, self._broken, self._changed = patience_s, broken, changed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._future: Future[None] | None = None
        self._what, self._since = "", 0.0
        self._waiting: tuple[float, float] | None = None
        """Since when, and until when, `wait` waits."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for what is being written.

        Raises:
            ConfigError: it is not done within `timeout_s`, by default the saver's patience.
        """
        if self._future is None:
            return
        limit_s, begin = self._patience_s if timeout_s is None else timeout_s, time.monotonic()
        if not self._future.done():
            self._waiting = begin, begin + limit_s
            self._changed()
        unfinished = wait([self._future], limit_s).not_done
        self._waiting = None
        if unfinished:
            since_s = time.monotonic() - self._since
            raise ConfigError(
                f"{self._what} is not written after {since_s:.0f} s: look at the storage, or raise "
                "policy.saving.patience_s"
            )
        self._future = None

    def begin(self, what: str, write: Callable[[], str], done: Callable[[WriteOutcome], None]) -> None:
        """Have `write` called, which returns where it wrote, and then `done`, both in the saver's thread.

        `what` is named in words. Nothing else may be under way: see `wait`.
        """
        assert self._future is None or self._future.done(), "wait first"
        self._what, self._since = what, time.monotonic()
        self._future = self._pool.submit(_write, write, done)
        self._future.add_done_callback(self._look)

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what `wait` waits for at `now` (monotonic seconds); nothing while the steps go on."""
        waiting = self._waiting
        if waiting is None:
            return ()
        since, until = waiting
        left_s = max(0.0, until - now)
        return (Wait(what=f"{self._what} to be written", on="storage", since_s=now - since, seconds_left=left_s),)

    def _look(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._broken(future)


def _write(write: Callable[[], str], done: Callable[[WriteOutcome], None]) -> None:
    try:
        outcome: WriteOutcome = write()
    except StarlingError as error:
        outcome = error
    done(outcome)
