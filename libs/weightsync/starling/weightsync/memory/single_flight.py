"""Thread-safe memoisation: each value is computed once, however many threads request it (single flight)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

COMPUTE_TIMEOUT_S: Final = 600.0
"""Longest wait for a value that another thread computes."""

MAX_VALUES: Final = 1 << 17
"""Values that are kept, at about 1.5 KiB each: a reader chooses the keys."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Values by key. Thread-safe.

    Args:
        most: how many values are kept; beyond them each is computed whenever it is requested.
    """

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._futures: dict[K, Future[V]] = {}
        self.num_computed = 0
        """How many values were computed here, and not put."""

    def get_or_compute(self, key: K, compute: Callable[[], V]) -> V:
        """Return the value of `key`; the first caller computes it, the others wait for that."""
        with self._lock:
            future = self._futures.get(key)
            if mine := future is None:
                self.num_computed += 1
                future = Future()
                if len(self._futures) < self._most:
                    self._futures[key] = future
        assert future is not None
        if mine:
            try:
                future.set_result(compute())
            except BaseException as error:  # passed on to the waiting callers, and re-raised
                with self._lock:
                    self._futures.pop(key, None)
                future.set_exception(error)
                raise
        return future.result(COMPUTE_TIMEOUT_S)

    def get(self, key: K) -> V | None:
        """Return the value of `key` if it has been computed."""
        with self._lock:
            future = self._futures.get(key)
        return None if future is None or not future.done() or future.exception() is not None else future.result()

    def put(self, key: K, value: V) -> None:
        """Set a value that was computed elsewhere."""
        future: Future[V] = Future()
        future.set_result(value)
        with self._lock:
            self._futures[key] = future
