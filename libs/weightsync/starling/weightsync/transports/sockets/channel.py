"""Blocking socket channel: length-prefixed messages and raw payloads, encrypted once there are keys.

Every wait on it can be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, LONGEST_WAIT_S
from starling.weightsync.transports.messages import LENGTH, Message, with_length
from starling.weightsync.transports.sockets.records import HEAD, RECORD_BYTES, RecordReader, RecordWriter

_BUFFER_BYTES: Final = 4 << 20
_FIRST_BYTES: Final = 16 << 10
"""Bytes of a message for which there is memory before the first of them has arrived."""


class ChannelStopped(Exception):
    """The channel's `stop` event was set: the thread that uses it must end."""


def framed(message: Message) -> memoryview:
    """Return a message with its length in front, as it goes through a channel."""
    return memoryview(with_length(message))


def connect(address: tuple[str, int], stop: threading.Event) -> Channel:
    """Connect; `stop` interrupts it. Raises ChannelStopped, OSError."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.connect_ex(resolved)
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        while not poller.poll(LONGEST_WAIT_S * 1000):
            if stop.is_set():
                raise ChannelStopped
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        return Channel(connection, stop)
    except BaseException:  # whatever it is: close the socket, and re-raise
        connection.close()
        raise


class Channel:
    """One end of a connection. One thread may send while another receives; `stop` interrupts both."""

    def __init__(self, connection: socket.socket, stop: threading.Event) -> None:
        self._connection = connection
        self._writer: RecordWriter | None = None
        self._reader: RecordReader | None = None
        self.stop: Final = stop
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        connection.settimeout(LONGEST_WAIT_S)

    @property
    def host(self) -> str:
        """Local address of the connection."""
        return str(self._connection.getsockname()[0])

    @property
    def ended(self) -> bool:
        """Whether `stop` was set, or either end has shut the connection down."""
        poller = select.poll()
        poller.register(self._connection, select.POLLRDHUP)
        return self.stop.is_set() or bool(poller.poll(0))

    def encrypt(self, *, sending: bytes, receiving: bytes) -> None:
        """Encrypt from here on what is sent, and decrypt what is received, with these keys. Neither is under way."""
        self._writer, self._reader = RecordWriter(sending), RecordReader(receiving)

    def send(self, blocks: Sequence[memoryview]) -> None:
        """Send blocks in order.

        Raises:
            ChannelStopped: `stop` was set.
            TimeoutError: the peer accepted nothing for `IDLE_TIMEOUT_S`.
        """
        if self._writer is None:
            self._send(blocks)
            return
        for block in blocks:
            content = block.cast("B")
            for begin in range(0, content.nbytes, RECORD_BYTES):
                self._send([self._writer.write(content[begin : begin + RECORD_BYTES])])

    def _send(self, blocks: Sequence[memoryview]) -> None:
        left = deque(block for block in blocks if block.nbytes)
        end = time.monotonic() + IDLE_TIMEOUT_S
        while left:
            if self.stop.is_set():
                raise ChannelStopped
            try:
                num = self._connection.sendmsg([left[i] for i in range(min(len(left), 64))])
            except TimeoutError:
                if time.monotonic() > end:
                    raise
                continue
            end = time.monotonic() + IDLE_TIMEOUT_S
            while left and num >= left[0].nbytes:
                num -= left.popleft().nbytes
            if num:
                left[0] = left[0][num:]

    def receive(self, memory: memoryview, end: float | None = None) -> None:
        """Fill `memory`.

        Raises:
            ChannelStopped: `stop` was set.
            ConnectionError: the stream has ended.
            TimeoutError: it is not filled at `end`.
            WeightsError: what arrived is not what the peer encrypted.
        """
        if self._reader is None:
            self._receive(memory, end)
            return
        memory = memory.cast("B")
        memory = memory[self._reader.take(memory) :]
        while memory.nbytes:
            head = bytearray(HEAD.size)
            self._receive(memoryview(head), end)
            self._receive(self._reader.body(head), end)
            memory = memory[self._reader.read(head, memory) :]
            memory = memory[self._reader.take(memory) :]

    def _receive(self, memory: memoryview, end: float | None) -> None:
        while memory.nbytes:
            if self.stop.is_set():
                raise ChannelStopped
            if end is not None and time.monotonic() > end:
                raise TimeoutError("the peer has sent too little in time")
            try:
                num = self._connection.recv_into(memory)
            except TimeoutError:
                continue
            if not num:
                raise ConnectionError("the peer closed the connection")
            memory = memory[num:]

    def receive_message(self, longest: int, end: float | None = None) -> bytearray:
        """Receive a length-prefixed message.

        Raises:
            WeightsError: it is longer than `longest` bytes.
        """
        head = bytearray(LENGTH.size)
        self.receive(memoryview(head), end)
        (length,) = LENGTH.unpack(head)
        if length > longest:
            raise WeightsError(f"A peer announced a message of {length} bytes; at most {longest} are allowed.")
        body = bytearray()
        while (size := len(body)) < length:  # no memory for what a peer only announces
            body.extend(bytes(min(length - size, max(size, _FIRST_BYTES))))
            with memoryview(body) as memory:
                self.receive(memory[size:], end)
        return body

    def hang_up(self) -> None:
        """Shut the connection down, which ends the waits of other threads on it. Thread-safe."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. No thread may use it afterwards."""
        self._connection.close()
