"""UCX: between processes and machines, over whatever UCX finds. One thread drives it at each end.

Everything goes by tag, and tags are matched in the whole worker of who receives. So a source gives every connection a
tag of its own for requests, which nobody else can guess, and tells it first of all, with its public name: a reader has
one worker for all its sources, and knows by the name who has spoken. The reader draws the tags of what it is sent.
Payloads arrive straight where they belong, one message for each segment. A refused `ReadBoxes` still gets its
messages, of
one byte each, so that no receive is left behind.

Active messages and streams would need no tags, but a receive of theirs that still waits when its endpoint is closed
keeps the worker alive for ever, or never ends.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory, grouped, pack, packing_bytes
from starling.weightsync.memory.pools import GrowingBufferPool
from starling.weightsync.plan.estimate import MAX_PACKING_BYTES
from starling.weightsync.plan.offer import RankOffer
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, ReadTarget
from starling.weightsync.transports.deadline import LONGEST_WAIT_S
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    LENGTH,
    REQUEST_BYTES,
    MeasureDeltas,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    decode_request,
    refusal,
    with_length,
    without_length,
)
from starling.weightsync.transports.sockets.channel import IDLE_TIMEOUT_S, MAX_CONNECTIONS, split_address
from starling.weightsync.transports.source import Grant, ReaderSession, SnapshotSource
from starling.weightsync.transports.ucx.worker import UcxRequest, UcxWorker, is_loopback

NUM_THREADS: Final = 4
"""Most threads of a server that pack and digest."""
NAME_BYTES: Final = 8
WELCOME_TAG: Final = 1 << 62
ANSWER_TAGS: Final = 1 << 61
"""The tag of an answer is this and the request's number; tags of payloads are smaller."""
_WELCOME: Final = struct.Struct(f"<{NAME_BYTES}sQ")
_NOTHING: Final = np.zeros(1, np.uint8)

log = logging.getLogger(__name__)


def _message(message: Request | SourceAnswer) -> Memory:
    return np.frombuffer(with_length(message), np.uint8)


@dataclass
class _Reply:
    """A request that is being answered: its boxes packed and digested in a thread, its segments on their way."""

    request: ReadBoxes | MeasureDeltas
    granted: Grant
    room: Memory | None = None
    prepared: Future[list[Memory]] | None = None
    answered: Future[SourceAnswer] | None = None
    sends: deque[UcxRequest] = field(default_factory=deque)
    sending: bool = False
    told: bool = False
    """Whether the answer was sent."""

    @property
    def segments(self) -> tuple[int, ...]:
        """How many boxes each segment has."""
        return self.request.segments if isinstance(self.request, ReadBoxes) else ()

    @property
    def first_tag(self) -> int:
        """The first segment's."""
        return self.request.tag if isinstance(self.request, ReadBoxes) else 0


