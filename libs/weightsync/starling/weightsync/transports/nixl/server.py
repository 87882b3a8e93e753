"""The source's end of the NIXL transport: one thread that answers readers, and lets NIXL work for them."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.memory.arrays import Array, Memory, allocate, grouped, is_direct, pack, packing_bytes
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.transports.deadline import LONGEST_WAIT_S
from starling.weightsync.transports.messages import (
    REQUEST_BYTES,
    MeasureDeltas,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_request,
    encode_message,
    refusal,
    with_checksum,
)
from starling.weightsync.transports.nixl.agent import NixlAgent
from starling.weightsync.transports.nixl.client import ANSWER, NUMBER, PLACE, REQUEST, TAKEN, PayloadLocation
from starling.weightsync.transports.sockets.channel import ACCEPT_BACKOFF_S, IDLE_TIMEOUT_S, MAX_CONNECTIONS
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel
from starling.weightsync.transports.source import Grant, ReaderSession, SnapshotSource
from starling.weightsync.transports.ucx.worker import is_loopback

NUM_THREADS: Final = 4
"""Most threads of a server that pack and digest."""
PACKING_BYTES: Final = 256 << 20
"""Most memory of a server for packed payloads; a single request may need more, and then is alone."""
FIRST_PACKING_BYTES: Final = 16 << 20
"""Packing memory is not made before it is needed, and then not smaller."""
MAX_WAITING: Final = 64
"""Most requests of one reader that wait or are being answered."""
TAKE_S: Final = 60.0
"""By then a reader has taken what it was granted, or is left: others need the packing memory."""
POLL_S: Final = 0.001
"""While somebody reads, NIXL is let work this often."""
_NO_MEMORY: Final = allocate(0)

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class _Reply:
    """A `ReadBoxes` that is being answered: packed and digested in threads, told where it lies, answered, and taken."""

    request: ReadBoxes | MeasureDeltas
    granted: Grant
    snapshot: Memory
    """All of it, as it is registered."""
    room: Memory = field(default_factory=lambda: _NO_MEMORY)
    prepared: Future[list[Memory]] | None = None
    told: Future[SourceAnswer] | None = None
    placed: bool = False
    answered: bool = False
    taken: bool = False
    ends: float = math.inf

    @property
    def groups(self) -> list[Sequence[Array]]:
        """The payload by segments; none for sizes of deltas, which are all in the answer."""
        return grouped(self.granted.payload, self.request.segments) if isinstance(self.request, ReadBoxes) else []

    def is_registered(self, group: Sequence[Array]) -> bool:
        """Whether a segment can be read where it lies: one box in one piece, and no delta, which lies anywhere."""
        begin = self.snapshot.ctypes.data
        return is_direct(group) and 0 <= group[0].ctypes.data - begin < max(1, self.snapshot.nbytes)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the address and the bytes of each prepared segment."""
        assert self.prepared is not None
        for segment in self.prepared.result():
            yield (segment.ctypes.data if segment.nbytes else 0), segment.nbytes


class _Connection:
    """One reader at the source."""

    def __init__(self, server: NixlServer, connection: socket.socket) -> None:
        self._server = server
        self.line = NonBlockingChannel(connection, REQUEST_BYTES)
        self._session = ReaderSession(server.source)
        self._waiting: deque[_Reply] = deque()
        self._replies: dict[int, _Reply] = {}
        self._generation = 0
        self._ends = time.monotonic() + IDLE_TIMEOUT_S

    @property
    def reading(self) -> bool:
        """Whether the reader may be reading now."""
        return any(reply.placed and not reply.taken for reply in self._replies.values())

    def advance(self) -> bool:
        """Go as far as possible without waiting. Return whether the connection lives on."""
        try:
            self.line.flush()
            for kind, body in self.line.receive():
                self._take(kind, body)
            while self._waiting and self._begin(self._waiting[0]):
                self._waiting.popleft()
            for number in [number for number, reply in self._replies.items() if self._finish(reply)]:
                del self._replies[number]
            if time.monotonic() > min(self._ends, *(reply.ends for reply in self._replies.values()), math.inf):
                raise TimeoutError("the reader has not presented its token, or not taken what it was granted")
        except (WeightsError, MemoryError, OSError) as error:
            log.debug("a reader left: %s", error)
            return False
        return True

    def close(self) -> None:
        """Hang up, and give the lease back once no thread is at work on the snapshot."""
        self.line.close()
        for reply in self._replies.values():
            for future in (reply.prepared, reply.told):
                if future is not None and not future.cancel():
                    future.exception()
            self._server.give(reply.room)
        self._replies = {}
        self._session.close()

    def _take(self, kind: int, body: bytes) -> None:
        """Act on a message; who talks nonsense is left."""
        if kind == TAKEN and len(body) == NUMBER.size:
            (number,) = NUMBER.unpack(body)
            reply = self._replies.get(number)
            if reply is None or not reply.placed:
                raise WeightsError(f"A reader has taken what it was not given, number {number}.")
            reply.taken = True
        elif kind == REQUEST:
            self._grant(decode_request(body))
        else:
            raise WeightsError(f"A reader sent {len(body)} bytes of kind {kind}.")

    def _grant(self, request: Request) -> None:
        try:
            granted = self._session.grant(request)
        except WeightsError as error:
            self._answer(refusal(request.number, str(error)))
            if not self._session.opened:
                self._ends = time.monotonic() + IDLE_TIMEOUT_S
            return
        self._ends = math.inf
        if not isinstance(request, ReadBoxes | MeasureDeltas):
            self._answer(granted.answer(request.number))
            return
        asked = [reply.request.number for reply in self._waiting] + list(self._replies)
        if len(asked) >= MAX_WAITING or request.number in asked:
            raise WeightsError(f"A reader asks for too much, or twice under number {request.number}.")
        reply = _Reply(request, granted, self._session.memory)
        reply.placed = reply.taken = isinstance(request, MeasureDeltas)
        self._waiting.append(reply)

    def _begin(self, reply: _Reply) -> bool:
        """Set threads to work on a request if boxes and room are there; return whether it is dealt with."""
        try:
            if not reply.granted.ready():
                return False
        except WeightsError as error:
            self._answer(refusal(reply.request.number, str(error)))
            return True
        groups, is_registered = reply.groups, reply.is_registered
        room = self._server.take(packing_bytes(groups, is_registered))
        if room is None:
            return False
        reply.room = room
        self._replies[reply.request.number] = reply
        if room.nbytes:
            reply.prepared = self._server.work(lambda: reply.granted.pack(groups, room, is_registered))
        else:
            reply.prepared = Future()
            reply.prepared.set_result(pack(groups, room, is_registered))
        return True

    def _finish(self, reply: _Reply) -> bool:
        """Tell what is ready; return whether the reply is done with."""
        assert reply.prepared is not None
        number = reply.request.number
        if not reply.placed and reply.prepared.done():
            metadata = b""
            if self._generation != self._server.agent.generation:
                self._generation, metadata = self._server.agent.generation, self._server.agent.metadata()
            place = PayloadLocation(number=number, metadata=metadata, segments=tuple(reply.places()))
            self.line.send(PLACE, with_checksum(msgspec.msgpack.encode(place)))
            reply.placed, reply.ends = True, time.monotonic() + TAKE_S
        if reply.told is None and reply.prepared.done():
            reply.told = self._server.work(partial(reply.granted.answer, number))
        if reply.placed and not reply.answered and reply.told is not None and reply.told.done():
            self._answer(reply.told.result())
            reply.answered = True
        if not reply.answered or not reply.taken:
            return False
        self._server.give(reply.room)
        return True

    def _answer(self, answer: SourceAnswer) -> None:
        self.line.send(ANSWER, encode_message(answer))


