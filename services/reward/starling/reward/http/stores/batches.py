"""Batches of the operations that wait for a store: one commit, or one round trip, for many concurrent requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import structlog

from starling.reward.http.errors import StoreUnavailable

log = structlog.get_logger(__name__)

Operation = TypeVar("Operation")

REFUSED_INTERVAL_S: Final = 60.0
"""Between two lines of the log on operations that a store refuses while it can be reached, or that fail unexpectedly.
"""
MAX_LOGGED: Final = 1000
MAX_OPERATIONS: Final = 256
MAX_BYTES: Final = 16 << 20
"""Bodies of one batch, unless it is a single one."""


class Availability:
    """Whether a store can be reached: one line in the log each time that this changes."""

    def __init__(self, store: str) -> None:
        self._store = store
        self.problem = ""
        """Why it cannot be reached; empty if it can."""
        self._since = 0.0
        self._refused_at = -math.inf

    def failed(self, reason: str) -> None:
        """Note that an operation has failed."""
        if not self.problem:
            self._since = time.monotonic()
            log.warning("store_unavailable", store=self._store, reason=reason)
        self.problem = reason

    def refused(self, reason: str) -> None:
        """Note that the store answers, and has refused an operation, as where its memory is full."""
        now = time.monotonic()
        if now - self._refused_at >= REFUSED_INTERVAL_S:
            self._refused_at = now
            log.warning("store_refused", store=self._store, reason=reason)

    def succeeded(self) -> None:
        """Note that an operation has succeeded."""
        if self.problem:
            log.info("store_available", store=self._store, after_s=round(time.monotonic() - self._since, 3))
        self.problem = ""


class Batches(Generic[Operation]):
    """Carries out operations in their order, as many as wait at a time.

    An unexpected error of the store is reported to the callers of its batch, and the next batches are carried out.

    Args:
        commit: carries out a batch as a whole, and returns one outcome for each operation; an exception as an outcome
            is raised to the caller of that operation. What it raises is for all of them.
        size_of: what an operation takes, in bytes.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Operation]], Awaitable[Sequence[Any]]],
        size_of: Callable[[Operation], int],
    ) -> None:
        self._commit, self._size_of = commit, size_of
        self._waiting: deque[tuple[Operation, int, asyncio.Future[Any]]] = deque()
        """With the size of each."""
        self._worker: asyncio.Task[None] | None = None
        self._failed_at = -math.inf
        """When an unexpected error was logged last, in monotonic seconds."""

    async def run(self, operation: Operation, timeout_s: float | None = None) -> Any:
        """Carry out an operation, and return its outcome.

        Raises:
            StoreUnavailable: it has failed, or was not carried out within `timeout_s`; then it still may be.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, self._size_of(operation), future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise StoreUnavailable(f"it has not answered within {timeout_s:g} s") from None

    async def flush(self) -> None:
        """Wait until all operations have been carried out."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        try:
            while batch := self._next():
                await self._carry_out(batch)
        finally:
            self._worker = None

    def _next(self) -> list[tuple[Operation, asyncio.Future[Any]]]:
        batch: list[tuple[Operation, asyncio.Future[Any]]] = []
        num_bytes = 0
        while self._waiting and len(batch) < MAX_OPERATIONS:
            operation, size_bytes, future = self._waiting[0]
            num_bytes += size_bytes
            if batch and num_bytes > MAX_BYTES:
                break
            self._waiting.popleft()
            if not future.done():  # its caller has given up
                batch.append((operation, future))
        return batch

    async def _carry_out(self, batch: list[tuple[Operation, asyncio.Future[Any]]]) -> None:
        outcomes: Sequence[Any]
        try:
            outcomes = await self._commit([operation for operation, _ in batch])
            assert len(outcomes) == len(batch), f"{len(outcomes)} outcomes of {len(batch)} operations"
        except StoreUnavailable as error:
            outcomes = [StoreUnavailable(error.reason) for _ in batch]
        except Exception as error:  # noqa: BLE001 - the edge of a task, without which no operation would be carried out
            self._log(error)
            outcomes = [_not_completed(error) for _ in batch]
        except BaseException as error:  # the event loop ends
            for future in [future for _, future in batch] + [future for *_, future in self._waiting]:
                if not future.done():
                    future.set_exception(_not_completed(error))
            self._waiting.clear()
            raise
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _log(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._failed_at >= REFUSED_INTERVAL_S:  # callers may try again each second
            self._failed_at = now
            log.error("store_error", error=repr(error)[:MAX_LOGGED])


def _not_completed(error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"the operation was not completed: {error!r}")