class _Connection:
    """One reader at the source."""

    def __init__(self, server: UcxServer, endpoint: Any) -> None:
        self._server, self._link, self.endpoint = server, server.link, endpoint
        self._session = ReaderSession(server.source)
        self._tag = secrets.randbits(60) | 1 << 60
        self._request: Memory = np.empty(REQUEST_BYTES + LENGTH.size, np.uint8)
        self._incoming = self._link.receive(endpoint, self._request, self._tag)
        self._waiting: deque[_Reply] = deque()
        self._replies: list[_Reply] = []
        welcome = np.frombuffer(_WELCOME.pack(server.name, self._tag), np.uint8)
        self._answers = deque([self._link.send(endpoint, welcome, WELCOME_TAG)])
        self._ends = time.monotonic() + IDLE_TIMEOUT_S

    def advance(self) -> bool:
        """Go as far as possible without waiting. Return whether the connection lives on."""
        if time.monotonic() > self._ends:
            return False
        try:
            self._link.check_alive(self.endpoint)
            while self._incoming.completed:
                self._incoming.check()
                self._take(without_length(self._request.data))
                self._incoming = self._link.receive(self.endpoint, self._request, self._tag)
            while self._waiting and self._begin(self._waiting[0]):
                self._waiting.popleft()
            self._replies = [reply for reply in self._replies if not self._finish(reply)]
            while self._answers and self._answers[0].completed:
                self._answers.popleft().check()
        except (WeightsError, MemoryError, OSError, self._link.error) as error:
            log.debug("a reader left: %s", error)
            return False
        return True

    def close(self) -> None:
        """Hang up, and give the lease back once no thread is at work on the snapshot."""
        self._link.hang_up(self.endpoint)
        for reply in self._replies:
            for future in (reply.prepared, reply.answered):
                if future is not None and not future.cancel():
                    future.exception()
            if reply.room is not None:
                self._server.rooms.give(reply.room)
        self._replies, self.endpoint = [], None
        self._session.close()

    def _take(self, data: memoryview) -> None:
        request = decode_request(data)  # who talks nonsense is left
        try:
            granted = self._session.grant(request)
        except WeightsError as error:
            self._refuse(request, str(error))
            if not self._session.opened:
                self._ends = time.monotonic() + IDLE_TIMEOUT_S
            return
        self._ends = math.inf
        if isinstance(request, ReadBoxes | MeasureDeltas):
            self._waiting.append(_Reply(request, granted))
        else:
            self._answer(granted.answer(request.number))

    def _refuse(self, request: Request, reason: str) -> None:
        if isinstance(request, ReadBoxes):
            for index in range(len(request.segments)):
                self._answers.append(self._link.send(self.endpoint, _NOTHING, request.tag + index))
        self._answer(refusal(request.number, reason))

    def _begin(self, reply: _Reply) -> bool:
        """Set threads to work on a request if boxes and room are there; return whether it is dealt with."""
        try:
            if not reply.granted.ready():
                return False
        except WeightsError as error:
            self._refuse(reply.request, str(error))
            return True
        groups = grouped(reply.granted.payload, reply.segments)
        room = reply.room = self._server.rooms.take(packing_bytes(groups))
        if room is None:
            return False
        self._replies.append(reply)
        if room.nbytes:
            reply.prepared = self._server.work(lambda: reply.granted.pack(groups, room))
        else:
            reply.prepared = Future()
            reply.prepared.set_result(pack(groups, _NOTHING))
        return True

    def _finish(self, reply: _Reply) -> bool:
        """Send what is ready; return whether the reply is done with."""
        assert reply.prepared is not None
        if not reply.sending and reply.prepared.done():
            reply.sending = True
            reply.answered = self._server.work(partial(reply.granted.answer, reply.request.number))
            for index, segment in enumerate(reply.prepared.result()):
                sent = segment if segment.nbytes else _NOTHING
                reply.sends.append(self._link.send(self.endpoint, sent, reply.first_tag + index))
        while reply.sends and reply.sends[0].completed:
            reply.sends.popleft().check()
        if not reply.told and reply.answered is not None and reply.answered.done():
            reply.told = True
            self._answer(reply.answered.result())
        if not reply.sending or reply.sends or not reply.told:
            return False
        if reply.room is not None:
            self._server.rooms.give(reply.room)
        return True

    def _answer(self, answer: SourceAnswer) -> None:
        self._answers.append(self._link.send(self.endpoint, _message(answer), ANSWER_TAGS | answer.number))


class UcxServer:
    """Listens on a free port and serves a source until closed.

    The listener binds every interface whatever the host that is advertised: the token is what protects a snapshot.
    """

    def __init__(self, source: SnapshotSource, *, host: str) -> None:
        self.source = source
        self.link = UcxWorker(loopback=is_loopback(host))
        self.name = secrets.token_bytes(NAME_BYTES)
        """By which readers know who has spoken; no secret."""
        self.failure = ""
        """Why serving has ended, if it did by itself."""
        self._stop = threading.Event()
        self._connections: list[_Connection] = []
        self.rooms = GrowingBufferPool(MAX_PACKING_BYTES)
        self._listener: Any = self.link.lib.UCXListener.create(worker=self.link.worker, port=0, cb_func=self._accept)
        self.address = f"{host}:{self._listener.port}/{self.name.hex()}"
        """Where readers connect."""
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
        self.link.wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")

    def work(self, job: Any) -> Future[Any]:
        """Run a job in a thread; its end wakes the serving thread."""
        future: Future[Any] = self._pool.submit(job)
        future.add_done_callback(lambda _: self.link.wake())
        return future

    def wake(self) -> None:
        """Let the serving thread look whether what it was asked for has arrived."""
        self.link.wake()

    def _accept(self, request: int) -> None:
        if self._listener is None:
            return  # nobody would hang up again
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except self.link.error:
            return  # the reader was gone before it was accepted
        self._connections.append(_Connection(self, endpoint))
        self.link.wake()  # UCX called this in the midst of its work, and may wait now

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._advance()
                self.link.progress(LONGEST_WAIT_S)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            while self._connections:
                self._connections.pop().close()
                self.link.progress(0)  # UCX lets go of what was closed; and more readers may have been accepted
            # What is left of a connection keeps UCX listening, and a call of a listener that is gone ends the process.
            listener, self._listener = self._listener, None
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.link.close()
            del listener

    def _advance(self) -> None:
        living = []
        for number, connection in enumerate(self._connections):
            if number < MAX_CONNECTIONS and connection.advance():
                living.append(connection)
            else:
                connection.close()
        self._connections = living


@dataclass
class _Ticket:
    """A request of the destination under way."""

    request: Request
    answer: Memory
    arriving: deque[UcxRequest]
    """The segments, then the answer."""


@dataclass
class _Peer:
    """One source at the destination."""

    endpoint: Any
    name: bytes
    tag: int = 0
    """Of requests; 0 before the source has said it."""
    sends: deque[UcxRequest] = field(default_factory=deque)
    tickets: dict[int, _Ticket] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()


