"""One logger behind a bounded queue, on a thread of its own: whatever it does, the run goes on.

    put -> queue -> log -> mark        (full: dropped and counted; raises: counted; too slow: given up)

The mark is the last step that the logger has taken, in a file of the run's folder. Whoever begins again hands over the
steps after it, from the journal, so a logger gets every committed step at least once, unless it was told as dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from starling.controller.shell.loggers.logger import Logger, Maker, Row

log = structlog.get_logger(__name__)

FAILURES_IN_A_ROW: Final = 10
"""After so many exceptions without a success between them a logger gets no more."""


@dataclass(frozen=True)
class LogEntry:
    """What is handed to a logger at once."""

    step: int
    metrics: Mapping[str, float] | None = None
    rows: Sequence[Row] | None = None
    is_step: bool = True
    """These are the metrics of a committed step, which must not be lost."""


class LoggerThread:
    """Feeds one logger. What is public is the controller's, and never waits, but for `close` by its limit.

    A thread that is stuck in a logger cannot be stopped. It is left behind, and ends with the process.
    """

    def __init__(self, name: str, mark: Path, *, most_waiting: int, deadline_s: float) -> None:
        """Nothing is begun yet.

        Args:
            name: of the logger, as in the recipe.
            mark: file of the last step that it took.
            most_waiting: entries that wait at most, besides those of the past.
            deadline_s: how long the logger may take to begin, or for one entry.
        """
        self.name, self.num_dropped, self.problem = name, 0, ""
        self.is_given_up = False
        self._mark, self._most_waiting, self._deadline_s = mark, most_waiting, deadline_s
        self._changed = threading.Condition()
        self._queue: deque[LogEntry] = deque()
        self._num_past = 0
        self._closing = False
        self._busy_since: float | None = None
        self._in_hand = 0
        """Whether the logger works on an entry: 0 or 1."""
        self._failures_in_a_row = 0
        self._tell_at = 1
        self._thread: threading.Thread | None = None

    @property
    def last_step(self) -> int:
        """The last step that the logger took, whichever incarnation of the controller gave it; 0 for none."""
        with suppress(OSError, ValueError):
            return int(self._mark.read_text())
        return 0

    def begin(self, make: Maker, past: Iterable[LogEntry] = ()) -> None:
        """Make the logger, in its thread, and hand it first what it has missed of the past."""
        self._queue.extend(past)
        self._num_past = len(self._queue)
        first_step = self.last_step + 1
        self._busy_since = time.monotonic()
        self._thread = threading.Thread(target=self._serve, args=(make, first_step), name=self.name, daemon=True)
        self._thread.start()

    def put(self, entry: LogEntry) -> None:
        """Hand over `entry`, or drop it when too much waits already."""
        with self._changed:
            if self.is_given_up or len(self._queue) >= self._most_waiting + self._num_past:
                self._drop(1, self.problem or f"{self._most_waiting} entries wait already")
            else:
                self._queue.append(entry)
                self._changed.notify()

    def look(self) -> None:
        """Give up a logger that hangs, and tell what was dropped; to be called now and then."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._deadline_s:
            self._give_up(f"it hangs: it took more than {self._deadline_s:g} s", in_hand=self._in_hand)
        if self.num_dropped >= self._tell_at:
            log.warning("logger_drops", logger=self.name, dropped=self.num_dropped, reason=self.problem)
            while self._tell_at <= self.num_dropped:
                self._tell_at *= 10  # not once for every step

    def end(self) -> None:
        """Nothing more will come: let the logger finish."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for the logger to finish, and leave it behind if it does not."""
        self.end()
        if self._thread is not None and not self.is_given_up:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up("it had not finished when the run ended", in_hand=self._in_hand)
        self.look()

    # --- in the logger's thread ------------------------------------------------------------------------------------

    def _serve(self, make: Maker, first_step: int) -> None:
        try:
            logger = make(first_step)
        except Exception as error:  # noqa: BLE001 - a logger may raise anything, and must not end the run
            self._give_up(f"it cannot begin: {_sentence(error)}")
            return
        self._busy_since = None
        while (entry := self._next()) is not None:
            self._in_hand, self._busy_since = 1, time.monotonic()
            self._hand(logger, entry)
            self._in_hand, self._busy_since = 0, None
        if self.is_given_up:
            return
        try:
            logger.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(f"it cannot end: {_sentence(error)}")

    def _next(self) -> LogEntry | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self.is_given_up)
            if self.is_given_up or not self._queue:
                return None
            self._num_past = max(0, self._num_past - 1)
            return self._queue.popleft()

    def _hand(self, logger: Logger, entry: LogEntry) -> None:
        try:
            if entry.metrics is not None:
                logger.log(entry.step, entry.metrics)
            if entry.rows is not None:
                logger.table(entry.step, entry.rows)
        except Exception as error:  # noqa: BLE001 - as above
            self._failures_in_a_row += 1
            with self._changed:
                self._drop(1, _sentence(error))
            if self._failures_in_a_row == FAILURES_IN_A_ROW:
                self._give_up(f"it failed {FAILURES_IN_A_ROW} times in a row, the last time by {_sentence(error)}")
            return
        self._failures_in_a_row = 0
        if entry.is_step and not self.is_given_up:
            with suppress(OSError):  # without a mark the step comes once more after a restart, which is allowed
                partial = self._mark.with_name(f".{self._mark.name}.partial")
                partial.write_text(str(entry.step))
                partial.rename(self._mark)

    # --- in either -------------------------------------------------------------------------------------------------

    def _drop(self, num: int, reason: str) -> None:
        self.num_dropped += num
        self.problem = reason

    def _give_up(self, reason: str, in_hand: int = 0) -> None:
        with self._changed:
            if self.is_given_up:
                return
            self.is_given_up, self._busy_since = True, None
            self._drop(len(self._queue) + in_hand, reason)
            self._queue.clear()
            self._changed.notify()
        log.warning("logger_given_up", logger=self.name, reason=reason)


def _sentence(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
