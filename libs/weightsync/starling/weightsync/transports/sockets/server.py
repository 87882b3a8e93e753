"""Both ends of a conversation over plain sockets, for every transport that has one; carriers bring the payload.

Requests and answers go through a channel of their own for each connection. At the source every connection has a
thread; at the destination it has two, so that requests are sent ahead of the answers. Only after an `OpenSnapshot`
nothing is
sent until it is answered: a carrier may then need the channel for itself.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory, allocate, grouped, packing_bytes
from starling.weightsync.plan.offer import RankOffer
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, EventQueue, ReadTarget
from starling.weightsync.transports.deadline import LONGEST_WAIT_S
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    OpenSnapshot,
    ReadBoxes,
    Request,
    decode_answer,
    decode_request,
    refusal,
)
from starling.weightsync.transports.sockets.channel import (
    ACCEPT_BACKOFF_S,
    IDLE_TIMEOUT_S,
    MAX_CONNECTIONS,
    Channel,
    ChannelStopped,
    connect,
    framed,
    split_address,
)
from starling.weightsync.transports.source import Grant, ReaderSession, SnapshotSource

RELAY_WAIT_S: Final = 0.002
"""A relay looks this often whether what it was asked for has arrived."""

log = logging.getLogger(__name__)


class PayloadCarrier(Protocol):
    """How payloads travel between the two ends of one channel. Used by one thread, but for `close`."""

    def opened(self) -> None:
        """Get ready: the reader has presented its token. Called at both ends, right after the answer."""

    def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
        """Send the answer to a `ReadBoxes`, then its payload."""

    def receive(self, buffers: Sequence[Memory]) -> None:
        """Receive the payload of an answer that has come, one buffer for each segment."""

    def close(self) -> None:
        """End what is under way: on return nothing is read or written any more. Any thread may do it, and twice."""


MakeCarrier = Callable[[Channel], PayloadCarrier]


class SocketServer:
    """Listens on a free port of `host` and serves a source until closed."""

    def __init__(self, source: SnapshotSource, make_carrier: MakeCarrier, *, host: str) -> None:
        self._source, self._make_carrier = source, make_carrier
        self._stop = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._carriers: set[PayloadCarrier] = set()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise WeightsError(f"Nobody can be served at {host}: {error.strerror or error}.") from error
        self._listener.settimeout(LONGEST_WAIT_S)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Where readers connect."""
        self.failure = ""
        """Why serving has ended, if it did by itself."""
        self._thread = threading.Thread(target=self._run, name="weightsync-serve", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Hang up on every reader, end the threads and free the port.

        Raises:
            WeightsError: a thread did not end within `deadline_s`.
        """
        self._stop.set()
        end = time.monotonic() + deadline_s
        self._thread.join(deadline_s)  # first, so that there will be no more of the others
        for carrier in tuple(self._carriers):
            carrier.close()
        for thread in (self._thread, *self._threads):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")

    def wake(self) -> None:
        """Nothing to do: a connection that waits for a box looks for itself."""

    def _run(self) -> None:
        with self._listener:
            while not self._stop.is_set():
                try:
                    connection, _ = self._listener.accept()
                except (TimeoutError, ConnectionError):
                    continue  # nobody called, or was gone before being accepted
                except OSError as error:
                    self._refuse(error)
                    continue
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if len(self._threads) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="weightsync-serve", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    connection.close()
                    self._refuse(error)
                    continue
                self._threads.add(thread)

    def _refuse(self, error: Exception) -> None:
        """Have no room for another reader; those who are here are served on."""
        log.warning("a reader cannot be served now: %s", error)
        self._stop.wait(ACCEPT_BACKOFF_S)

    def _serve(self, connection: socket.socket) -> None:
        session = ReaderSession(self._source)
        with connection:
            try:
                channel = Channel(connection, self._stop)
                carrier = self._make_carrier(channel)
            except OSError:
                return  # the reader was gone before it was heard
            self._carriers.add(carrier)
            try:
                self._converse(session, channel, carrier)
            except (ChannelStopped, OSError, WeightsError) as error:
                log.debug("a reader left: %s", error)
            finally:
                carrier.close()
                self._carriers.discard(carrier)
                session.close()

    def _converse(self, session: ReaderSession, channel: Channel, carrier: PayloadCarrier) -> None:
        """Answer until the reader leaves. Raises Stopped, OSError, WeightsError."""
        patience: float | None = time.monotonic() + IDLE_TIMEOUT_S
        room = allocate(0)
        while True:
            request = decode_request(channel.receive_message(REQUEST_BYTES, patience))  # who talks nonsense is left
            try:
                granted = self._grant(session, request)
            except WeightsError as error:
                channel.send([framed(refusal(request.number, str(error)))])
                if not session.opened:
                    patience = time.monotonic() + IDLE_TIMEOUT_S
                continue
            patience = None
            if isinstance(request, ReadBoxes):
                groups = grouped(granted.payload, request.segments)
                needed = packing_bytes(groups)
                if room.nbytes < needed:
                    room = allocate(0)  # the old room goes before the new one comes
                    room = allocate(needed)
                segments = granted.pack(groups, room)
                carrier.send(framed(granted.answer(request.number)), segments)
                continue
            channel.send([framed(granted.answer(request.number))])
            if isinstance(request, OpenSnapshot):
                carrier.opened()

    def _grant(self, session: ReaderSession, request: Request) -> Grant:
        """Wait until everything is there that was asked for. Raises Stopped, and WeightsError when it is refused."""
        granted = session.grant(request)
        while not granted.ready():
            if self._stop.wait(RELAY_WAIT_S):
                raise ChannelStopped
        return granted


class _Connection:
    """One channel at the destination, with the threads that send and receive on it."""

    def __init__(self, name: str, address: tuple[str, int], make_carrier: MakeCarrier, events: EventQueue) -> None:
        self._name, self._address, self._make_carrier, self._events = name, address, make_carrier, events
        self._stop = threading.Event()
        self._connected = threading.Event()
        self._settled = threading.Event()
        """Set when no `OpenSnapshot` waits for its answer."""
        self._expected: queue.SimpleQueue[tuple[Request, ReadTarget]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._ends: tuple[Channel, PayloadCarrier] | None = None
        self._lock = threading.Lock()
        self._first = threading.Lock()  # taken by the thread that reports the loss
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name="weightsync-pull", daemon=True)
            for run in (self._receive, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request, landing: ReadTarget) -> None:
        self._expected.put((request, landing))
        self._outgoing.put(request)

    def drop(self) -> None:
        self._stop.set()
        self._outgoing.put(None)
        with self._lock:
            if self._ends is not None:
                channel, carrier = self._ends
                channel.hang_up()
                carrier.close()
        for thread in self._threads:
            thread.join()  # every wait in them is short
        if self._ends is not None:
            self._ends[0].close()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ChannelStopped:
            pass
        except (OSError, WeightsError) as error:
            self._connected.set()
            if not self._stop.is_set() and self._first.acquire(blocking=False):
                self._events.put(ConnectionLost(self._name, f"{error.__class__.__name__}: {error}"), self._stop)

    def _send(self) -> None:
        channel = connect(self._address, self._stop)
        with self._lock:
            self._ends = channel, self._make_carrier(channel)
        self._connected.set()
        while not self._stop.is_set():
            request = self._outgoing.get()
            if request is None:
                continue
            if isinstance(request, OpenSnapshot):
                self._settled.clear()
            channel.send([framed(request)])
            while isinstance(request, OpenSnapshot) and not self._settled.wait(LONGEST_WAIT_S):
                if self._stop.is_set():
                    return

    def _receive(self) -> None:
        while not self._connected.wait(LONGEST_WAIT_S):
            if self._stop.is_set():
                return
        if self._ends is None:
            return
        channel, carrier = self._ends
        while not self._stop.is_set():
            try:
                request, landing = self._expected.get(timeout=LONGEST_WAIT_S)
            except queue.Empty:
                continue
            answer = decode_answer(channel.receive_message(ANSWER_BYTES))
            if answer.number != request.number:
                raise WeightsError("the source answered another question")
            if isinstance(request, ReadBoxes) and not answer.reason:
                carrier.receive(landing.buffers)
            if isinstance(request, OpenSnapshot):
                if not answer.reason:
                    carrier.opened()
                self._settled.set()
            self._events.put(AnswerReceived(self._name, answer), self._stop)


class SocketClient:
    """A `Wire` whose sources are told apart by their sockets."""

    scatters = False

    def __init__(self, lane: str, make_carrier: MakeCarrier) -> None:
        self._lane, self._make_carrier = lane, make_carrier
        self._connections: dict[str, _Connection] = {}
        self._events = EventQueue()

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `Wire.connect`."""
        address = split_address(offer.address)
        self._connections[source] = _Connection(source, address, self._make_carrier, self._events)

    def ask(self, source: str, request: Request, landing: ReadTarget) -> None:
        """See `Wire.ask`."""
        self._connections[source].ask(request, landing)

    def poll(self, wait_s: float) -> list[Event]:
        """See `Wire.poll`."""
        return self._events.poll(wait_s)

    def wake(self) -> None:
        """See `Wire.wake`."""
        self._events.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `Wire.lanes`."""
        return (self._lane,)

    def drop(self, source: str) -> None:
        """See `Wire.drop`."""
        connection = self._connections.pop(source, None)
        if connection is not None:
            connection.drop()

    def close(self) -> None:
        """See `Wire.close`."""
        for source in list(self._connections):
            self.drop(source)
