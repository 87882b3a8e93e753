"""Subscriber of a controller's telemetry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from starling.common.net import curve
from starling.common.wire.telemetry import RunSnapshot


class TelemetrySubscriber:
    """SUB socket to the controller's PUB. A missed snapshot is lost; the next one repeats the whole state."""

    def __init__(self, address: str, key: Path | None) -> None:
        """Subscribe at `address` with the key file `key` (None: without CURVE)."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        if key is not None:
            curve.connect_with(self._socket, curve.load_key(key))
        self._socket.subscribe(b"")
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(RunSnapshot)

    def latest(self, timeout_s: float) -> RunSnapshot | None:
        """Wait up to `timeout_s` for a snapshot; return the newest one, or None."""
        newest: bytes | None = None
        if self._socket.poll(int(timeout_s * 1000)):
            while self._socket.poll(0):
                newest = self._socket.recv(zmq.NOBLOCK)
        return self._decoder.decode(newest) if newest is not None else None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()
