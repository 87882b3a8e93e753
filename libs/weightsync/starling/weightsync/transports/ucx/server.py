"""UCX server: one thread serves all readers; a pool of threads packs and digests for it."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import MAX_PACKING_BYTES
from starling.weightsync.memory.arrays import Memory, grouped, pack, packing_bytes
from starling.weightsync.memory.device_memory import SharedDeviceMemory
from starling.weightsync.memory.jobs import are_small, done_at_once
from starling.weightsync.memory.pools import GrowingBufferPool
from starling.weightsync.plan.moves import MAX_TRANSFERS
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
from starling.weightsync.transports.ucx.protocol import ANSWER, EMPTY_SEGMENT, REQUEST, WORKER, WORKER_BYTES
from starling.weightsync.transports.ucx.worker import UcxRequest, UcxWorker

NUM_THREADS: Final = 4
"""Maximum number of threads of a server that pack and digest."""

log = logging.getLogger(__name__)


@dataclass
class _Reply:
    """A request that is being answered: its boxes are packed and digested in a thread, then its segments are sent."""

    request: ReadBoxes | MeasureDeltas
    grant: Grant
    snapshot: Memory
    """All of the snapshot on the host."""
    device: SharedDeviceMemory | None
    """The same in memory of a device, if it is sent from there."""
    buffer: Memory | None = None
    """For what must be packed."""
    packing: GrowingBufferPool | None = None
    """The pool that the buffer is of."""
    packed: Future[list[Memory]] | None = None
    answer: Future[SourceAnswer] | None = None
    sends: deque[UcxRequest] = field(default_factory=deque)
    sending: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    """Keeps memory of a device open while it is sent from."""
    answered: bool = False

    @property
    def segments(self) -> tuple[int, ...]:
        """How many boxes each segment has."""
        return self.request.segments if isinstance(self.request, ReadBoxes) else ()

    @property
    def first_tag(self) -> int:
        """Tag of the first segment."""
        return self.request.tag if isinstance(self.request, ReadBoxes) else 0


class _Connection:
    """One reader."""

    def __init__(self, server: UcxServer, connection: socket.socket) -> None:
        self._server, self._worker = server, server.worker
        self.channel = NonBlockingChannel(connection, max(OPENING_BYTES, WORKER_BYTES), MAX_QUEUED_BYTES)
        self._session = ReaderSession(server.source)
        self._reader = b""
        """Address of the reader's worker."""
        self._endpoint: Any = None
        """None until the reader has proven a ticket."""
        self._waiting: deque[_Reply] = deque()
        self._notice = WaitingNotice()
        self._replies: list[_Reply] = []
        self._refusals: deque[UcxRequest] = deque()
        self._packing = GrowingBufferPool(0)
        """Of the replica that has proven a ticket last; kept, with its memory, while the connection is open."""
        self._ends_at = time.monotonic() + IDLE_TIMEOUT_S
        self._worker.watch(self.channel)

    @property
    def reader(self) -> str:
        """The replica that has proven a ticket; empty until one has."""
        return self._session.reader

    def advance(self) -> bool:
        """Make all progress that is possible without waiting. Return whether the connection is still alive."""
        if time.monotonic() > self._ends_at:
            return False
        try:
            self.channel.flush()
            for kind, body in self.channel.receive():
                self._handle(kind, body)
            if self._endpoint is not None:
                self._worker.check_alive(self._endpoint)
            while self._waiting and self._begin(self._waiting[0]):
                self._waiting.popleft()
            if self._waiting and self._notice.is_due(self._waiting[0].request.number):
                self._answer(still_waiting(self._waiting[0].request.number))
            self._replies = [reply for reply in self._replies if not self._finish(reply)]
            while self._refusals and self._refusals[0].completed:
                self._refusals.popleft().check()
        except (WeightsError, MemoryError, OSError, self._worker.error) as error:
            log.debug("a reader left: %s", error)
            return False
        return True

    def close(self) -> None:
        """Close the connection, and give the lease back once no thread reads the snapshot."""
        self._worker.unwatch(self.channel)
        self.channel.close()
        if self._endpoint is not None:
            self._worker.hang_up(self._endpoint)
            self._end_sends()
        for reply in self._replies:
            for future in (reply.packed, reply.answer):
                if future is not None and not future.cancel():
                    future.exception()
            self._release(reply)
        self._replies, self._endpoint = [], None
        self._session.close()

    def _handle(self, kind: int, body: bytes) -> None:
        """Handle a message; the connection ends after a malformed one."""
        if kind == WORKER and not self._reader:
            self._reader = body
        elif kind == REQUEST:
            self._grant(decode_request(body))
        else:
            raise WeightsError(f"A reader sent {len(body)} bytes of kind {kind}.")

    def _grant(self, request: Request) -> None:
        try:
            grant = self._session.grant(request)
        except WeightsError as error:
            self._refuse(request, str(error))
            if isinstance(error, LastRefusalError):
                raise
            if not self._session.opened and self._ends_at == math.inf:  # requests of a stranger gain it no time
                self._ends_at = time.monotonic() + IDLE_TIMEOUT_S
            return
        self._ends_at, self.channel.longest = math.inf, REQUEST_BYTES
        if self._endpoint is None:
            if not self._reader:
                raise WeightsError("A reader proved a ticket before the address of its worker.")
            self._endpoint = self._worker.connect(self._reader)
            self.channel.send(WORKER, self._worker.address)
        if isinstance(request, ReadBoxes | MeasureDeltas):
            if len(self._waiting) + len(self._replies) >= MAX_WAITING:
                raise WeightsError(f"A reader has more than {MAX_WAITING} requests that are not answered.")
            device = self._server.sendable(self._session.device)
            self._waiting.append(_Reply(request, grant, self._session.memory, device))
        else:
            self._answer(grant.answer(request.number))

    def _refuse(self, request: Request, reason: str) -> None:
        if isinstance(request, ReadBoxes) and self._endpoint is not None:
            if len(self._refusals) >= MAX_TRANSFERS:
                raise WeightsError(f"A reader does not receive the {len(self._refusals)} segments that it was refused.")
            for index in range(len(request.segments)):
                self._refusals.append(self._worker.send(self._endpoint, EMPTY_SEGMENT, request.tag + index))
        self._answer(refusal(request.number, reason))

    def _begin(self, reply: _Reply) -> bool:
        """Start packing if boxes and a buffer are available; return whether the request no longer waits."""
        try:
            if not reply.grant.ready():
                return False
        except WeightsError as error:
            self._refuse(reply.request, str(error))
            return True
        groups = grouped(reply.grant.payload, reply.segments)
        self._packing = reply.packing = self._server.packing_of(self.reader)
        buffer = reply.buffer = self._packing.acquire(packing_bytes(groups))
        if buffer is None:
            return False
        self._replies.append(reply)
        if buffer.nbytes:
            pack_all = partial(reply.grant.pack, groups, buffer)
            reply.packed = self._server.run(pack_all, at_once=are_small(reply.grant.payload))
        else:
            reply.packed = Future()
            reply.packed.set_result(pack(groups, EMPTY_SEGMENT))
        return True

    def _finish(self, reply: _Reply) -> bool:
        """Send what is ready; return whether the reply is complete."""
        assert reply.packed is not None
        if not reply.sending and reply.packed.done():
            reply.sending = True
            for index, segment in enumerate(self._segments(reply)):
                reply.sends.append(self._worker.send(self._endpoint, segment, reply.first_tag + index))
            # Sizes of deltas have to be computed.
            at_once = isinstance(reply.request, ReadBoxes) and are_small(reply.grant.boxes)
            reply.answer = self._server.run(partial(reply.grant.answer, reply.request.number), at_once=at_once)
        while reply.sends and reply.sends[0].completed:
            reply.sends.popleft().check()
        if not reply.answered and reply.answer is not None and reply.answer.done():
            reply.answered = True
            self._answer(reply.answer.result())
        if not reply.sending or reply.sends or not reply.answered:
            return False
        self._release(reply)
        return True

    def _segments(self, reply: _Reply) -> list[Any]:
        """Return the packed segments to be sent, those that lie in the snapshot from the device if it is there."""
        assert reply.packed is not None
        segments = [segment if segment.nbytes else EMPTY_SEGMENT for segment in reply.packed.result()]
        if reply.device is None:
            return segments
        flat = reply.opened.enter_context(reply.device.reading())
        self._worker.register(reply.device, flat, reply.device.handle.kind)
        begins = [segment.ctypes.data - reply.snapshot.ctypes.data for segment in segments]
        return [
            flat[begin : begin + segment.nbytes] if 0 <= begin < reply.snapshot.nbytes else segment
            for begin, segment in zip(begins, segments, strict=True)
        ]

    def _end_sends(self) -> None:
        """Wait until UCX no longer sends from memory of a device: its pages may be closed, or freed, then."""
        end = time.monotonic() + IDLE_TIMEOUT_S
        sends = [send for reply in self._replies if reply.device is not None for send in reply.sends]
        while not all(send.completed for send in sends):
            if time.monotonic() > end:
                raise WeightsError("UCX does not release memory of a device that it was given.")
            self._worker.progress(0.001)

    def _release(self, reply: _Reply) -> None:
        reply.opened.close()
        if reply.packing is not None and reply.buffer is not None:
            reply.packing.release(reply.buffer)

    def _answer(self, answer: SourceAnswer) -> None:
        self.channel.send(ANSWER, encode_message(answer))


