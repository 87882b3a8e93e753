"""A DEALER that calls the controller, and finds it again: opened, watched and closed.

When the controller dies, ZeroMQ calls its address again, at first soon and then ever less often. It keeps what is
still in the socket and sends that to the next controller. Therefore nothing is put into the socket but over a
connection that stands: only the very first message waits there for one. (ZMQ_IMMEDIATE would seem to be made for
this; but with it, a connection that closes takes the messages *received* over it along, and there is no telling
`full` from `away`.)
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
"""The first wait before the controller is called again; each further one is twice as long.

A controller that was killed is back in a second or two, and a connection that broke for no reason at once.
"""
RECONNECT_MAX_MS: Final = (1000, 2000)
"""The longest wait. It is what a replica loses at most after a controller's death, and 10,000 replicas together knock
some 7,000 times a second then, which costs a controller that has just come back a second or two of key exchanges.

Each replica draws its own two waits: libzmq (4.3) adds no jitter to waits that grow, and a whole fleet that lost its
controller at once would otherwise come back in waves.
"""
CONNECT_WITHIN_MS: Final = 5000
"""An attempt that nobody answers, not even with a refusal, is given up; the kernel alone would try for minutes."""
PING_MS: Final = 5000
SILENT_MS: Final = 30_000
"""ZeroMQ's own threads say a word each `PING_MS`. A connection over which none came for so long is dead, as after a
network partition or the loss of a machine, and the controller is called anew. Neither a busy nor a stopped process
is taken for dead so soon."""
SEND_HIGH_WATER: Final = 1000
"""Messages that wait for a controller that is connected and does not read."""
LINGER_MS: Final = 1000

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Dealer:
    """One line to one controller. Not thread-safe; its owner sees to that."""

    def __init__(self, address: str, name: str, key: curve.KeyFile | None) -> None:
        """Begin to call `address` as `name`. Raises UnreachableError when that is no address."""
        self._address, self._name = address, name
        self.connected = False
        """Whether there is a connection, as far as anybody has looked."""
        self._ever = self._anew = self._refused = False
        self._idle = True  # nothing was ever sent
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

    def look(self) -> bool:
        """Take in what became of the connection. Returns whether there is a new one since the last look.

        Raises RefusedError when the controller does not accept the key.
        """
        self._take_events()
        if self._refused:
            raise RefusedError(
                f"the controller at {self._address} refuses the key of {self._name}; "
                "use the key file that was made for this name in this run"
            )
        anew, self._anew = self._anew, False
        return anew

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send one message, if there is a connection. Returns False when there is none.

        The first message of all waits for the first connection. Raises zmq.Again when the line is full.
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
                self.connected = self._ever = self._anew = True
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = self._anew = False
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or not self._ever:
                # While a controller is away, something else may answer at its port for a moment: that is no refusal.
                self._refused = True

    def unreachable(self, why: str) -> str:
        """Return the sentence for a controller that does not answer."""
        return (
            f"the controller at {self._address} cannot be reached by {self._name} ({why}); "
            "check the address, that the controller runs, and that the key file was made for this run"
        )

    def close(self) -> None:
        """Let the last messages go out, for at most `LINGER_MS`, then close."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()
