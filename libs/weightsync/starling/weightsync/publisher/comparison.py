"""Comparison of each snapshot with the previous one, which the next snapshot interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from starling.weightsync.delta.format import DeltaTotal
from starling.weightsync.memory.arrays import Array
from starling.weightsync.publisher.delta_history import DeltaHistory

END_TIMEOUT_S: Final = 600.0
"""Longest wait for an interrupted comparison, which ends after some milliseconds."""


class Comparison:
    """Fills a history of deltas, in the digesting thread and after the digests.

    Args:
        history: gets the deltas.
        pool: the digesting thread.
        notify: called when there are more deltas, and at the end.
    """

    def __init__(self, history: DeltaHistory, pool: ThreadPoolExecutor, notify: Callable[[], None]) -> None:
        self._history, self._pool, self._notify = history, pool, notify
        self._stop = threading.Event()
        self._running: Future[DeltaTotal | None] | None = None

    def begin(self, snapshot: int, version: int, base: int) -> None:
        """Announce a snapshot, see `DeltaHistory.begin`."""
        self._history.begin(snapshot, version, base)

    def start(self, old: Sequence[Array], new: Sequence[Array]) -> Future[DeltaTotal | None]:
        """Compare the announced snapshot with the previous one. The result is None when it was interrupted."""
        self._stop.clear()
        self._running = self._pool.submit(self._run, old, new)
        return self._running

    def interrupt(self) -> None:
        """End the comparison, which reads what the next snapshot overwrites: publishing does not wait for deltas."""
        future, self._running = self._running, None
        if future is None:
            return
        self._stop.set()
        if future.cancel():
            self._history.end(None)
        elif not future.cancelled():
            future.exception(END_TIMEOUT_S)

    def stop(self) -> None:
        """End the comparison without waiting; there will be no other."""
        self._stop.set()

    def _run(self, old: Sequence[Array], new: Sequence[Array]) -> DeltaTotal | None:
        try:
            return self._history.compare(old, new, self._stop.is_set, self._notify)
        finally:
            self._notify()
