"""TCP proxy between a reader and its source that can flip one bit."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

WAIT_S: Final = 0.02
"""Longest wait between two checks for the end of the proxy."""
SEND_S: Final = 5.0
"""How long an end may accept nothing before its connection is closed."""

Direction = Literal["requests", "answers"]


@dataclass(frozen=True)
class Flip:
    """One bit of one byte in one direction, counted from the first byte of the first connection."""

    direction: Direction
    at: int
    bit: int


class FlippingProxy:
    """Forwards the bytes of one connection at a time, with at most one flipped bit."""

    def __init__(self, address: str, flip: Flip | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._target, self._flip = (host, int(port)), flip
        self._stop = threading.Event()
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(WAIT_S)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Address that the reader connects to."""
        self.num_bytes: dict[Direction, int] = {"requests": 0, "answers": 0}
        """Bytes forwarded so far."""
        self.flipped = False
        """Whether the bit has been flipped."""
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def close(self) -> None:
        """Close both connections."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._listener:
            while not self._stop.is_set():
                try:
                    reader, _ = self._listener.accept()
                except TimeoutError:
                    continue
                with reader, suppress(OSError), socket.create_connection(self._target, SEND_S) as source:
                    self._pass_on(reader, source)

    def _pass_on(self, reader: socket.socket, source: socket.socket) -> None:
        """Forward until one end closes, which closes the other."""
        routes: dict[socket.socket, tuple[Direction, socket.socket]] = {
            reader: ("requests", source),
            source: ("answers", reader),
        }
        while not self._stop.is_set():
            for end in select.select([reader, source], [], [], WAIT_S)[0]:
                direction, other = routes[end]
                data = bytearray(end.recv(1 << 16))
                if not data:
                    return
                self._flip_bit(direction, data)
                self._send(other, data)

    def _send(self, other: socket.socket, data: bytearray) -> None:
        other.settimeout(WAIT_S)
        left, end = memoryview(data), time.monotonic() + SEND_S
        while left.nbytes:
            try:
                left = left[other.send(left) :]
            except TimeoutError:
                if self._stop.is_set() or time.monotonic() > end:
                    raise

    def _flip_bit(self, direction: Direction, data: bytearray) -> None:
        begin = self.num_bytes[direction]
        self.num_bytes[direction] += len(data)
        flip = self._flip
        if flip is not None and flip.direction == direction and begin <= flip.at < begin + len(data):
            data[flip.at - begin] ^= 1 << flip.bit
            self.flipped = True


@contextmanager
def proxy(address: str, flip: Flip | None = None) -> Iterator[FlippingProxy]:
    """Run a proxy, which is closed afterwards."""
    made = FlippingProxy(address, flip)
    try:
        yield made
    finally:
        made.close()
