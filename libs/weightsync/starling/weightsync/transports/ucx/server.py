"""UCX server: one thread serves all readers; a pool of threads packs and digests for it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory, grouped, pack, packing_bytes
from starling.weightsync.memory.pools import GrowingBufferPool
from starling.weightsync.plan.estimate import MAX_PACKING_BYTES
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, LONGEST_WAIT_S, MAX_CONNECTIONS
from starling.weightsync.transports.messages import (
    LENGTH,
    REQUEST_BYTES,
    MeasureDeltas,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_request,
    refusal,
    without_length,
)
from starling.weightsync.transports.source import Grant, ReaderSession, SnapshotSource
from starling.weightsync.transports.ucx.protocol import (
    ANSWER_TAGS,
    EMPTY_SEGMENT,
    NAME_BYTES,
    WELCOME,
    WELCOME_TAG,
    encoded,
)
from starling.weightsync.transports.ucx.worker import UcxRequest, UcxWorker

NUM_THREADS: Final = 4
"""Maximum number of threads of a server that pack and digest."""

log = logging.getLogger(__name__)


@dataclass
class _Reply:
    """A request that is being answered: its boxes are packed and digested in a thread, then its segments are sent."""

    request: ReadBoxes | MeasureDeltas
    grant: Grant
    buffer: Memory | None = None
    """Of the server's pool, for what must be packed."""
    packed: Future[list[Memory]] | None = None
    answer: Future[SourceAnswer] | None = None
    sends: deque[UcxRequest] = field(default_factory=deque)
    sending: bool = False
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

    def __init__(self, server: UcxServer, endpoint: Any) -> None:
        self._server, self._worker, self.endpoint = server, server.worker, endpoint
        self._session = ReaderSession(server.source)
        self._tag = secrets.randbits(60) | 1 << 60
        self._request: Memory = np.empty(REQUEST_BYTES + LENGTH.size, np.uint8)
        self._incoming = self._worker.receive(endpoint, self._request, self._tag)
        self._waiting: deque[_Reply] = deque()
        self._replies: list[_Reply] = []
        welcome = np.frombuffer(WELCOME.pack(server.name, self._tag), np.uint8)
        self._answers = deque([self._worker.send(endpoint, welcome, WELCOME_TAG)])
        self._ends_at = time.monotonic() + IDLE_TIMEOUT_S

    def advance(self) -> bool:
        """Make all progress that is possible without waiting. Return whether the connection is still alive."""
        if time.monotonic() > self._ends_at:
            return False
        try:
            self._worker.check_alive(self.endpoint)
            while self._incoming.completed:
                self._incoming.check()
                self._handle(without_length(self._request.data))
                self._incoming = self._worker.receive(self.endpoint, self._request, self._tag)
            while self._waiting and self._begin(self._waiting[0]):
                self._waiting.popleft()
            self._replies = [reply for reply in self._replies if not self._finish(reply)]
            while self._answers and self._answers[0].completed:
                self._answers.popleft().check()
        except (WeightsError, MemoryError, OSError, self._worker.error) as error:
            log.debug("a reader left: %s", error)
            return False
        return True

    def close(self) -> None:
        """Close the endpoint, and give the lease back once no thread reads the snapshot."""
        self._worker.hang_up(self.endpoint)
        for reply in self._replies:
            for future in (reply.packed, reply.answer):
                if future is not None and not future.cancel():
                    future.exception()
            if reply.buffer is not None:
                self._server.buffers.release(reply.buffer)
        self._replies, self.endpoint = [], None
        self._session.close()

    def _handle(self, data: memoryview) -> None:
        request = decode_request(data)  # malformed: the connection ends
        try:
            grant = self._session.grant(request)
        except WeightsError as error:
            self._refuse(request, str(error))
            if not self._session.opened:
                self._ends_at = time.monotonic() + IDLE_TIMEOUT_S
            return
        self._ends_at = math.inf
        if isinstance(request, ReadBoxes | MeasureDeltas):
            self._waiting.append(_Reply(request, grant))
        else:
            self._answer(grant.answer(request.number))

    def _refuse(self, request: Request, reason: str) -> None:
        if isinstance(request, ReadBoxes):
            for index in range(len(request.segments)):
                self._answers.append(self._worker.send(self.endpoint, EMPTY_SEGMENT, request.tag + index))
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
        buffer = reply.buffer = self._server.buffers.acquire(packing_bytes(groups))
        if buffer is None:
            return False
        self._replies.append(reply)
        if buffer.nbytes:
            reply.packed = self._server.submit(lambda: reply.grant.pack(groups, buffer))
        else:
            reply.packed = Future()
            reply.packed.set_result(pack(groups, EMPTY_SEGMENT))
        return True

    def _finish(self, reply: _Reply) -> bool:
        """Send what is ready; return whether the reply is complete."""
        assert reply.packed is not None
        if not reply.sending and reply.packed.done():
            reply.sending = True
            reply.answer = self._server.submit(partial(reply.grant.answer, reply.request.number))
            for index, segment in enumerate(reply.packed.result()):
                sent = segment if segment.nbytes else EMPTY_SEGMENT
                reply.sends.append(self._worker.send(self.endpoint, sent, reply.first_tag + index))
        while reply.sends and reply.sends[0].completed:
            reply.sends.popleft().check()
        if not reply.answered and reply.answer is not None and reply.answer.done():
            reply.answered = True
            self._answer(reply.answer.result())
        if not reply.sending or reply.sends or not reply.answered:
            return False
        if reply.buffer is not None:
            self._server.buffers.release(reply.buffer)
        return True

    def _answer(self, answer: SourceAnswer) -> None:
        self._answers.append(self._worker.send(self.endpoint, encoded(answer), ANSWER_TAGS | answer.number))