class UcxClient:
    """A `Wire` over UCX: one worker for all sources."""

    scatters = False

    def __init__(self, *, loopback: bool) -> None:
        self._link: UcxWorker | None = UcxWorker(loopback=loopback)
        self._peers: dict[str, _Peer] = {}
        self._welcome: Memory = np.empty(_WELCOME.size, np.uint8)
        self._welcoming: UcxRequest | None = None

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `Wire.connect`."""
        assert self._link is not None
        address, _, name = offer.address.partition("/")
        host, port = split_address(address)
        if len(name) != 2 * NAME_BYTES:
            raise WeightsError(f"{offer.address!r} is not an address of the form host:port/name.")
        try:
            endpoint = self._link.lib.UCXEndpoint.create(self._link.worker, host, port, True)
        except self._link.error as error:
            raise WeightsError(f"No connection to {address}: {error}.") from error
        self._peers[source] = _Peer(endpoint, bytes.fromhex(name))

    def ask(self, source: str, request: Request, landing: ReadTarget) -> None:
        """See `Wire.ask`."""
        assert self._link is not None
        peer = self._peers[source]
        answer: Memory = np.empty(ANSWER_BYTES + LENGTH.size, np.uint8)
        arriving: deque[UcxRequest] = deque()
        if isinstance(request, ReadBoxes):
            for index, buffer in enumerate(landing.buffers):
                filled = buffer if buffer.nbytes else np.empty(1, np.uint8)
                arriving.append(self._link.receive(peer.endpoint, filled, request.tag + index))
        arriving.append(self._link.receive(peer.endpoint, answer, ANSWER_TAGS | request.number))
        peer.tickets[request.number] = _Ticket(request, answer, arriving)
        if peer.tag:
            peer.sends.append(self._link.send(peer.endpoint, _message(request), peer.tag))

    def poll(self, wait_s: float) -> list[Event]:
        """See `Wire.poll`."""
        assert self._link is not None
        woken = self._link.progress(0)
        events = self._events()
        if not events and not woken and wait_s > 0:
            self._link.progress(wait_s)
            events = self._events()
        return events

    def wake(self) -> None:
        """See `Wire.wake`."""
        if self._link is not None:
            self._link.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `Wire.lanes`."""
        peer = self._peers.get(source)
        if peer is None or self._link is None:
            return ()
        if not peer.lanes:
            peer.lanes = self._link.lanes(peer.endpoint)
            log.info("UCX reads from %s over %s", source, ", ".join(peer.lanes) or "unknown lanes")
        return peer.lanes

    def drop(self, source: str) -> None:
        """See `Wire.drop`."""
        peer = self._peers.pop(source, None)
        if peer is None or self._link is None:
            return
        self._link.hang_up(peer.endpoint)
        under_way = [*peer.sends, *(item for ticket in peer.tickets.values() for item in ticket.arriving)]
        end = time.monotonic() + IDLE_TIMEOUT_S
        while not all(item.completed for item in under_way):
            self._link.progress(0.001)
            if time.monotonic() > end:
                raise WeightsError("UCX does not let go of memory that it was given; end this process.")

    def close(self) -> None:
        """See `Wire.close`."""
        for source in list(self._peers):
            self.drop(source)
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _events(self) -> list[Event]:
        self._be_welcomed()
        events: list[Event] = []
        for source, peer in self._peers.items():
            try:
                events += [AnswerReceived(source, answer) for answer in self._advance(peer)]
            except WeightsError as error:
                events.append(ConnectionLost(source, str(error)))
        return events

    def _be_welcomed(self) -> None:
        """Learn the tags of sources that were connected to, and ask them what waits for that."""
        assert self._link is not None
        while True:
            if self._welcoming is None:
                if not any(not peer.tag for peer in self._peers.values()):
                    return
                self._welcoming = self._link.receive_any(self._welcome, WELCOME_TAG)
            if not self._welcoming.completed:
                return
            self._welcoming = None
            name, tag = _WELCOME.unpack(self._welcome.data)
            for peer in self._peers.values():
                if peer.name == name:
                    peer.tag = tag
                    for ticket in peer.tickets.values():
                        peer.sends.append(self._link.send(peer.endpoint, _message(ticket.request), tag))

    def _advance(self, peer: _Peer) -> Sequence[SourceAnswer]:
        """Return the answers that are complete. Raises WeightsError when the connection broke."""
        assert self._link is not None
        done: list[SourceAnswer] = []
        try:
            self._link.check_alive(peer.endpoint)
            while peer.sends and peer.sends[0].completed:
                peer.sends.popleft().check()
            for number, ticket in list(peer.tickets.items()):
                while ticket.arriving and ticket.arriving[0].completed:
                    ticket.arriving.popleft().check()
                if not ticket.arriving:
                    del peer.tickets[number]
                    done.append(decode_answer(without_length(ticket.answer.data)))
        except self._link.error as error:
            raise WeightsError(f"{type(error).__name__}: {error}") from error
        return done
