"""NIXL server: one thread that answers readers, and drives NIXL for them."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.memory.arrays import Array, Memory, allocate, grouped, is_direct, pack, packing_bytes
from starling.weightsync.memory.device_handles import location_of
from starling.weightsync.memory.device_memory import SharedDeviceMemory
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, LONGEST_WAIT_S, MAX_QUEUED_BYTES, MAX_WAITING
from starling.weightsync.transports.messages import (
    OPENING_BYTES,
    REQUEST_BYTES,
    MeasureDeltas,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_request,
    encode_message,
    refusal,
    still_waiting,
    with_checksum,
)
from starling.weightsync.transports.nixl.agent import NixlAgent, device_of
from starling.weightsync.transports.nixl.protocol import (
    ANSWER,
    FETCHED,
    HOST,
    LOCATION,
    NUMBER,
    REQUEST,
    PayloadLocation,
)
from starling.weightsync.transports.sockets.connections import ReaderConnections
from starling.weightsync.transports.sockets.listener import Listener
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel
from starling.weightsync.transports.source import (
    Grant,
    LastRefusalError,
    ReaderSession,
    SnapshotSource,
    WaitingNotice,
)

NUM_THREADS: Final = 4
"""Maximum number of threads of a server that pack and digest."""
PACKING_BYTES: Final = 256 << 20
"""Largest packing buffer of a server; a single request may need a larger one, and then is alone."""
FIRST_PACKING_BYTES: Final = 16 << 20
"""Minimum size of the packing buffer, which is allocated when first needed."""
FETCH_TIMEOUT_S: Final = 60.0
"""How long a reader may take to fetch a payload before it is disconnected: others need the packing buffer."""
POLL_S: Final = 0.001
"""How often NIXL is driven while a reader fetches."""
_NO_MEMORY: Final = allocate(0)

T = TypeVar("T")

log = logging.getLogger(__name__)


class RegisteredMemory(NamedTuple):
    """Memory of a device in which snapshots stay, registered and open for reading."""

    memory: SharedDeviceMemory
    address: int
    number: int
    """Of the GPU, `HOST` for other devices."""


@dataclass
class _Reply:
    """A request that is being answered: packed and digested in threads, located, answered, and fetched."""

    request: ReadBoxes | MeasureDeltas
    grant: Grant
    snapshot: Memory
    """All of the snapshot, as it is registered."""
    device: RegisteredMemory | None
    """The same in memory of a device, if it stays there."""
    buffer: Memory = field(default_factory=lambda: _NO_MEMORY)
    packed: Future[list[Memory]] | None = None
    answer: Future[SourceAnswer] | None = None
    located: bool = False
    answered: bool = False
    fetched: bool = False
    ends_at: float = math.inf

    @property
    def groups(self) -> list[Sequence[Array]]:
        """The payload by segments; empty for a `MeasureDeltas`, whose answer has no payload."""
        return grouped(self.grant.payload, self.request.segments) if isinstance(self.request, ReadBoxes) else []

    def is_registered(self, group: Sequence[Array]) -> bool:
        """Return whether a segment can be read in place: a contiguous box of the snapshot, and not a delta."""
        begin = self.snapshot.ctypes.data
        return is_direct(group) and 0 <= group[0].ctypes.data - begin < max(1, self.snapshot.nbytes)

    def location(self, metadata: bytes) -> PayloadLocation:
        """Return where each packed segment is: one that lies in the snapshot is on the device, if that has it."""
        assert self.packed is not None
        segments, devices = [], []
        for segment in self.packed.result():
            address, device = (segment.ctypes.data if segment.nbytes else 0), HOST
            begin = address - self.snapshot.ctypes.data
            if self.device is not None and 0 <= begin < self.snapshot.nbytes:
                address, device = self.device.address + begin, self.device.number
            segments.append((address, segment.nbytes))
            devices.append(device)
        return PayloadLocation(
            number=self.request.number, metadata=metadata, segments=tuple(segments), devices=tuple(devices)
        )


class _Connection:
    """One reader."""

    def __init__(self, server: NixlServer, connection: socket.socket) -> None:
        self._server = server
        self.channel = NonBlockingChannel(connection, OPENING_BYTES, MAX_QUEUED_BYTES)
        self._session = ReaderSession(server.source)
        self._waiting: deque[_Reply] = deque()
        self._notice = WaitingNotice()
        self._replies: dict[int, _Reply] = {}
        self._generation = 0
        self._ends_at = time.monotonic() + IDLE_TIMEOUT_S

    @property
    def reader(self) -> str:
        """The replica that has proven a ticket; empty until one has."""
        return self._session.reader

    @property
    def fetching(self) -> bool:
        """Whether the reader may be fetching a payload now."""
        return any(reply.located and not reply.fetched for reply in self._replies.values())

    def advance(self) -> bool:
        """Make all progress that is possible without waiting. Return whether the connection is still alive."""
        try:
            self.channel.flush()
            for kind, body in self.channel.receive():
                self._handle(kind, body)
            while self._waiting and self._begin(self._waiting[0]):
                self._waiting.popleft()
            if self._waiting and self._notice.is_due(self._waiting[0].request.number):
                self._answer(still_waiting(self._waiting[0].request.number))
            for number in [number for number, reply in self._replies.items() if self._finish(reply)]:
                del self._replies[number]
            if time.monotonic() > min(self._ends_at, *(reply.ends_at for reply in self._replies.values()), math.inf):
                raise TimeoutError("the reader has not proven its ticket, or not fetched its payload")
        except (WeightsError, MemoryError, OSError) as error:
            log.debug("a reader left: %s", error)
            return False
        return True

    def close(self) -> None:
        """Close the connection, and give the lease back once no thread reads the snapshot."""
        self.channel.close()
        for reply in self._replies.values():
            for future in (reply.packed, reply.answer):
                if future is not None and not future.cancel():
                    future.exception()
            self._server.release_buffer(reply.buffer)
        self._replies = {}
        self._session.close()

    def _handle(self, kind: int, body: bytes) -> None:
        """Handle a message; the connection ends after a malformed one."""
        if kind == FETCHED and len(body) == NUMBER.size:
            (number,) = NUMBER.unpack(body)
            reply = self._replies.get(number)
            if reply is None or not reply.located:
                raise WeightsError(f"A reader confirmed request {number}, which has no payload to fetch.")
            reply.fetched = True
        elif kind == REQUEST:
            self._grant(decode_request(body))
        else:
            raise WeightsError(f"A reader sent {len(body)} bytes of kind {kind}.")

    def _grant(self, request: Request) -> None:
        try:
            grant = self._session.grant(request)
        except WeightsError as error:
            self._answer(refusal(request.number, str(error)))
            if isinstance(error, LastRefusalError):
                raise
            if not self._session.opened and self._ends_at == math.inf:  # requests of a stranger gain it no time
                self._ends_at = time.monotonic() + IDLE_TIMEOUT_S
            return
        self._ends_at, self.channel.longest = math.inf, REQUEST_BYTES
        if not isinstance(request, ReadBoxes | MeasureDeltas):
            self._answer(grant.answer(request.number))
            return
        numbers = [reply.request.number for reply in self._waiting] + list(self._replies)
        if len(numbers) >= MAX_WAITING or request.number in numbers:
            raise WeightsError(f"A reader has too many requests, or two with number {request.number}.")
        reply = _Reply(request, grant, self._session.memory, self._server.registered(self._session.device))
        reply.located = reply.fetched = isinstance(request, MeasureDeltas)
        self._waiting.append(reply)

    def _begin(self, reply: _Reply) -> bool:
        """Start packing if boxes and a buffer are available; return whether the request no longer waits."""
        try:
            if not reply.grant.ready():
                return False
        except WeightsError as error:
            self._answer(refusal(reply.request.number, str(error)))
            return True
        groups, is_registered = reply.groups, reply.is_registered
        buffer = self._server.acquire_buffer(packing_bytes(groups, is_registered))
        if buffer is None:
            return False
        reply.buffer = buffer
        self._replies[reply.request.number] = reply
        if buffer.nbytes:
            reply.packed = self._server.submit(lambda: reply.grant.pack(groups, buffer, is_registered))
        else:
            reply.packed = Future()
            reply.packed.set_result(pack(groups, buffer, is_registered))
        return True

    def _finish(self, reply: _Reply) -> bool:
        """Send what is ready; return whether the reply is complete."""
        assert reply.packed is not None
        number = reply.request.number
        if not reply.located and reply.packed.done():
            metadata = b""
            if self._generation != self._server.agent.generation:
                self._generation, metadata = self._server.agent.generation, self._server.agent.metadata()
            self.channel.send(LOCATION, with_checksum(msgspec.msgpack.encode(reply.location(metadata))))
            reply.located, reply.ends_at = True, time.monotonic() + FETCH_TIMEOUT_S
        if reply.answer is None and reply.packed.done():
            reply.answer = self._server.submit(partial(reply.grant.answer, number))
        if reply.located and not reply.answered and reply.answer is not None and reply.answer.done():
            self._answer(reply.answer.result())
            reply.answered = True
        if not reply.answered or not reply.fetched:
            return False
        self._server.release_buffer(reply.buffer)
        return True

    def _answer(self, answer: SourceAnswer) -> None:
        self.channel.send(ANSWER, encode_message(answer))


class NixlServer:
    """Listens on a free port of `host` and serves a source until closed."""

    def __init__(self, source: SnapshotSource, *, host: str) -> None:
        self.source = source
        self.agent = NixlAgent(host=host)
        self.agent.register(source.arena.slots)
        self.failure = ""
        """Why serving ended by itself; empty while it runs."""
        try:
            self._listener = Listener(host)
        except WeightsError:
            self.agent.close()
            raise
        self.address = self._listener.address
        """Address that readers connect to."""
        self._on_device: dict[int, RegisteredMemory | None] = {}
        """By identity of the memory."""
        self._opened = ExitStack()
        """Keeps it open."""
        self._stop = threading.Event()
        self._wakeup = Wakeup()
        self._connections = ReaderConnections(partial(_Connection, self))
        self._packing = BufferPool(0)
        self._packing_region: Any = None
        self._num_packed = 0
        threads = min(NUM_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightsync-pack")
        self._pool.submit(source.arena.collapse, self._stop.is_set)  # the first pulls run before it is done
        self._thread = threading.Thread(target=self._run, name="weightsync-serve", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Close every connection, end the threads and free the port.

        Raises:
            WeightsError: the thread did not end within `deadline_s`.
        """
        self._stop.set()
        self.wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")
        self._wakeup.close()

    def wake(self) -> None:
        """See `TransportServer.wake`."""
        self._wakeup.set()

    def registered(self, memory: SharedDeviceMemory | None) -> RegisteredMemory | None:
        """Return memory of a device as readers can fetch from it, until the server is closed: a reader that was dropped
        may still be fetching. None where NIXL cannot use it, which is said once.
        """
        if memory is None:
            return None
        if id(memory) not in self._on_device:
            self._on_device[id(memory)] = self._register(memory)
        return self._on_device[id(memory)]

    def _register(self, memory: SharedDeviceMemory) -> RegisteredMemory | None:
        flat = self._opened.enter_context(memory.reading())
        number = device_of(flat)
        try:
            self.agent.register([flat], number)
        except WeightsError as error:
            log.warning(
                "weights are fetched from memory of the host: NIXL cannot register that of the device: %s", error
            )
            return None
        return RegisteredMemory(memory, location_of(flat)[0], number)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the pool; its completion wakes the serving thread."""
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self.wake())
        return future

    def acquire_buffer(self, size_bytes: int) -> Memory | None:
        """Return packing memory, or None when none is free now."""
        if not size_bytes:
            return _NO_MEMORY
        if size_bytes > self._packing.size_bytes and not self._num_packed:
            region, self._packing_region = self._packing_region, None
            self.agent.deregister(region)
            self._packing = BufferPool(0)  # free the old buffer before the new one is allocated, which may fail
            packing = BufferPool(max(FIRST_PACKING_BYTES, size_bytes, min(PACKING_BYTES, 8 * size_bytes)))
            self._packing_region = self.agent.register([packing.memory])
            self._packing = packing
        buffer = self._packing.acquire(size_bytes)
        self._num_packed += buffer is not None
        return buffer

    def release_buffer(self, buffer: Memory) -> None:
        """Give packing memory back."""
        if buffer.nbytes:
            self._packing.release(buffer)
            self._num_packed -= 1

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._connections.accept(self._listener)
                self._connections.advance()
                self._wait()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._listener.close()
            self._connections.close()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.agent.close()
            self._opened.close()

    def _wait(self) -> None:
        """Wait for readers and threads, and drive NIXL: it serves fetches, and notices lost peers."""
        poller = select.poll()
        poller.register(self._listener, self._listener.events)
        poller.register(self._wakeup, select.POLLIN)
        for connection in self._connections:
            poller.register(connection.channel, connection.channel.events)
        fetching = any(connection.fetching for connection in self._connections)
        poller.poll((POLL_S if fetching else LONGEST_WAIT_S) * 1000)
        self._wakeup.clear()
        self.agent.progress()
