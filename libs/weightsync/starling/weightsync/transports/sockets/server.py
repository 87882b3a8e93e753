"""Socket server: answers the requests of readers, one thread per connection; a carrier sends the payloads."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import MAX_PACKING_BYTES
from starling.weightsync.memory.arrays import grouped, packing_bytes
from starling.weightsync.memory.pools import SharedBufferPool
from starling.weightsync.transports.endpoints import (
    IDLE_TIMEOUT_S,
    LONGEST_WAIT_S,
    MAX_CONNECTIONS,
    most_connections,
    surplus,
)
from starling.weightsync.transports.messages import (
    OPENING_BYTES,
    REQUEST_BYTES,
    OpenSnapshot,
    ReadBoxes,
    Request,
    decode_request,
    refusal,
    still_waiting,
)
from starling.weightsync.transports.sockets.carrier import MakeCarrier, PayloadCarrier
from starling.weightsync.transports.sockets.channel import Channel, ChannelStopped, framed
from starling.weightsync.transports.sockets.listener import Listener
from starling.weightsync.transports.sockets.records import channel_keys
from starling.weightsync.transports.source import (
    Grant,
    LastRefusalError,
    ReaderSession,
    SnapshotSource,
    WaitingNotice,
)

RELAY_POLL_S: Final = 0.002
"""How often a reader, over all its connections, looks whether a relay has received the requested boxes: with many
connections it could otherwise take the time of the pull."""

log = logging.getLogger(__name__)


class _Connection(NamedTuple):
    """One reader, and the thread that serves it."""

    socket: socket.socket
    session: ReaderSession
    thread: threading.Thread

    def hang_up(self) -> None:
        """End the waits of the thread on the socket, which it then closes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class SocketServer:
    """Listens on a free port of `host` and serves a source until closed; `encrypted`: all that follows an opening."""

    def __init__(
        self, source: SnapshotSource, make_carrier: MakeCarrier, *, host: str, encrypted: bool = False
    ) -> None:
        self._source, self._make_carrier, self._encrypted = source, make_carrier, encrypted
        self._stop = threading.Event()
        self._connections: list[_Connection] = []
        """From the oldest."""
        self._ending: list[_Connection] = []
        """Those that were ended for others, until their threads have ended."""
        self._carriers: set[PayloadCarrier] = set()
        self._num_waiting: Counter[str] = Counter()
        """By replica: connections that wait for boxes which a relay has not received."""
        self._packing: weakref.WeakValueDictionary[str, SharedBufferPool] = weakref.WeakValueDictionary()
        """By replica; freed with its last connection."""
        self._lock = threading.Lock()
        self._listener = Listener(host)
        self.address = self._listener.address
        """Address that readers connect to."""
        self.failure = ""
        """Why serving ended by itself; empty while it runs."""
        self._thread = threading.Thread(target=self._run, name="weightsync-serve", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Close every connection, end the threads and free the port.

        Raises:
            WeightsError: a thread did not end within `deadline_s`.
        """
        self._stop.set()
        end = time.monotonic() + deadline_s
        self._thread.join(deadline_s)  # first, so that it starts no more connection threads
        for carrier in tuple(self._carriers):
            carrier.close()
        for thread in (self._thread, *(one.thread for one in (*self._connections, *self._ending))):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")

    def wake(self) -> None:
        """Do nothing: a connection that waits for a box polls by itself."""

    def _run(self) -> None:
        with contextlib.closing(self._listener):
            while not self._stop.is_set():
                connection = self._listener.accept(LONGEST_WAIT_S)
                if connection is None:
                    continue
                if not self._has_room():
                    connection.close()
                    continue
                session = ReaderSession(self._source)
                thread = threading.Thread(
                    target=self._serve, args=(connection, session), name="weightsync-serve", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    connection.close()
                    self._listener.pause(error)
                    continue
                self._connections.append(_Connection(connection, session, thread))

    def _has_room(self) -> bool:
        """Return whether a connection can be accepted; if the server is full, another one may have to end for it."""
        self._connections = [one for one in self._connections if one.thread.is_alive()]
        self._ending = [one for one in self._ending if one.thread.is_alive()]
        if len(self._connections) < most_connections(MAX_CONNECTIONS):
            return True
        index = surplus([one.session.reader for one in self._connections])
        if index is None or len(self._ending) >= MAX_CONNECTIONS:
            return False
        ended = self._connections.pop(index)
        ended.hang_up()
        self._ending.append(ended)
        return True

    def _serve(self, connection: socket.socket, session: ReaderSession) -> None:
        with connection:
            try:
                channel = Channel(connection, self._stop)
                carrier = self._make_carrier(channel)
            except OSError:
                return  # the reader has closed the connection already
            self._carriers.add(carrier)
            try:
                self._answer_requests(session, channel, carrier)
            except (ChannelStopped, OSError, WeightsError) as error:
                log.debug("a reader left: %s", error)
            finally:
                carrier.close()
                self._carriers.discard(carrier)
                session.close()

    def _answer_requests(self, session: ReaderSession, channel: Channel, carrier: PayloadCarrier) -> None:
        """Answer until the reader leaves. Raises ChannelStopped, OSError, WeightsError."""
        end: float | None = time.monotonic() + IDLE_TIMEOUT_S
        packing = SharedBufferPool(0)
        while True:
            longest = REQUEST_BYTES if end is None else OPENING_BYTES
            request = decode_request(channel.receive_message(longest, end))  # malformed: the connection ends
            try:
                grant = self._grant(session, request, channel)
            except WeightsError as error:
                channel.send([framed(refusal(request.number, str(error)))])
                if isinstance(error, LastRefusalError):
                    raise
                if not session.opened and end is None:  # requests of a stranger gain it no time
                    end = time.monotonic() + IDLE_TIMEOUT_S
                continue
            end = None
            if isinstance(request, ReadBoxes):
                groups = grouped(grant.payload, request.segments)
                packing = self._packing_of(session.reader)  # kept between two requests, with its memory
                with packing.block(packing_bytes(groups), lambda: channel.ended) as buffer:
                    if buffer is None:
                        raise ChannelStopped
                    segments = grant.pack(groups, buffer)
                    answer = grant.answer(request.number)
                    if answer.reason:
                        channel.send([framed(answer)])
                    else:
                        carrier.send(framed(answer), segments)
                    del segments
                continue
            channel.send([framed(grant.answer(request.number))])
            if isinstance(request, OpenSnapshot):
                if self._encrypted:
                    keys = channel_keys(session.proof)
                    channel.encrypt(sending=keys.from_source, receiving=keys.from_reader)
                carrier.opened()

    def _packing_of(self, reader: str) -> SharedBufferPool:
        """Return the packing memory of a replica: one that opens many connections and reads slowly has no more."""
        with self._lock:
            return self._packing.setdefault(reader, SharedBufferPool(MAX_PACKING_BYTES))

    def _grant(self, session: ReaderSession, request: Request, channel: Channel) -> Grant:
        """Wait until all that is requested is there, and tell the reader so.

        Raises ChannelStopped, OSError, and WeightsError for a refusal.
        """
        grant, notice = session.grant(request), WaitingNotice()
        if grant.ready():
            return grant
        with self._waiting(session.reader):
            while not grant.ready():
                if notice.is_due(request.number):
                    channel.send([framed(still_waiting(request.number))])
                if self._stop.wait(RELAY_POLL_S * self._num_waiting[session.reader]) or channel.ended:
                    raise ChannelStopped
        return grant

    @contextlib.contextmanager
    def _waiting(self, reader: str) -> Iterator[None]:
        """Count a connection of a reader as one that waits."""
        with self._lock:
            self._num_waiting[reader] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting[reader] -= 1
                if not self._num_waiting[reader]:
                    del self._num_waiting[reader]
