"""Client of a reward service for code without an event loop: the asynchronous one, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar

from starling.common.errors import ConfigError
from starling.rewardclient.client import CLOSE_S, AsyncRewardClient
from starling.rewardclient.environment import settings_from_environment
from starling.rewardclient.protocols.protocol import Ticket
from starling.rewardclient.rewards import Rewards
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import ClientSettings
from starling.rewardclient.tasks import end

T = TypeVar("T")
GRACE_S: Final = 30.0
"""Beyond its own deadline, a call that has not ended is given up."""
START_S: Final = 30.0


class RewardClient:
    """Client of a reward service; also a context manager. Threads may share it.

    The methods are those of `AsyncRewardClient`, and `submit`. A forked process gets its own thread and connections.

    Args:
        settings: by default those of the environment, see `settings_from_environment`.

    Raises:
        ConfigError: no service is named.
    """

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.settings = settings or settings_from_environment()
        self._lock = threading.Lock()
        self._worker: _LoopThread | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, samples: Sequence[RewardSample], *, timeout_s: float | None = None, min_valid_rate: float | None = None
    ) -> Rewards:
        """Return the rewards of samples; see `AsyncRewardClient.score`."""
        return self._result(self.submit(samples, timeout_s=timeout_s, min_valid_rate=min_valid_rate), timeout_s)

    def submit(
        self, samples: Sequence[RewardSample], *, timeout_s: float | None = None, min_valid_rate: float | None = None
    ) -> Future[Rewards]:
        """Start to score samples; return the future of their rewards. To cancel it removes them at the service."""
        return self._run(lambda client: client.score(samples, timeout_s=timeout_s, min_valid_rate=min_valid_rate))

    def enqueue(self, samples: Sequence[RewardSample], *, timeout_s: float | None = None) -> Ticket:
        """Send samples; return the ticket for their rewards; see `AsyncRewardClient.enqueue`."""
        return self._result(self._run(lambda client: client.enqueue(samples, timeout_s=timeout_s)), timeout_s)

    def fetch(self, ticket: Ticket, *, timeout_s: float | None = None, remove: bool = True) -> Rewards:
        """Return the rewards of a ticket; see `AsyncRewardClient.fetch`."""
        return self._result(
            self._run(lambda client: client.fetch(ticket, timeout_s=timeout_s, remove=remove)), timeout_s
        )

    def fetch_many(
        self, tickets: Sequence[Ticket], *, timeout_s: float | None = None, min_valid_rate: float | None = None
    ) -> list[Rewards]:
        """Return the rewards of many tickets; see `AsyncRewardClient.fetch_many`."""
        future = self._run(
            lambda client: client.fetch_many(tickets, timeout_s=timeout_s, min_valid_rate=min_valid_rate)
        )
        return self._result(future, timeout_s)

    def remove(self, ticket: Ticket) -> None:
        """Stop scoring the samples of a ticket; see `AsyncRewardClient.remove`."""
        self._result(self._run(lambda client: client.remove(ticket)), None)

    def close(self) -> None:
        """Cancel calls in progress, finish removals for some seconds, and close all connections."""
        with self._lock:
            worker, self._worker, self._is_closed = self._worker, None, True
        if worker is not None and worker.pid == os.getpid():
            worker.close()

    def _run(self, call: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self._is_closed:
                raise ConfigError("the reward client is closed; make another one")
            if self._worker is None or self._worker.pid != os.getpid():  # threads do not survive a fork
                self._worker = _LoopThread(self.settings)
            return self._worker.run(call)

    def _result(self, future: Future[T], timeout_s: float | None) -> T:
        try:
            return future.result((self.settings.timeout_s if timeout_s is None else timeout_s) + GRACE_S)
        finally:
            future.cancel()  # of no effect unless this thread was interrupted


class _LoopThread:
    """A thread with an event loop and a client in it."""

    def __init__(self, settings: ClientSettings) -> None:
        self.pid = os.getpid()
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="reward-client", daemon=True)
        self._thread.start()
        self._client = asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(START_S)
        self._calls = set[asyncio.Task[Any]]()

    def run(self, call: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a call; return its future."""
        return asyncio.run_coroutine_threadsafe(self._call(call), self._loop)

    def close(self) -> None:
        """Cancel all calls, and end the thread."""
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(2 * CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _connect(self) -> AsyncRewardClient:
        return AsyncRewardClient(self._settings)

    async def _call(self, call: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        self._calls.add(task)
        try:
            return await call(self._client)
        finally:
            self._calls.discard(task)

    async def _close(self) -> None:
        await end(list(self._calls))
        await self._client.close()
