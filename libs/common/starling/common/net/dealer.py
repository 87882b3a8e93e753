"""DEALER socket that connects to the controller and reconnects to it.

When the controller dies, ZeroMQ reconnects to its address with exponential backoff. It keeps the messages that are
still in the socket and sends them to the next controller. Therefore messages are put into the socket only while it is
connected; only the very first one waits there for a connection. (ZMQ_IMMEDIATE seems to be made for this; but with it,
a connection that closes discards the messages *received* over it, and a full queue looks like a lost peer.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import RefusedError, UnreachableError
from starling.common.net import curve
from starling.common.net.frames import receive, send
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
)


class Dealer:
    """One connection to one controller. Not thread-safe; its owner locks."""

    def __init__(self, address: str, name: str, key: curve.KeyFile | None) -> None:
        """Begin to connect to `address` as `name`. Raises UnreachableError if `address` is malformed."""
        self._address, self._name = address, name
        self.connected = False
        """Whether there is a connection, as of the last event that was read."""
        self._ever_connected = self._reconnected = self._refused = False
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
        if self._refused:
            raise RefusedError(
                f"the controller at {self._address} refuses the key of {self._name}; "
                "use the key file that was made for this name in this run"
            )
        reconnected, self._reconnected = self._reconnected, False
        return reconnected

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
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = self._reconnected = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or not self._ever_connected:
                # While a controller is away, another program may answer at its port for a moment: that is no refusal.
                self._refused = True

    def unreachable(self, why: str) -> str:
        """Return the error sentence for a controller that does not answer."""
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