class UcxServer:
    """Listens on a free port of `host` and serves a source until closed."""

    def __init__(self, source: SnapshotSource, *, host: str) -> None:
        self.source = source
        self.worker = UcxWorker(host=host)
        self.failure = ""
        """Why serving ended by itself; empty while it runs."""
        self._told = False
        """Whether the log says that this UCX does not support the memory of a device."""
        self._stop = threading.Event()
        self._connections = ReaderConnections(partial(_Connection, self))
        self._packing: weakref.WeakValueDictionary[str, GrowingBufferPool] = weakref.WeakValueDictionary()
        """By replica; freed with its last connection."""
        try:
            self._listener = Listener(host)
        except WeightsError:
            self.worker.close()
            raise
        self.worker.watch(self._listener)
        self.address = self._listener.address
        """Address that readers connect to."""
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
        self.worker.wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")

    def run(self, job: Any, *, at_once: bool) -> Future[Any]:
        """Run a job, now or in the pool; its completion there wakes the serving thread."""
        if at_once:
            return done_at_once(job)
        future: Future[Any] = self._pool.submit(job)
        future.add_done_callback(lambda _: self.worker.wake())
        return future

    def packing_of(self, reader: str) -> GrowingBufferPool:
        """Return the packing memory of a replica: one that receives nothing keeps none from others."""
        return self._packing.setdefault(reader, GrowingBufferPool(MAX_PACKING_BYTES))

    def sendable(self, memory: SharedDeviceMemory | None) -> SharedDeviceMemory | None:
        """Return memory of a device if this UCX can send from it, else None, and say so once."""
        if memory is None or memory.handle.kind in self.worker.kinds:
            return memory
        if not self._told:
            self._told = True
            log.warning(
                "weights are sent from memory of the host: this UCX has no support for %r memory", memory.handle.kind
            )
        return None

    def wake(self) -> None:
        """See `TransportServer.wake`."""
        self.worker.wake()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._connections.accept(self._listener)
                self._connections.advance()
                self.worker.progress(LONGEST_WAIT_S)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self.worker.unwatch(self._listener)
            self._listener.close()
            self._connections.close(after_each=lambda: self.worker.progress(0))  # lets UCX free the connection
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.worker.close()
