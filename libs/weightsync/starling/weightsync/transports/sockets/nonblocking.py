"""Non-blocking socket channel, for transports whose single thread has other work too."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S

_HEAD: Final = struct.Struct("<IB")
"""Length of the body, and the kind of message."""
_RECEIVE_BYTES: Final = 64 << 10


class NonBlockingChannel:
    """One connected or connecting socket. Used by one thread; poll `fileno` for `events`.

    Args:
        connection: the socket, which the channel then owns.
        longest: the longest body accepted, in bytes; may be set anew.
        most_queued: the most bytes that wait to be sent, of a peer that requests more than it receives; without it, no
            limit.
    """

    def __init__(self, connection: socket.socket, longest: int, most_queued: int | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self.longest, self._most_queued = connection, longest, most_queued
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._last_sent_at = time.monotonic()

    @classmethod
    def dial(cls, address: tuple[str, int], longest: int) -> NonBlockingChannel:
        """Begin to connect; messages sent meanwhile are queued.

        Raises:
            WeightsError: the address cannot be resolved.
        """
        try:
            family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            raise WeightsError(f"No connection to {address[0]}:{address[1]}: {error.strerror or error}.") from error
        connection.setblocking(False)
        connection.connect_ex(resolved)  # a failure is raised by the first `flush` or `receive` after it
        return cls(connection, longest)

    @property
    def events(self) -> int:
        """The poll events to wait for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def fileno(self) -> int:
        """The descriptor to poll; -1 when closed."""
        return self._socket.fileno()

    def send(self, kind: int, body: bytes) -> None:
        """Send a message, now or in a later `flush`.

        Raises:
            OSError: as `flush`, or more waits to be sent than may.
        """
        if not self._outgoing:
            self._last_sent_at = time.monotonic()
        self._outgoing += _HEAD.pack(len(body), kind) + body
        self.flush()
        if self._most_queued is not None and len(self._outgoing) > self._most_queued:
            raise ConnectionError(f"{len(self._outgoing)} bytes wait for the peer, which receives too slowly")

    def flush(self) -> None:
        """Send as much as the socket accepts.

        Raises:
            OSError: the connection is broken, or the peer accepted nothing for `IDLE_TIMEOUT_S`.
        """
        while self._outgoing:
            try:
                num = self._socket.send(self._outgoing)
            except BlockingIOError:
                if time.monotonic() - self._last_sent_at > IDLE_TIMEOUT_S:
                    raise TimeoutError(f"the peer has accepted nothing for {IDLE_TIMEOUT_S:g} s") from None
                return
            del self._outgoing[:num]
            self._last_sent_at = time.monotonic()

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the kind and body of each message that has arrived, and that of others later: a peer that always sends
        takes neither all of the thread's time nor its memory.

        Raises:
            OSError: the connection is broken, or the peer has closed it and everything was returned before.
            WeightsError: a message is too long.
        """
        messages: list[tuple[int, bytes]] = []
        num_bytes = 0
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            if not data and not messages:
                raise ConnectionError("the peer closed the connection")
            self._incoming += data
            num_bytes += len(data)
            while len(self._incoming) >= _HEAD.size:
                length, kind = _HEAD.unpack_from(self._incoming)
                if length > self.longest:
                    raise WeightsError(
                        f"A peer announced a message of {length} bytes; at most {self.longest} are allowed."
                    )
                end = _HEAD.size + length
                if len(self._incoming) < end:
                    break
                messages.append((kind, bytes(self._incoming[_HEAD.size : end])))
                del self._incoming[:end]
            if len(data) < _RECEIVE_BYTES or num_bytes > self.longest:
                return messages

    def close(self) -> None:
        """Close the connection, whatever is under way; may be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
