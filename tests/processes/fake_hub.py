"""Fake hub for real replica processes: it welcomes them, sends the test's commands, and returns their answers."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from starling.common.wire import codec
from starling.common.wire import messages as wire

RUN = "run-1"
DEADLINE_S = 300.0
"""Deadline of each wait, far longer than any operation here takes on a busy machine."""

M = TypeVar("M")
Received = tuple[Any, tuple[bytes, ...]]


class FakeHub:
    """A ROUTER socket without CURVE, read only while a test waits for a message."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.welcome = wire.Welcome(heartbeat_s=0.05, lease_s=60.0)
        self.ignores_heartbeats = False
        """Receives heartbeats without answering them."""
        self._routes: dict[str, bytes] = {}
        self._causes: dict[str, str] = {}
        """Id of each sender's last message."""
        self._received: dict[str, deque[Received]] = defaultdict(deque)
        self._seq = self._num_leases = 0

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def hello(self, name: str) -> Received:
        """Wait for a `Hello`, and welcome its sender."""
        received = self.next(name, wire.Hello)
        self.send(name, self.welcome)
        return received

    def has_unread(self) -> bool:
        """Whether there is an unread message."""
        return bool(self._socket.poll(0))

    def send(self, name: str, message: wire.Down, buffers: tuple[bytes, ...] = ()) -> None:
        self._seq += 1
        envelope = wire.Envelope(
            protocol=wire.PROTOCOL_VERSION,
            run=RUN,
            sender="controller",
            incarnation=1,
            seq=self._seq,
            cause=self._causes[name],
        )
        self._socket.send_multipart([self._routes[name], *codec.pack(envelope, message, buffers)])

    def lease(self, kind: str) -> str:
        self._num_leases += 1
        return f"{kind}:0:1.{self._num_leases}"

    def ask(
        self, name: str, message: Any, answer: type[M], buffers: tuple[bytes, ...] = ()
    ) -> tuple[M, tuple[bytes, ...]]:
        """Send a command to `name`; return its answer, which must be of type `answer`, with the buffers."""
        self.send(name, message, buffers)
        return self.answer(name, message.lease, answer)

    def answer(self, name: str, lease: str, kind: type[M]) -> tuple[M, tuple[bytes, ...]]:
        """Wait for the answer to `lease`, release the lease, and return the answer."""
        message, buffers = self._await(name, lambda message: getattr(message, "lease", None) == lease)
        assert isinstance(message, kind), message
        self.send(name, wire.ReleaseLeases(leases=(lease,)))
        return message, buffers

    def next(self, name: str, kind: type[M]) -> tuple[M, tuple[bytes, ...]]:
        """Return the next message of `kind` from `name`."""
        return self._await(name, lambda message: isinstance(message, kind))

    def heartbeat(self, name: str, matches: Callable[[wire.Heartbeat], bool]) -> wire.Heartbeat:
        """Return the next heartbeat for which `matches` is true."""
        return self._await(name, lambda message: isinstance(message, wire.Heartbeat) and matches(message))[0]  # type: ignore[no-any-return]

    def _await(self, name: str, matches: Callable[[Any], bool]) -> Any:
        """Return the first message that matches; drops heartbeats and hellos before it."""
        deadline = time.monotonic() + DEADLINE_S
        other_messages: deque[Received] = deque()
        while True:
            while self._received[name]:
                received = self._received[name].popleft()
                if matches(received[0]):
                    self._received[name].extendleft(reversed(other_messages))
                    return received
                if not isinstance(received[0], wire.Heartbeat | wire.Hello):
                    other_messages.append(received)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{name} did not send the expected message, but {other_messages}"
            if self._socket.poll(left_s * 1000):
                self._receive()

    def _receive(self) -> None:
        route, *frames = self._socket.recv_multipart()
        envelope = codec.unpack_envelope(frames)
        self._routes[envelope.sender] = route
        self._causes[envelope.sender] = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
        message = codec.unpack_up(frames)
        assert type(message) in wire.ALLOWED_MESSAGES[envelope.sender.partition("-")[0]]  # type: ignore[index]
        self._received[envelope.sender].append((message, tuple(frames[2:])))
        if isinstance(message, wire.Heartbeat) and not self.ignores_heartbeats:
            self.send(envelope.sender, self.welcome)
