"""Thread of one logger with a bounded queue: a logger that is slow, hangs or fails does not disturb the run.

    put -> queue -> log -> mark        (queue full or exception: dropped and counted; too slow: the logger is dropped)

The mark is the last step that the logger has taken, in a file of the run's folder. In a new incarnation of the
controller it takes the later steps from metrics.jsonl, so a logger gets every committed step at least once, unless it
was reported as dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import structlog

from starling.common.raised import describe_raised
from starling.controller.shell.loggers.logger import Logger, Maker, Row

log = structlog.get_logger(__name__)

MAX_FAILURES: Final = 10
"""A logger that raises this many times in a row gets no more entries."""


@dataclass(frozen=True)
class LogEntry:
    """Metrics or samples that a logger gets in one call."""

    step: int
    metrics: Mapping[str, float] | None = None
    rows: Sequence[Row] | None = None
    is_step: bool = True
    """Whether these are the metrics of a committed step, which are logged at least once."""


class LoggerThread:
    """Feeds one logger. The public methods are for the controller's thread and do not block, except `close`.

    A thread that is stuck in a logger cannot be stopped. It is abandoned and ends with the process.
    """

    def __init__(self, name: str, mark: Path, *, max_waiting: int, deadline_s: float) -> None:
        """Prepare the thread; `begin` starts it.

        Args:
            name: name of the logger in the recipe.
            mark: file of the last step that it took.
            max_waiting: entries of this incarnation that may wait.
            deadline_s: longest time for the start of the logger, or for one entry.
        """
        self.name, self.num_dropped, self.problem = name, 0, ""
        self.is_given_up = False
        self._mark, self._max_waiting, self._deadline_s = mark, max_waiting, deadline_s
        self._changed = threading.Condition()
        self._queue: deque[LogEntry] = deque()
        self._closing = False
        self._busy_since: float | None = None
        self._in_progress = 0
        """Entries that the logger works on: 0 or 1."""
        self._num_failures = 0
        """Exceptions since the last success."""
        self._report_at = 1
        self._thread: threading.Thread | None = None

    @property
    def last_step(self) -> int:
        """The last step that the logger took in any incarnation of the controller; 0 for none."""
        with suppress(OSError, ValueError):
            return int(self._mark.read_text())
        return 0

    def begin(self, make: Maker, missed: Iterable[LogEntry] = ()) -> None:
        """Start the thread, which makes the logger and passes it the entries that it has missed."""
        first_step = self.last_step + 1
        self._busy_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._serve, args=(make, first_step, missed), name=self.name, daemon=True
        )
        self._thread.start()

    def put(self, entry: LogEntry) -> None:
        """Queue `entry`, or drop it when the queue is full."""
        with self._changed:
            if self.is_given_up or len(self._queue) >= self._max_waiting:
                self._drop(1, self.problem or f"{self._max_waiting} entries wait already")
            else:
                self._queue.append(entry)
                self._changed.notify()

    def check(self) -> None:
        """Drop a logger that hangs, and log how many entries were dropped. Called at intervals."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._deadline_s:
            self._give_up(f"it hangs: it took more than {self._deadline_s:g} s", in_progress=self._in_progress)
        if self.num_dropped >= self._report_at:
            log.warning("logger_drops", logger=self.name, dropped=self.num_dropped, reason=self.problem)
            while self._report_at <= self.num_dropped:
                self._report_at *= 10  # logged at 1, 10, 100, ... dropped entries

    def end(self) -> None:
        """Let the logger finish: no more entries will come."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for the logger to finish; abandon it if it does not."""
        self.end()
        if self._thread is not None and not self.is_given_up:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up("it had not finished when the run ended", in_progress=self._in_progress)
        self.check()

    # --- in the logger's thread ------------------------------------------------------------------------------------

    def _serve(self, make: Maker, first_step: int, missed: Iterable[LogEntry]) -> None:
        try:
            logger = make(first_step)
        except Exception as error:  # noqa: BLE001 - a logger may raise anything, and must not end the run
            self._give_up(f"it cannot start: {describe_raised(error)}")
            return
        self._busy_since = None
        try:
            for entry in chain(missed, iter(self._next, None)):
                if self.is_given_up:
                    return
                self._in_progress, self._busy_since = 1, time.monotonic()
                self._log(logger, entry)
                self._in_progress, self._busy_since = 0, None
        except (OSError, ValueError) as error:
            self._give_up(f"the steps that it has missed cannot be read: {describe_raised(error)}")
        if self.is_given_up:
            return
        try:
            logger.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(f"it cannot close: {describe_raised(error)}")

    def _next(self) -> LogEntry | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self.is_given_up)
            if self.is_given_up or not self._queue:
                return None
            return self._queue.popleft()

    def _log(self, logger: Logger, entry: LogEntry) -> None:
        try:
            if entry.metrics is not None:
                logger.log(entry.step, entry.metrics)
            if entry.rows is not None:
                logger.table(entry.step, entry.rows)
        except Exception as error:  # noqa: BLE001 - as above
            self._num_failures += 1
            with self._changed:
                self._drop(1, describe_raised(error))
            if self._num_failures == MAX_FAILURES:
                self._give_up(f"it failed {MAX_FAILURES} times in a row, the last time with {describe_raised(error)}")
            return
        self._num_failures = 0
        if entry.is_step and not self.is_given_up:
            with suppress(OSError):  # without the mark a step is logged again after a restart, which is allowed
                partial = self._mark.with_name(f".{self._mark.name}.partial")
                partial.write_text(str(entry.step))
                partial.rename(self._mark)

    # --- in either thread ------------------------------------------------------------------------------------------

    def _drop(self, num: int, reason: str) -> None:
        self.num_dropped += num
        self.problem = reason

    def _give_up(self, reason: str, in_progress: int = 0) -> None:
        with self._changed:
            if self.is_given_up:
                return
            self.is_given_up, self._busy_since = True, None
            self._drop(len(self._queue) + in_progress, reason)
            self._queue.clear()
            self._changed.notify()
        log.warning("logger_given_up", logger=self.name, reason=reason)
