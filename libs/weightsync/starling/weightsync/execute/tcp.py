"""Plain sockets: the transport that works everywhere, and the measure for the others.

Messages go after their length. The payload of a `Read` follows its answer: its segments, one after the other. At the
source every connection has a thread; so has it at the destination, where requests are sent ahead of the answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import LONGEST_WAIT_S
from starling.weightsync.execute.memory import allocate, grouped, pack, packing_bytes
from starling.weightsync.execute.requests import (
    ANSWER_BYTES,
    LENGTH,
    REQUEST_BYTES,
    Answer,
    Read,
    Request,
    decode_answer,
    decode_request,
    refusal,
    with_length,
)
from starling.weightsync.execute.source import Session, Source
from starling.weightsync.execute.wire import Answered, Event, Events, Landing, Lost
from starling.weightsync.offer import RankOffer

SILENCE_S: Final = 10.0
"""How long a connection may last that has presented no token, and how long a peer may take none of what is sent."""
RELAY_WAIT_S: Final = 0.002
"""A relay looks this often whether what it was asked for has arrived."""
MAX_CONNECTIONS: Final = 1024
_BUFFER_BYTES: Final = 4 << 20

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The thread that waits is to end."""


def split_address(address: str) -> tuple[str, int]:
    """Read ``host:port``.

    Raises:
        WeightsError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise WeightsError(f"{address!r} is not an address of the form host:port.")
    return host, int(port)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    connection.settimeout(LONGEST_WAIT_S)


def _receive(connection: socket.socket, memory: memoryview, stop: threading.Event, end: float | None = None) -> None:
    """Fill `memory`. Raises _Stopped, ConnectionError at the end of the stream, TimeoutError after `end`."""
    while memory.nbytes:
        if stop.is_set():
            raise _Stopped
        try:
            num = connection.recv_into(memory)
        except TimeoutError:
            if end is not None and time.monotonic() > end:
                raise
            continue
        if not num:
            raise ConnectionError("the peer closed the connection")
        memory = memory[num:]


def _send(connection: socket.socket, blocks: Sequence[memoryview], stop: threading.Event) -> None:
    """Send blocks one after the other. Raises _Stopped, and TimeoutError when nothing is taken for `SILENCE_S`."""
    left = deque(block for block in blocks if block.nbytes)
    end = time.monotonic() + SILENCE_S
    while left:
        if stop.is_set():
            raise _Stopped
        try:
            num = connection.sendmsg([left[i] for i in range(min(len(left), 64))])
        except TimeoutError:
            if time.monotonic() > end:
                raise
            continue
        end = time.monotonic() + SILENCE_S
        while left and num >= left[0].nbytes:
            num -= left.popleft().nbytes
        if num:
            left[0] = left[0][num:]


def _framed(message: Request | Answer) -> memoryview:
    return memoryview(with_length(message))


def _receive_message(connection: socket.socket, longest: int, stop: threading.Event, end: float | None) -> bytearray:
    head = bytearray(LENGTH.size)
    _receive(connection, memoryview(head), stop, end)
    (length,) = LENGTH.unpack(head)
    if length > longest:
        raise WeightsError(f"A peer announced a message of {length} bytes; at most {longest} are taken.")
    body = bytearray(length)
    _receive(connection, memoryview(body), stop, end)
    return body


class TcpServer:
    """Listens on a free port of `host` and serves a source until closed."""

    def __init__(self, source: Source, *, host: str) -> None:
        self._source = source
        self._stop = threading.Event()
        self._threads: set[threading.Thread] = set()
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
        for thread in [self._thread, *self._threads]:
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
                except TimeoutError:
                    continue
                except OSError as error:
                    self.failure = f"OSError: {error}"
                    return
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if len(self._threads) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="weightsync-serve", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        session = Session(self._source)
        patience: float | None = time.monotonic() + SILENCE_S
        room = allocate(0)
        try:
            with connection:
                _prepare(connection)
                while True:
                    data = _receive_message(connection, REQUEST_BYTES, self._stop, patience)
                    request = decode_request(data)  # who talks nonsense is left
                    try:
                        granted = session.grant(request)
                        while not granted.ready():
                            if self._stop.wait(RELAY_WAIT_S):
                                raise _Stopped
                    except WeightsError as error:
                        _send(connection, [_framed(refusal(request.number, str(error)))], self._stop)
                        if not session.opened:
                            patience = time.monotonic() + SILENCE_S
                        continue
                    patience = None
                    answer = _framed(granted.answer(request.number))
                    if isinstance(request, Read):
                        groups = grouped(granted.payload, request.segments)
                        needed = packing_bytes(groups)
                        if room.nbytes < needed:
                            room = allocate(0)  # the old room goes before the new one comes
                            room = allocate(needed)
                        _send(connection, [answer, *(segment.data for segment in pack(groups, room))], self._stop)
                    else:
                        _send(connection, [answer], self._stop)
        except (_Stopped, OSError, WeightsError) as error:
            log.debug("a reader left: %s", error)
        finally:
            session.close()


def _connect(address: tuple[str, int], stop: threading.Event) -> socket.socket:
    """Connect without a long wait. Raises _Stopped, OSError."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.connect_ex(resolved)
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        while not poller.poll(LONGEST_WAIT_S * 1000):
            if stop.is_set():
                raise _Stopped
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        _prepare(connection)
    except BaseException:  # raised again, without leaving the socket behind
        connection.close()
        raise
    return connection


