"""DEALER socket that connects to the controller and reconnects to it.

When the controller dies, ZeroMQ reconnects to its address with exponential backoff. It keeps the messages that are
still in the socket and sends them to the next controller. Therefore messages are put into the socket only while it is
connected; only the very first one waits there for a connection. (ZMQ_IMMEDIATE seems to be made for this; but with it,
a connection that closes discards the messages *received* over it, and a full queue looks like a lost peer.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import RefusedError, UnreachableError
from starling.common.net import curve
from starling.common.net.frames import receive, send
from starling.common.net.handshakes import BrokenHandshakes
from starling.common.wire import codec

RECONNECT_MS: Final = (50, 150)
"""First delay before a reconnect; each further one is twice as long.

A killed controller is back in a second or two, and a connection that broke for no reason at once.
"""
RECONNECT_MAX_MS: Final = (1000, 2000)
"""Longest delay before a reconnect. A replica loses no more than this after a controller's death, and 10,000 replicas
together make some 7,000 attempts a second then, which costs a restarted controller a second or two of key exchanges.

Each replica draws its own two delays: libzmq (4.3) adds no jitter to growing delays, and a whole fleet that lost its
controller at once would otherwise reconnect in waves.
"""
CONNECT_WITHIN_MS: Final = 5000
"""Timeout of a connection attempt; the kernel alone would try for minutes."""
PING_MS: Final = 5000
SILENT_MS: Final = 30_000
"""ZeroMQ's own threads ping every `PING_MS`. A connection without a ping for `SILENT_MS` is dead, as after a network
partition or the loss of a machine, and is reopened. Neither a busy nor a stopped process counts as dead so soon."""
SEND_HIGH_WATER: Final = 1000
"""Messages that are queued for a controller that is connected and does not read."""
LINGER_MS: Final = 1000

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Dealer:
    """One connection to one controller. Not thread-safe; its owner locks."""

    def __init__(self, address: str, name: str, key: curve.KeyFile | None) -> None:
        """Begin to connect to `address` as `name`. Raises UnreachableError if `address` is malformed."""
        self._address, self._name = address, name
        self._server_key = "" if key is None else key.controller_public
        self.connected = False
        """Whether there is a connection, as of the last event that was read."""
        self._ever_connected = self._reconnected = False
        self._refusal = ""
        """Why the controller accepts no message of this process."""
        self._broken_off = BrokenHandshakes()
        self._is_unproven_known = False
        self._idle = True  # nothing was sent yet
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        self.socket.linger = LINGER_MS
        self.socket.maxmsgsize = codec.MAX_BUFFER_BYTES
        self.socket.sndhwm = SEND_HIGH_WATER
        self.socket.reconnect_ivl = random.randint(*RECONNECT_MS)
        self.socket.reconnect_ivl_max = random.randint(*RECONNECT_MAX_MS)
        self.socket.connect_timeout = CONNECT_WITHIN_MS
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = PING_MS, SILENT_MS
        if key is not None:
            curve.connect_with(self.socket, key)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UnreachableError(self.unreachable(str(error))) from None

    def reconnected(self) -> bool:
        """Read connection events. Returns whether there is a new connection since the last call.

        Raises RefusedError if the controller does not accept the key.
        """
        self._take_events()
        if self._refusal:
            raise RefusedError(self._refusal)
        reconnected, self._reconnected = self._reconnected, False
        return reconnected

    @property
    def is_unproven(self) -> bool:
        """Whether the other end has broken off every handshake for long: it may not have the controller's key."""
        return self._broken_off.is_lasting(time.monotonic())

    def new_problem(self) -> str:
        """Return in one sentence that the controller is not proven; once until the next connection, empty otherwise."""
        if self._is_unproven_known or not self.is_unproven:
            return ""
        self._is_unproven_known = True
        return self._unproven()

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send one message, if there is a connection. Returns False if there is none.

        The very first message waits for the first connection. Raises zmq.Again if the send queue is full.
        """
        if not self.connected:
            self._take_events()
            if not (self.connected or self._idle):
                return False
        self._idle = False
        send(self.socket, frames)
        return True

    def _take_events(self) -> None:
        while (received := receive(self._monitor)) is not None:
            event = parse_monitor_message(received[0])["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = self._ever_connected = self._reconnected = True
                self._is_unproven_known = False
                self._broken_off.clear()
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = self._reconnected = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._broken_off.add(time.monotonic())
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or not self._ever_connected:
                # While a controller is away, another program may answer at its port for a moment: that is no refusal.
                self._refusal = self._refused(is_key=event == zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def _refused(self, *, is_key: bool) -> str:
        """Return the error sentence for a controller that accepts no message."""
        if is_key:
            return (
                f"the controller at {self._address} refuses the key of {self._name}; "
                "use the key file that was made for this name in this run"
            )
        own = "CURVE" if self._server_key else "no CURVE"
        return (
            f"the controller at {self._address} and {self._name}, which uses {own}, cannot connect; "
            "set network.curve to the same value for both, and check the address"
        )

    def _unproven(self) -> str:
        """Return the sentence for another end that breaks off every handshake."""
        if not self._server_key:
            return (
                f"the controller at {self._address} breaks off each connection of {self._name}, which uses no CURVE; "
                "set network.curve to the same value for both, and check the address, and that the controller runs"
            )
        return (
            f"the controller at {self._address} does not prove to {self._name} that it has the key "
            f"{self._server_key}, or something between them closes the connections; use the key file that was made for "
            "this name in this run, and check the address, and that the controller runs"
        )

    def unreachable(self, why: str) -> str:
        """Return the error sentence for a controller that does not answer, which `why` is about."""
        if self.is_unproven:
            return f"{self._unproven()} ({why})"
        return (
            f"the controller at {self._address} cannot be reached by {self._name} ({why}); "
            "check the address, that the controller runs, and that the key file was made for this run"
        )

    def close(self) -> None:
        """Flush the last messages, for at most `LINGER_MS`, then close."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()
