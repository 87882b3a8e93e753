"""Background writer of states and exports: one thread, one write at a time.

The data is in host memory already, in buffers that the next snapshot reuses. So a save that comes during another write
waits for it; none is skipped, and the order is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import Wait

log = structlog.get_logger(__name__)

WriteOutcome = str | StarlingError
"""URL of the written folder, or the error."""


def _ignore() -> None:
    """Do nothing."""


class BackgroundWriter:
    """Writes one state or export at a time. Its methods are for the training thread, if they do not say else."""

    def __init__(
        self, patience_s: float, broken: Callable[[Future[None]], None], changed: Callable[[], None] = _ignore
    ) -> None:
        """Start nothing yet.

        Args:
            patience_s: how long a write may delay the next one.
            broken: receives the future of a write that raised an unexpected exception.
            changed: called when the result of `waits` changes.
        """
        self._patience_s, self._broken, self._changed = patience_s, broken, changed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._future: Future[None] | None = None
        self._what, self._since = "", 0.0
        self._waiting: tuple[float, float] | None = None
        """Begin and deadline of a `wait` in progress."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the write in progress.

        Raises:
            ConfigError: it takes longer than `timeout_s`, by default `patience_s`.
        """
        if self._future is None:
            return
        limit_s, begin = self._patience_s if timeout_s is None else timeout_s, time.monotonic()
        is_waiting = not self._future.done()
        if is_waiting:
            self._waiting = begin, begin + limit_s
            self._changed()
            log.info("write_awaited", what=self._what, limit_s=round(limit_s, 1))
        unfinished = wait([self._future], limit_s).not_done
        self._waiting = None
        if unfinished:
            since_s = time.monotonic() - self._since
            raise ConfigError(
                f"{self._what} is not written after {since_s:.0f} s: check the storage, or raise "
                "policy.saving.patience_s"
            )
        self._future = None

    def begin(self, what: str, copy: Callable[[], Callable[[], str]], done: Callable[[WriteOutcome], None]) -> None:
        """Call `copy` here, and what it returns in the writer's thread; then `done`, with the URL or the error.

        The begin and the end are logged: `starling run` kills no policy between them.

        Args:
            what: what is written, in words.
            copy: copies the data into host memory; it returns the function that writes the copy and returns the URL.
            done: called in the writer's thread.
        """
        assert self._future is None or self._future.done(), "call wait() first"
        self._what, self._since = what, time.monotonic()
        log.info("write_begun", what=what)
        try:
            write = copy()
        except BaseException:  # raised again: the supervisor must not wait for a write that has failed
            log.info("write_ended", what=what, complete=False)
            raise
        self._future = self._pool.submit(_write, what, write, done)
        self._future.add_done_callback(self._look)

    @property
    def is_writing(self) -> bool:
        """Whether a write is in progress."""
        return self._future is not None and not self._future.done()

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what `wait` is waiting for at `now` (monotonic seconds); nothing while steps continue."""
        waiting = self._waiting
        if waiting is None:
            return ()
        since, until = waiting
        left_s = max(0.0, until - now)
        return (Wait(what=f"{self._what} to be written", on="storage", since_s=now - since, seconds_left=left_s),)

    def _look(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._broken(future)


def _write(what: str, write: Callable[[], str], done: Callable[[WriteOutcome], None]) -> None:
    is_complete = False
    try:
        outcome: WriteOutcome = write()
        is_complete = True
    except StarlingError as error:
        outcome = error
    finally:
        log.info("write_ended", what=what, complete=is_complete)
    done(outcome)