class _Connection:
    """One socket at the destination, with the thread that receives on it."""

    def __init__(self, name: str, address: tuple[str, int], events: Events) -> None:
        self._name, self._address, self._events = name, address, events
        self._stop = threading.Event()
        self._connected = threading.Event()
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._expected: queue.SimpleQueue[tuple[Request, Landing]] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._first = threading.Lock()  # taken by the thread that reports the loss
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name="weightsync-pull", daemon=True)
            for run in (self._receive, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request, landing: Landing) -> None:
        self._expected.put((request, landing))
        self._outgoing.put(request)

    def drop(self) -> None:
        self._stop.set()
        self._outgoing.put(None)
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()  # every wait in them is short
        if self._socket is not None:
            self._socket.close()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except _Stopped:
            pass
        except (OSError, WeightsError) as error:
            self._connected.set()
            if not self._stop.is_set() and self._first.acquire(blocking=False):
                self._events.put(Lost(self._name, f"{error.__class__.__name__}: {error}"), self._stop)

    def _send(self) -> None:
        connection = _connect(self._address, self._stop)
        with self._lock:
            self._socket = connection
        self._connected.set()
        while not self._stop.is_set():
            request = self._outgoing.get()
            if request is not None:
                _send(connection, [_framed(request)], self._stop)

    def _receive(self) -> None:
        while not self._connected.wait(LONGEST_WAIT_S):
            if self._stop.is_set():
                return
        connection = self._socket
        if connection is None:
            return
        while not self._stop.is_set():
            try:
                request, landing = self._expected.get(timeout=LONGEST_WAIT_S)
            except queue.Empty:
                continue
            answer = decode_answer(_receive_message(connection, ANSWER_BYTES, self._stop, None))
            if answer.number != request.number:
                raise WeightsError("the source answered another question")
            if isinstance(request, Read) and not answer.reason:
                for buffer in landing.buffers:
                    _receive(connection, buffer.data, self._stop)
            self._events.put(Answered(self._name, answer), self._stop)


class TcpWire:
    """A `Wire` over plain sockets."""

    scatters = False

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}
        self._events = Events()

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `Wire.connect`."""
        self._connections[source] = _Connection(source, split_address(offer.address), self._events)

    def ask(self, source: str, request: Request, landing: Landing) -> None:
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
        return ("tcp",)

    def drop(self, source: str) -> None:
        """See `Wire.drop`."""
        connection = self._connections.pop(source, None)
        if connection is not None:
            connection.drop()

    def close(self) -> None:
        """See `Wire.close`."""
        for source in list(self._connections):
            self.drop(source)
