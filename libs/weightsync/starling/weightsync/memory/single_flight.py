"""Thread-safe memoisation: each value is computed once, however many threads request it (single flight)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

COMPUTE_TIMEOUT_S: Final = 600.0
"""Longest wait for a value that another thread computes."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Values by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[K, Future[V]] = {}
        self.num_computed = 0
        """How many values were computed here, and not put."""

    def get_or_compute(self, key: K, compute: Callable[[], V]) -> V:
        """Return the value of `key`; the first caller computes it, the others wait for that."""
        with self._lock:
            future = self._futures.get(key)
            if mine := future is None:
                future = self._futures[key] = Future()
                self.num_computed += 1
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
