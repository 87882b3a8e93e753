"""Subscriber of a controller's telemetry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import UnreachableError
from starling.common.net import curve
from starling.common.net.frames import receive
from starling.common.net.handshakes import BrokenHandshakes
from starling.common.wire.telemetry import RunSnapshot

_REFUSALS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""A key that the controller does not know; a controller whose key is another one, which breaks each handshake off."""
_EVENTS: Final = _REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED


class TelemetrySubscriber:
    """SUB socket to the controller's PUB. A missed snapshot is lost; the next one repeats the whole state."""

    def __init__(self, address: str, key: Path | None) -> None:
        """Subscribe at `address` with the key file `key` (None: without CURVE).

        Raises ConfigError when the key cannot be used, UnreachableError when `address` is malformed.
        """
        loaded = curve.load_key(key) if key is not None else None
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        if loaded is not None:
            curve.connect_with(self._socket, loaded)
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self.is_refused = False
        """Whether the controller has refused the key since the last snapshot, or broken off all handshakes for long."""
        self.is_key_refused = False
        """Whether it has refused the key. A handshake that is broken off may have another reason."""
        self._broken_off = BrokenHandshakes()
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UnreachableError(f"{address} is no address of telemetry ({error}); give tcp://host:port") from None
        self._decoder = msgspec.msgpack.Decoder(RunSnapshot)

    def latest(self, timeout_s: float) -> RunSnapshot | None:
        """Wait up to `timeout_s` for a snapshot; return the newest one, or None.

        Raises msgspec.ValidationError for a snapshot of another version with other fields.
        """
        newest: bytes | None = None
        if self._socket.poll(int(timeout_s * 1000)):
            while self._socket.poll(0):
                newest = self._socket.recv(zmq.NOBLOCK)
        if newest is None:
            self._take_events()
            return None
        self._forget_refusal()
        return self._decoder.decode(newest)

    def _take_events(self) -> None:
        while (received := receive(self._monitor)) is not None:
            event = parse_monitor_message(received[0])["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._forget_refusal()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._broken_off.add(time.monotonic())
            else:
                self.is_key_refused = True
        self.is_refused = self.is_key_refused or self._broken_off.is_lasting(time.monotonic())

    def _forget_refusal(self) -> None:
        self.is_refused = self.is_key_refused = False
        self._broken_off.clear()

    def close(self) -> None:
        """Close the socket."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
