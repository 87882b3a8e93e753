"""TCP proxy before an HTTP service, which injects faults: resets, stalls, cut replies, and statuses of a gateway.

It reads one request of each connection, and closes it after the reply, so that each request can have its own fault.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

PATIENCE_S = 60.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close by RST."""
Kind = Literal["pass", "reset", "reset_after", "cut", "stall", "drip", "answer"]


@dataclass(frozen=True)
class Fault:
    """What happens to a request."""

    kind: Kind = "pass"
    """`reset` ends the connection before the service hears of the request, `reset_after` instead of its reply, `cut`
    after half of it. `stall` never replies, `drip` sends a byte of one now and then. `answer` replies itself."""
    status: int = 503
    headers: tuple[str, ...] = ()
    body: bytes = b""
    delay_s: float = 0.0
    """Before a request is passed on."""


PASS = Fault()


@dataclass(frozen=True)
class Seen:
    """A request that the proxy has read."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Proxy:
    """A proxy; `rule` decides the fault of each request."""

    def __init__(self, port: int, rule: Callable[[Seen], Fault]) -> None:
        self._target, self.rule = port, rule
        self.seen: list[Seen] = []
        self._open, self._lock = Counter[str](), threading.Lock()
        self.most_open = Counter[str]()
        """How many requests were passed on at once, by path, or by method of those to `/v1`."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Of the API of rewards behind it."""
        return f"http://127.0.0.1:{self.port}/v1/rewards"

    def num_seen(self) -> Counter[str]:
        """Return how many requests were read, by method."""
        return Counter(one.method for one in list(self.seen))

    def close(self) -> None:
        """Refuse connections from now on, and end those that stall."""
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(PATIENCE_S)
            request = _read(connection)
            if request is None:
                return
            self.seen.append(request)
            self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: Seen) -> None:
        fault = self.rule(request)
        match fault.kind:
            case "reset":
                _reset(connection)
            case "stall":
                self._ended.wait(PATIENCE_S)
            case "drip":
                for byte in _reply(Fault("answer", 200, body=bytes(1000))):
                    connection.sendall(bytes([byte]))
                    self._ended.wait(0.1)
            case "answer":
                connection.sendall(_reply(fault))
            case _:
                # Counted until the reply is there, not until it is sent: with the last byte of it a client
                # may send its next request, which would be counted beside this one.
                with self._counted(request.method if request.path.startswith("/v1") else request.path):
                    self._ended.wait(fault.delay_s)
                    reply = self._passed(request)
                if fault.kind == "cut":
                    connection.sendall(reply[: len(reply) - 20])
                if fault.kind != "pass":
                    _reset(connection)
                else:
                    connection.sendall(reply)

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        with self._lock:
            self._open[what] += 1
            self.most_open[what] = max(self.most_open[what], self._open[what])
        try:
            yield
        finally:
            with self._lock:
                self._open[what] -= 1

    def _passed(self, request: Seen) -> bytes:
        """Pass a request to the service; return the reply."""
        kept = [f"{name}: {value}" for name, value in request.headers.items() if name != "connection"]
        head = "\r\n".join([f"{request.method} {request.path} HTTP/1.1", *kept, "connection: close", "", ""])
        with socket.create_connection(("127.0.0.1", self._target), timeout=PATIENCE_S) as service:
            service.sendall(head.encode("latin-1") + request.body)
            return b"".join(iter(lambda: service.recv(1 << 16), b""))


@contextmanager
def proxy(port: int, rule: Callable[[Seen], Fault] = lambda _: PASS) -> Iterator[Proxy]:
    """Run a proxy before the service at `port`."""
    made = Proxy(port, rule)
    try:
        yield made
    finally:
        made.close()


def in_turn(faults: Sequence[Fault], method: str = "POST") -> Callable[[Seen], Fault]:
    """Return a rule: the first requests of `method` have these faults, and all others none."""
    left, lock = list(faults), threading.Lock()

    def rule(request: Seen) -> Fault:
        with lock:
            return left.pop(0) if left and request.method == method else PASS

    return rule


def _read(connection: socket.socket) -> Seen | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        part = connection.recv(1 << 16)
        if not part:
            return None
        body += part
    return Seen(method, path, headers, body)


def _reply(fault: Fault) -> bytes:
    lines = [f"HTTP/1.1 {fault.status} Fault", f"content-length: {len(fault.body)}", "connection: close"]
    return "\r\n".join([*lines, *fault.headers, "", ""]).encode() + fault.body


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
