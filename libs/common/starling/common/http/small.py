"""HTTP server of one thread for a few small answers, with the standard library alone.

It answers GET and HEAD, one request a connection, and reads no body. Whatever clients do, it takes a bounded share of
the process: connections are few, short, and accepted at a limited rate, and of each few and small reads are made.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from starling.common.errors import ConfigError
from starling.common.wakeup import Wakeup

log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES: Final = 8 << 10
"""Limit on a request: its first line and its headers."""
MAX_READS: Final = 16
"""Limit on the reads of one connection: a request comes in one or two."""
CONNECTION_S: Final = 5.0
"""How long a connection may last, from its acceptance to its end."""
MAX_CONNECTIONS: Final = 64
"""Beyond them the oldest one is closed for a new one."""
ACCEPTS_PER_S: Final = 50.0
"""Rate at which connections are accepted; those of a burst are accepted at once."""
BURST: Final = 100
BACKLOG: Final = 128
"""Connections that wait to be accepted, in the kernel."""
SHORTAGE_S: Final = 1.0
"""Pause after a connection could not be accepted, because the process has no free descriptor."""
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class SmallRequest:
    """What an answer may depend on."""

    path: str
    """Without its query."""
    authorization: str


@dataclass(frozen=True)
class SmallResponse:
    """An answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    num_reads: int = 0
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    is_answered: bool = False


class SmallServer:
    """The server; `answer` is called in its thread, and must not wait.

    Args:
        host: to listen on.
        port: 0 for a free one.
        answer: returns the answer to a request.
        setting: which names the address, for errors.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, answer: Callable[[SmallRequest], SmallResponse], setting: str) -> None:
        self._answer = answer
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host}:{port} ({reason}); change {setting}") from None
        _open_sockets.add(self._listener)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wakeup, self._is_closing = Wakeup(), False
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest one first
        self._allowance, self._refilled_at = float(BURST), time.monotonic()
        self._accepts_from = self._refilled_at
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        self._is_closing = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(CONNECTION_S)
        self._wakeup.close()
        self._close_socket(self._listener)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Of a poll object nothing is left in a process that is forked meanwhile.
        with selectors.PollSelector() as self._selector:
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._accepts(True)
            while not self._is_closing:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                        self._serve(self._connections[key.fileobj])
                self._end_overdue()
                self._accepts(time.monotonic() >= self._accepts_from)
            for one in list(self._connections.values()):
                self._end(one)

    def _patience_s(self) -> float | None:
        """Return how long nothing need be done unless a socket is ready; None for any time."""
        deadlines = [one.deadline for one in self._connections.values()]
        if self._listener not in self._selector.get_map():
            deadlines.append(self._accepts_from)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accepts(self, accepts: bool) -> None:
        """Accept connections from now on, or leave them in the kernel."""
        if accepts == (self._listener in self._selector.get_map()):
            return
        if accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        now = time.monotonic()
        self._allowance = min(BURST, self._allowance + (now - self._refilled_at) * ACCEPTS_PER_S)
        self._refilled_at = now
        if self._allowance < 1.0:
            self._accepts_from = now + (1.0 - self._allowance) / ACCEPTS_PER_S
            return
        self._allowance -= 1.0
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # the client is gone again, or there are no descriptors left
            self._accepts_from = now if isinstance(error, BlockingIOError | ConnectionError) else now + SHORTAGE_S
            return
        _open_sockets.add(accepted)
        accepted.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._end(next(iter(self._connections.values())))
        self._connections[accepted] = _Connection(accepted, now + CONNECTION_S)
        self._selector.register(accepted, selectors.EVENT_READ)

    def _serve(self, one: _Connection) -> None:
        """Read from a connection, or write to it."""
        try:
            if one.unsent:
                self._write(one)
            elif not self._read(one):
                self._end(one)
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            self._end(one)

    def _read(self, one: _Connection) -> bool:
        """Read, and answer once the request is complete. Returns False when there is nothing more to do."""
        data = one.socket.recv(MAX_REQUEST_BYTES)
        one.num_reads += 1
        if one.is_answered:  # what the client sends now is not read further, and its end is waited for
            return bool(data) and one.num_reads < MAX_READS
        one.received += data
        end = one.received.find(b"\r\n\r\n")
        if end >= 0:
            self._reply(one, bytes(one.received[:end]))
        elif len(one.received) >= MAX_REQUEST_BYTES or one.num_reads >= MAX_READS:
            self._send(one, SmallResponse(431, b"the request is too long\n"), has_body=True)
        return bool(data)

    def _reply(self, one: _Connection, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target, _, protocol = rest.partition(" ")
        if not (protocol.startswith("HTTP/1.") and target.startswith("/")):
            response = SmallResponse(400, b"this is no request of HTTP/1\n")
        elif method not in ("GET", "HEAD"):
            response = SmallResponse(405, b"only GET and HEAD\n")
        else:
            fields = (line.partition(":") for line in lines[1:])
            given = next((value.strip() for name, _, value in fields if name.lower() == "authorization"), "")
            response = self._answered(SmallRequest(target.partition("?")[0], given))
        self._send(one, response, has_body=method != "HEAD")

    def _answered(self, request: SmallRequest) -> SmallResponse:
        try:
            return self._answer(request)
        except Exception:
            # An edge of the process: the thread that a bug ended would leave the endpoint, and its probes, without an
            # answer for the rest of the run.
            log.exception("request_failed", path=request.path)
            return SmallResponse(500, b"the answer failed; see the log\n")

    def _send(self, one: _Connection, response: SmallResponse, *, has_body: bool) -> None:
        fields = [
            f"HTTP/1.1 {response.status} {REASONS[response.status]}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        fields += ["WWW-Authenticate: Bearer"] if response.status == 401 else []
        fields += ["Allow: GET, HEAD"] if response.status == 405 else []
        head = "\r\n".join([*fields, "", ""]).encode("latin-1")
        one.unsent, one.is_answered = memoryview(head + (response.body if has_body else b"")), True
        self._selector.modify(one.socket, selectors.EVENT_WRITE)
        self._write(one)

    def _write(self, one: _Connection) -> None:
        one.unsent = one.unsent[one.socket.send(one.unsent) :]
        if not one.unsent:
            # Closed at once, with something unread, the connection would be reset before the client has read all.
            one.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(one.socket, selectors.EVENT_READ)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._connections and (first := next(iter(self._connections.values()))).deadline <= now:
            self._end(first)

    def _end(self, one: _Connection) -> None:
        del self._connections[one.socket]
        self._selector.unregister(one.socket)
        self._close_socket(one.socket)

    @staticmethod
    def _close_socket(one: socket.socket) -> None:
        _open_sockets.discard(one)
        one.close()


_open_sockets: set[socket.socket] = set()
"""Sockets of all servers of this process: a process that it forks, such as a rank, would keep them open."""


def _close_inherited() -> None:
    for one in _open_sockets:
        one.close()
    _open_sockets.clear()


os.register_at_fork(after_in_child=_close_inherited)
