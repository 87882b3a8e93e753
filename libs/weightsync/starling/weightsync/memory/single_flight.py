"""Values that are computed once however many threads ask for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

COMPUTE_S: Final = 600.0
"""By then a value is computed, or something is wrong."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Values by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[K, Future[V]] = {}
        self.num_computed = 0
        """How many were computed here, and not found."""

    def of(self, key: K, compute: Callable[[], V]) -> V:
        """Return the value of `key`; the first who asks computes it, the others wait for that."""
        with self._lock:
            future = self._known.get(key)
            if mine := future is None:
                future = self._known[key] = Future()
                self.num_computed += 1
        assert future is not None
        if mine:
            try:
                future.set_result(compute())
            except BaseException as error:  # told to who waits for this value, and raised again
                with self._lock:
                    self._known.pop(key, None)
                future.set_exception(error)
                raise
        return future.result(COMPUTE_S)

    def find(self, key: K) -> V | None:
        """Return the value of `key` if it has been computed."""
        with self._lock:
            future = self._known.get(key)
        return None if future is None or not future.done() or future.exception() is not None else future.result()

    def put(self, key: K, value: V) -> None:
        """Keep a value that came from elsewhere."""
        future: Future[V] = Future()
        future.set_result(value)
        with self._lock:
            self._known[key] = future