class UcxServer:
    """Listens on a free port and serves a source until closed.

    UCXX's listener binds every interface, whatever `host` is. UCX rejects a reader that arrives on another device than
    those of `host`, before this class learns of it; the token is what protects a snapshot.
    """

    def __init__(self, source: SnapshotSource, *, host: str) -> None:
        self.source = source
        self.worker = UcxWorker(host=host)
        self.name = secrets.token_bytes(NAME_BYTES)
        """By which readers recognise this source; not a secret."""
        self.failure = ""
        """Why serving ended by itself; empty while it runs."""
        self._stop = threading.Event()
        self._connections: list[_Connection] = []
        self.buffers = GrowingBufferPool(MAX_PACKING_BYTES)
        self._listener: Any = self.worker.lib.UCXListener.create(
            worker=self.worker.worker, port=0, cb_func=self._accept
        )
        self.address = f"{host}:{self._listener.port}/{self.name.hex()}"
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

    def submit(self, job: Any) -> Future[Any]:
        """Run a job in the pool; its completion wakes the serving thread."""
        future: Future[Any] = self._pool.submit(job)
        future.add_done_callback(lambda _: self.worker.wake())
        return future

    def wake(self) -> None:
        """See `TransportServer.wake`."""
        self.worker.wake()

    def _accept(self, request: int) -> None:
        if self._listener is None:
            return  # closing: nothing would close the connection
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except self.worker.error:
            return  # the reader has closed the connection already
        self._connections.append(_Connection(self, endpoint))
        self.worker.wake()  # this is called within `progress`, which may wait afterwards

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._advance()
                self.worker.progress(LONGEST_WAIT_S)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            while self._connections:
                self._connections.pop().close()
                self.worker.progress(0)  # lets UCX free the connection; it may accept further readers meanwhile
            # A connection that is not freed yet keeps UCX listening, and a callback into a freed listener aborts the
            # process. So the listener goes last.
            listener, self._listener = self._listener, None
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.worker.close()
            del listener

    def _advance(self) -> None:
        living = []
        for number, connection in enumerate(self._connections):
            if number < MAX_CONNECTIONS and connection.advance():
                living.append(connection)
            else:
                connection.close()
        self._connections = living
