"""Store in memory: results until they expire, and nothing that survives the process."""

from __future__ import annotations

import time
from collections.abc import Callable

from starling.reward.http.stores.store import ENTRY_BYTES, PENDING, Pending, StoredRequest


class MemoryStore:
    """Results of one process.

    Args:
        result_ttl_s: how long a result is kept, in seconds.
        clock: monotonic seconds.
    """

    renew_interval_s = 60.0
    problem = ""

    def __init__(self, result_ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._result_ttl_s, self._clock = result_ttl_s, clock
        self._pending: set[str] = set()
        self._results: dict[str, tuple[float, bytes]] = {}
        """When each result expires, in order, and the result."""
        self._size_bytes = 0

    @property
    def num_results(self) -> int:
        """Results that have not expired."""
        self._drop_expired()
        return len(self._results)

    @property
    def size_bytes(self) -> int:
        """What they take."""
        self._drop_expired()
        return self._size_bytes

    async def open(self) -> None:
        """Do nothing."""

    async def put(self, request: StoredRequest) -> None:
        """Know a pending request."""
        self._pending.add(request.id)

    async def finish(self, request: StoredRequest, result: bytes) -> bytes | None:
        """Keep a result, unless its request was removed or has one."""
        if request.id not in self._pending:
            return self._results.get(request.id, (0.0, None))[1]
        self._pending.remove(request.id)
        self._results[request.id] = self._clock() + self._result_ttl_s, result
        self._size_bytes += len(result) + ENTRY_BYTES
        return result

    async def find(self, id: str) -> bytes | Pending | None:
        """Return the result of a request."""
        if id in self._pending:
            return PENDING
        self._drop_expired()
        return self._results.get(id, (0.0, None))[1]

    async def remove(self, id: str) -> bool:
        """Forget a request and its result."""
        self._drop_expired()
        if id in self._pending:
            self._pending.remove(id)
            return True
        return self._forget(id)

    async def take(self, max_samples: int, max_bytes: int) -> list[StoredRequest]:
        """Return nothing: requests end with the process."""
        return []

    async def renew(self) -> set[str]:
        """Return nothing: there is no other instance."""
        return set()

    async def close(self) -> None:
        """Do nothing."""

    def _forget(self, id: str) -> bool:
        entry = self._results.pop(id, None)
        if entry is None:
            return False
        self._size_bytes -= len(entry[1]) + ENTRY_BYTES
        return True

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._results:
            id, (expires_at, _) = next(iter(self._results.items()))
            if expires_at > now:
                return
            self._forget(id)