class NixlServer:
    """Listens on a free port of `host` and serves a source until closed."""

    def __init__(self, source: SnapshotSource, *, host: str) -> None:
        self.source = source
        self.agent = NixlAgent(loopback=is_loopback(host))
        self.agent.register(source.arena.slots)
        self.failure = ""
        """Why serving has ended, if it did by itself."""
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            self.agent.close()
            raise WeightsError(f"Nobody can be served at {host}: {error.strerror or error}.") from error
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Where readers connect."""
        self._stop = threading.Event()
        self._wakeup = Wakeup()
        self._connections: list[_Connection] = []
        self._accept_at = float("-inf")
        """When there may be room for another reader."""
        self._packing = BufferPool(0)
        self._packing_region: Any = None
        self._num_packed = 0
        threads = min(NUM_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightsync-pack")
        self._pool.submit(source.arena.collapse, self._stop.is_set)  # the first pulls do without
        self._thread = threading.Thread(target=self._run, name="weightsync-serve", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Hang up on every reader, end the threads and free the port.

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
        """Let the serving thread look whether what it was asked for has arrived."""
        self._wakeup.set()

    def work(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in a thread; its end wakes the serving thread."""
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self.wake())
        return future

    def take(self, size_bytes: int) -> Memory | None:
        """Return packing memory, or None when there is no room for it now."""
        if not size_bytes:
            return _NO_MEMORY
        if size_bytes > self._packing.size_bytes and not self._num_packed:
            region, self._packing_region = self._packing_region, None
            self.agent.deregister(region)
            self._packing = BufferPool(0)  # the old memory goes before the new comes, if it comes
            packing = BufferPool(max(FIRST_PACKING_BYTES, size_bytes, min(PACKING_BYTES, 8 * size_bytes)))
            self._packing_region = self.agent.register([packing.memory])
            self._packing = packing
        room = self._packing.take(size_bytes)
        self._num_packed += room is not None
        return room

    def give(self, room: Memory) -> None:
        """Take packing memory back."""
        if room.nbytes:
            self._packing.give(room)
            self._num_packed -= 1

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._accept()
                self._advance()
                self._wait()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._listener.close()
            for connection in self._connections:
                connection.close()
            self._connections = []
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.agent.close()

    def _accept(self) -> None:
        while time.monotonic() >= self._accept_at:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the reader was gone before it was accepted
            except OSError as error:  # those who are here are served on
                log.warning("a reader cannot be served now: %s", error)
                self._accept_at = time.monotonic() + ACCEPT_BACKOFF_S
                return
            self._connections.append(_Connection(self, connection))

    def _advance(self) -> None:
        living = []
        for number, connection in enumerate(self._connections):
            if number < MAX_CONNECTIONS and connection.advance():
                living.append(connection)
            else:
                connection.close()
        self._connections = living

    def _wait(self) -> None:
        """Wait for readers and threads, and let NIXL work: for those who read, and to see who is gone."""
        poller = select.poll()
        if time.monotonic() >= self._accept_at:
            poller.register(self._listener, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        for connection in self._connections:
            poller.register(connection.line, connection.line.events)
        reading = any(connection.reading for connection in self._connections)
        poller.poll((POLL_S if reading else LONGEST_WAIT_S) * 1000)
        self._wakeup.clear()
        self.agent.progress()
