"""Requests of HTTP clients that this instance scores, within its limits, in the server's event loop.

    add --> stored --> scoring --> result stored --> (only in the store)

A request is accepted or refused, and an accepted one is answered: it is stored before its client is told its id, and
its client is told its result once that is stored. What the store still holds from an instance that has gone is read
from its body again, and scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import structlog

from starling.common.wire.messages import Status
from starling.reward.core.requests import RequestResult, RewardRequest
from starling.reward.http.errors import HttpError, StoreUnavailable, UnreadableResult
from starling.reward.http.settings import HttpSettings
from starling.reward.http.stores.store import (
    ENTRY_BYTES,
    FinishedRequest,
    RequestBody,
    RequestStore,
    StoredRequest,
    decode_result,
    encode_result,
)
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer

log = structlog.get_logger(__name__)

RETRY_AFTER_S: Final = 1
MAX_LOGGED: Final = 1000
CLOSE_S: Final = 2.0
"""How long the last results may take to be stored when the service stops."""
MAX_DEATHS: Final = 3
"""A request whose scoring has ended so many instances is answered as failed, or it would end all others, too."""
POLL_INTERVALS_S: Final = (0.02, 0.05, 0.1, 0.25)
"""How often the store is asked for the result of another instance: the last one again and again."""

Reader = Callable[[bytes, str], RewardRequest]
"""Reads the body of a request with an id. Raises ValueError or HttpError for one that this service cannot score."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that this instance scores."""

    stored: StoredRequest
    """Without its body."""
    size_bytes: int
    """Of the request; of the result, once there is one."""
    began: float
    is_finished: bool = False
    """Whether it has all scores; its result may still be on its way to the store."""
    result: FinishedRequest | None = None
    """Set once it is stored."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RequestTable:
    """Table of the requests that this instance scores, within the limits of the settings.

    Args:
        settings: the limits.
        store: keeps requests and results.
        submit: passes a request to the scorers.
        cancel: stops scoring the request of an id.
        readers: of stored bodies, by their forms.
        media: has the media of requests.
        pixel_bytes: returns how much memory the pixels take that are made of the latents of a request.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: HttpSettings,
        store: RequestStore,
        submit: Callable[[RewardRequest], None],
        cancel: Callable[[str], None],
        readers: Mapping[str, Reader],
        media: MediaMemory | None = None,
        pixel_bytes: Callable[[RewardRequest], int] = lambda request: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._store, self._clock = settings, store, clock
        self._submit, self._cancel, self._readers = submit, cancel, readers
        self._media, self._pixel_bytes = media or MediaMemory(), pixel_bytes
        self._max_bytes = settings.max_memory_mb << 20
        self._entries: dict[str, _Entry] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        """Tasks that store results."""
        self._tending: list[asyncio.Task[None]] = []
        """Tasks that renew the ownership of requests, and take those without an owner."""
        self._is_open = self._is_closed = False
        self._closed = asyncio.Event()
        self._reading = asyncio.Lock()
        self.num_samples = self.size_bytes = 0
        """Samples that are being scored, and memory of requests, of bodies that are being read, and of results that are
        not stored yet."""

    def __len__(self) -> int:
        return len(self._entries) + self._store.num_results

    @property
    def held_bytes(self) -> int:
        """What requests and results take."""
        return self.size_bytes + self._store.size_bytes + self._media.size_bytes

    @property
    def problem(self) -> str:
        """Why no request would be accepted; empty if one would."""
        has_failed = any(task.done() for task in self._tending) and not self._is_closed
        return "it has failed; see the log" if has_failed else self._store.problem

    async def start(self) -> None:
        """Open the store, and begin to score the requests that it holds. Raises ConfigError."""
        await self._store.open()
        self._is_open = True
        self._tending = [asyncio.create_task(self._renew()), asyncio.create_task(self._take())]
        for task in self._tending:
            task.add_done_callback(_report_failure)

    def check_room(self, num_bytes: int) -> None:
        """Raise HttpError if a body of `num_bytes` would exceed the limit on memory."""
        self._check_alone(num_bytes)
        held = self.held_bytes
        if held + num_bytes > self._max_bytes:
            raise HttpError(
                429,
                f"requests and results take {held >> 20} MiB of reward.http.max_memory_mb; remove results "
                "that you have fetched, or try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    @asynccontextmanager
    async def reading(self, num_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Count what a large body takes while it is read, besides its media, and wait until it may be read.

        One is read at a time: each takes several times its size meanwhile, and room for media that was found is still
        there when they are written. Yields a function that counts more for it, and raises HttpError, too.

        Raises:
            HttpError: there is no room for it.
        """
        counted = 0

        def count(more_bytes: int) -> None:
            nonlocal counted
            self._check_alone(counted + more_bytes)
            self.check_room(more_bytes)
            self.size_bytes += more_bytes
            counted += more_bytes

        try:
            count(num_bytes)
            async with self._reading:
                yield count
        finally:
            self.size_bytes -= counted

    def _check_alone(self, num_bytes: int) -> None:
        """Raise HttpError if a body that takes `num_bytes` would never have room."""
        if num_bytes > self._max_bytes:
            raise HttpError(
                413,
                f"the body would take {num_bytes >> 20} MiB in memory, and reward.http.max_memory_mb is "
                f"{self._max_bytes >> 20}; send fewer samples, or values, at a time",
            )

    async def add(
        self,
        request: RewardRequest,
        num_bytes: int,
        body: RequestBody | None = None,
        info: dict[str, Any] | None = None,
    ) -> None:
        """Accept a request under a new id: once this returns, it will be answered.

        Args:
            request: what is to be scored.
            num_bytes: about what it takes in memory, its media included.
            body: as it arrived; its form has a reader, which makes an equal request of it.
            info: what the routes want to know of it with its result; values of MessagePack.

        Raises:
            HttpError: it would exceed a limit, or the store cannot be reached. It is not scored.
        """
        self._check_open()
        self._check_fits(request, num_bytes)
        num = len(request.samples)
        if self.num_samples and self.num_samples + num > self._settings.max_samples:
            raise HttpError(
                429,
                f"{self.num_samples} samples are being scored, and reward.http.max_samples is "
                f"{self._settings.max_samples}; try again",
                retry_after_s=RETRY_AFTER_S,
            )
        stored = StoredRequest(
            id=request.id, body=body or RequestBody(), num_samples=num, num_bytes=num_bytes, info=info or {}
        )
        self._hold(stored, request.media_bytes)
        self._reserve_pixels(request)
        stored_bytes = 2 * len(stored.body.data)  # with the record that is made of it
        self.size_bytes += stored_bytes
        try:
            await self._store.put(stored)
        except BaseException:
            self._drop(request.id)
            raise
        finally:
            self.size_bytes -= stored_bytes
        self._submit(request)

    def _check_fits(self, request: RewardRequest, num_bytes: int) -> None:
        """Raise HttpError where there is no room for a request, whose media are there, with the pixels of its latents.

        Args:
            request: what is to be scored.
            num_bytes: about what it takes in memory, its media included.
        """
        pixel_bytes = self._pixel_bytes(request)
        if num_bytes + pixel_bytes > self._max_bytes:
            raise HttpError(
                413,
                f"its latents decode to {pixel_bytes >> 20} MiB of pixels, which with the request are more than "
                f"reward.http.max_memory_mb, {self._max_bytes >> 20}; send fewer samples at a time",
            )
        self.check_room(max(0, num_bytes - request.media_bytes) + pixel_bytes + ENTRY_BYTES)

    def _reserve_pixels(self, request: RewardRequest) -> None:
        """Count the pixels of a request before they are made: others may be accepted until then."""
        if request.media and isinstance(latents := request.media[0].buffer, SharedBuffer):
            latents.reserve(self._pixel_bytes(request))

    def finish(self, result: RequestResult) -> None:
        """Store the result of a request, and then wake those who wait for it. Called in the event loop."""
        entry = self._entries.get(result.id)
        if entry is None or entry.is_finished:
            return
        entry.is_finished = True
        self.num_samples -= entry.stored.num_samples
        duration_s = self._clock() - entry.began
        data = encode_result(FinishedRequest(result=result, info=entry.stored.info, duration_s=duration_s))
        self._resize(entry, len(data) + ENTRY_BYTES)
        task = asyncio.get_running_loop().create_task(self._keep(entry, data))
        self._keeping.add(task)  # the event loop alone would not keep it alive
        task.add_done_callback(self._keeping.discard)

    async def result(self, id: str, wait_s: float) -> FinishedRequest | None:
        """Return the result of a request; None if it does not come within `wait_s`.

        Raises:
            HttpError: there is no such request, or no more; or the store cannot be reached.
            UnreadableResult: others have written what the store has as its result.
        """
        end = self._clock() + wait_s
        num_polls = 0
        while True:
            self._check_open()
            entry = self._entries.get(id)
            if entry is None:
                found = await self._store.find(id)
                if found is None:
                    raise self._unknown(id)
                if isinstance(found, bytes):
                    return self._decoded(id, found)
            left_s = end - self._clock()
            if left_s <= 0:
                return None
            if entry is None:  # another instance scores it, or none does yet
                pause_s = POLL_INTERVALS_S[min(num_polls, len(POLL_INTERVALS_S) - 1)]
                num_polls += 1
                await self._wait(self._closed, min(pause_s, left_s))
            elif not await self._wait(entry.done, left_s):
                return None
            elif entry.result is not None:
                return entry.result

    async def remove(self, id: str) -> None:
        """Forget a request, and stop scoring it. Raises HttpError when there is no such request."""
        self._check_open()
        if not await self._store.remove(id) and id not in self._entries:
            raise self._unknown(id)
        self._give_up(id)

    def end_waiting(self) -> None:
        """End the waiting of all clients, and accept nothing more: the service stops."""
        self._is_closed = True
        self._closed.set()
        for entry in self._entries.values():
            entry.done.set()

    async def close(self) -> None:
        """Store the last results, and give the requests that have none to another instance or the next process."""
        self.end_waiting()
        for task in self._tending:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*self._keeping)
        if self._is_open:
            with contextlib.suppress(StoreUnavailable):
                await self._store.close()

    async def _renew(self) -> None:
        """Renew the ownership of requests, until the service stops.

        In a task of its own: to read what was taken can take longer than a lease, after which other instances would
        take all requests of this one.
        """
        while True:
            with contextlib.suppress(StoreUnavailable):  # it says so itself
                for id in await self._store.renew():
                    self._give_up(id)
            await asyncio.sleep(self._store.renew_interval_s)

    async def _take(self) -> None:
        """Score stored requests without an owner, until the service stops."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._take_all()
            await asyncio.sleep(self._store.renew_interval_s)

    async def _take_all(self) -> None:
        """Take requests as long as there are some, and room for them."""
        while True:
            num = self._settings.max_samples - self.num_samples
            room = self._max_bytes - self.held_bytes
            if self.num_samples and (num <= 0 or room <= 0):
                return
            taken = [one for one in await self._store.take(num, room) if one.id not in self._entries]
            if not taken:
                return
            for stored in taken:
                self._hold(stored, stored.num_bytes)  # its reader asks for room
            while taken:  # none is kept in memory longer than it must
                await self._score_again(taken.pop(0))

    async def _score_again(self, stored: StoredRequest) -> None:
        """Score a request of an instance that has gone, or answer it as failed where that cannot be done."""
        if stored.id not in self._entries:  # it was removed meanwhile
            return
        try:
            request = await self._read_again(stored)
        except _UnusableRequest as error:
            log.warning("stored_request_failed", id=stored.id, reason=str(error))
            self.finish(_failed(stored, str(error)))
            return
        entry = self._entries.get(stored.id)
        if entry is not None and not entry.is_finished:  # it was not removed meanwhile
            num = len(request.samples)  # others may have written the record
            self.num_samples += num - entry.stored.num_samples
            entry.stored = msgspec.structs.replace(entry.stored, num_samples=num)
            self._resize(entry, max(0, stored.num_bytes - request.media_bytes) + ENTRY_BYTES)
            self._submit(request)

    async def _read_again(self, stored: StoredRequest) -> RewardRequest:
        """Read a stored body, once there is room for it. Raises _UnusableRequest."""
        if stored.num_deaths > MAX_DEATHS:
            raise _UnusableRequest(f"{stored.num_deaths} processes of the service ended while this request was scored.")
        reader = self._readers.get(stored.body.form)
        if reader is None:
            raise _UnusableRequest("the stored request is damaged, or of another version of the service.")
        end = self._clock() + self._settings.timeout_s
        while True:
            try:
                return await self._read_once(reader, stored)
            except (HttpError, ValueError) as error:
                if not (isinstance(error, HttpError) and error.status == 429) or self._clock() >= end:
                    raise _UnusableRequest(f"the request cannot be read again after a restart: {error}") from None
            await asyncio.sleep(RETRY_AFTER_S)

    async def _read_once(self, reader: Reader, stored: StoredRequest) -> RewardRequest:
        """Read a stored body. Raises HttpError where there is no room, and what its reader raises."""
        async with self._reading:  # in a thread: other clients are not to wait for it
            request = await asyncio.to_thread(reader, stored.body.data, stored.id)
        self._check_fits(request, stored.num_bytes)
        self._reserve_pixels(request)
        return request

    async def _keep(self, entry: _Entry, data: bytes) -> None:
        """Store a result, however long it takes; then only the store holds it."""
        id = entry.stored.id
        while True:
            try:
                first = await self._store.finish(entry.stored, data)
                break
            except StoreUnavailable:  # it says so itself
                await asyncio.sleep(RETRY_AFTER_S)
        if self._entries.get(id) is not entry:  # removed
            return
        if first is not None:
            with contextlib.suppress(HttpError):  # another instance's, which those who wait are told
                entry.result = self._decoded(id, first)
        self._drop(id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise HttpError(503, "the service is stopping; ask another one")
        if not self._is_open:
            raise HttpError(503, "the service is starting; try again", retry_after_s=RETRY_AFTER_S)

    def _hold(self, stored: StoredRequest, media_bytes: int = 0) -> None:
        """Count a request that is scored from now on, without its media, which their memory counts."""
        size_bytes = stored.num_bytes - media_bytes + ENTRY_BYTES
        without_body = msgspec.structs.replace(stored, body=RequestBody(stored.body.form))
        self._entries[stored.id] = _Entry(without_body, size_bytes, self._clock())
        self.num_samples += stored.num_samples
        self.size_bytes += size_bytes

    def _give_up(self, id: str) -> None:
        """Stop scoring a request, which was removed or is another instance's."""
        entry = self._entries.get(id)
        if entry is None:
            return
        if not entry.is_finished:
            self._cancel(id)
        self._drop(id)

    def _drop(self, id: str) -> None:
        entry = self._entries.pop(id)
        self.size_bytes -= entry.size_bytes
        if not entry.is_finished:
            self.num_samples -= entry.stored.num_samples
        entry.done.set()

    def _decoded(self, id: str, data: bytes) -> FinishedRequest:
        try:
            return decode_result(data)
        except ValueError as error:
            log.warning("stored_result_refused", id=id, reason=str(error))
            raise UnreadableResult(id) from None

    def _unknown(self, id: str) -> HttpError:
        return HttpError(404, f"there is no request {id[:100]!r}, or its result has expired; ask again")

    def _resize(self, entry: _Entry, size_bytes: int) -> None:
        self.size_bytes += size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait for an event; return False when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await event.wait()
        except TimeoutError:
            return False


class _UnusableRequest(Exception):
    """A stored request that cannot be scored; one sentence says why."""


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("store_failed", error=repr(error)[:MAX_LOGGED])


def _failed(stored: StoredRequest, problem: str) -> RequestResult:
    """Return a result in which every sample has failed."""
    num = stored.num_samples
    return RequestResult(stored.id, (None,) * num, (Status.REWARD_ERROR,) * num, ((problem,),) * num, {})
