"""Requests of HTTP clients and their results, in the server's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from starling.reward.core.requests import RequestResult, RewardRequest
from starling.reward.http.errors import HttpError
from starling.reward.http.settings import HttpSettings

RETRY_AFTER_S: Final = 1
ENTRY_BYTES: Final = 1024
"""What an entry takes besides the bytes of its request or result."""


@dataclass(slots=True, eq=False)
class _Entry:
    num_samples: int
    size_bytes: int
    """Of the request; of the result, once there is one."""
    result: bytes | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RequestTable:
    """Table of the requests of HTTP clients and their results, within the limits of the settings.

    A request is accepted or refused, and an accepted one is never dropped: its result is kept for `result_ttl_s`.

    Args:
        settings: the limits.
        submit: passes a request to the scorers.
        cancel: stops scoring the request of an id.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: HttpSettings,
        submit: Callable[[RewardRequest], None],
        cancel: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._submit, self._cancel, self._clock = settings, submit, cancel, clock
        self._max_bytes = settings.max_memory_mb << 20
        self._entries: dict[str, _Entry] = {}
        self._is_closed = False
        self._expiry: dict[str, float] = {}
        """When each result expires, in order."""
        self.num_samples = self.size_bytes = 0
        """Samples that are being scored, and memory of requests and results."""

    def __len__(self) -> int:
        return len(self._entries)

    def check_room(self, num_bytes: int) -> None:
        """Raise HttpError if a body of `num_bytes` would exceed the limit on memory."""
        self._drop_expired()
        if self.size_bytes + num_bytes > self._max_bytes:
            raise HttpError(
                429,
                f"requests and results take {self.size_bytes >> 20} MiB of reward.http.max_memory_mb; remove results "
                "that you have fetched, or try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def add(self, request: RewardRequest, num_bytes: int) -> None:
        """Accept a request, whose body had `num_bytes`. Raises HttpError when it would exceed a limit."""
        self.check_room(num_bytes + ENTRY_BYTES)
        num = len(request.samples)
        if self.num_samples and self.num_samples + num > self._settings.max_samples:
            raise HttpError(
                429,
                f"{self.num_samples} samples are being scored, and reward.http.max_samples is "
                f"{self._settings.max_samples}; try again",
                retry_after_s=RETRY_AFTER_S,
            )
        self._entries[request.id] = _Entry(num, num_bytes + ENTRY_BYTES)
        self.num_samples += num
        self.size_bytes += num_bytes + ENTRY_BYTES
        self._submit(request)

    def finish(self, result: RequestResult) -> None:
        """Keep the result of a request, and wake those who wait for it."""
        entry = self._entries.get(result.id)
        if entry is None or entry.result is not None:
            return
        entry.result = msgspec.json.encode(
            {
                "id": result.id,
                "status": "done",
                "rewards": result.rewards,
                "statuses": result.statuses,
                "problems": result.problems,
                "scores": result.scores,
            }
        )
        self.num_samples -= entry.num_samples
        self._resize(entry, len(entry.result) + ENTRY_BYTES)
        self._expiry[result.id] = self._clock() + self._settings.result_ttl_s
        entry.done.set()

    async def result(self, id: str, wait_s: float) -> bytes | None:
        """Return the result of a request as JSON; None if it does not come within `wait_s`.

        Raises:
            HttpError: there is no such request, or no more.
        """
        entry = self._entry(id)
        if entry.result is None and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await entry.done.wait()
            except TimeoutError:
                return None
            if self._is_closed:
                raise HttpError(503, "the service is stopping; ask another one")
            if entry.result is None:
                raise self._unknown(id)
        return entry.result

    def remove(self, id: str) -> None:
        """Forget a request, and stop scoring it. Raises HttpError when there is no such request."""
        entry = self._entry(id)
        del self._entries[id]
        entry.done.set()
        self.size_bytes -= entry.size_bytes
        self._expiry.pop(id, None)
        if entry.result is None:
            self.num_samples -= entry.num_samples
            self._cancel(id)

    def close(self) -> None:
        """End the waiting of all clients: the service stops."""
        self._is_closed = True
        for entry in self._entries.values():
            entry.done.set()

    def _entry(self, id: str) -> _Entry:
        self._drop_expired()
        entry = self._entries.get(id)
        if entry is None:
            raise self._unknown(id)
        return entry

    def _unknown(self, id: str) -> HttpError:
        return HttpError(404, f"there is no request {id[:100]!r}, or its result has expired; ask again")

    def _resize(self, entry: _Entry, size_bytes: int) -> None:
        self.size_bytes += size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._expiry:
            id, expires_at = next(iter(self._expiry.items()))
            if expires_at > now:
                return
            del self._expiry[id]
            self.size_bytes -= self._entries.pop(id).size_bytes
