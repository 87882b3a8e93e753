"""Client of an operator: sends a request to the controller and waits for the reply."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import zmq

from starling.common.errors import ConfigError, RefusedError, UnreachableError, WireError
from starling.common.net import curve
from starling.common.net.dealer import Dealer
from starling.common.net.frames import receive
from starling.common.net.settings import make_incarnation
from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, OperatorMessage, OperatorReply, Refused

REPEAT_S: Final = 1.0
"""A request without a reply is sent again: it, or the reply, may have been lost with a controller."""
PATIENCE_MS: Final = 100
"""How long to wait for a message before the connection is checked."""


class OperatorClient:
    """DEALER of one operator. An operator is no member of the run: it sends no `Hello` and no heartbeat."""

    def __init__(self, address: str, key_path: Path | None, run: str, name: str = "operator-0") -> None:
        """Connect to the controller at `address` with the key in `key_path` (None: without CURVE).

        Raises ConfigError if the key cannot be used, UnreachableError if `address` is malformed.
        """
        key = None if key_path is None else curve.load_key(key_path)
        if key is not None and key.name != name:
            raise ConfigError(f"the key file {key_path} was made for {key.name}, not for {name}; give that of {name}")
        self._run, self._name = run, name
        self._incarnation = 0
        self._dealer = Dealer(address, name, key)
        self._dealer.socket.rcvtimeo = PATIENCE_MS

    def ask(self, message: OperatorMessage, timeout_s: float) -> OperatorReply:
        """Send `message`, repeatedly, until the reply to its request arrives, and return the reply.

        Raises RefusedError if the controller refuses this operator, UnreachableError without a reply within
        `timeout_s`.
        """
        now = time.monotonic()
        deadline, ask_at = now + timeout_s, now if self._dealer.connected else float("inf")
        while now < deadline:
            # Also at once over a new connection: messages over the last one may be lost.
            if self._dealer.reconnected() or now >= ask_at:
                ask_at = now + REPEAT_S
                self._send(message)
            answer = self._receive()
            if isinstance(answer, Refused):
                raise RefusedError(f"the controller refuses {self._name}: {answer.reason}")
            if answer is not None and answer.request == message.request:
                return answer
            now = time.monotonic()
        raise UnreachableError(self._dealer.unreachable(f"no answer for {timeout_s:g} s"))

    def close(self) -> None:
        """Close the connection."""
        self._dealer.close()

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, message: OperatorMessage) -> None:
        # Each time as a new incarnation, so that two operators with one key alternate: the controller answers the
        # newest, and the other one's next repetition is newer again.
        self._incarnation = max(make_incarnation(), self._incarnation + 1)
        envelope = Envelope(
            protocol=PROTOCOL_VERSION, run=self._run, sender=self._name, incarnation=self._incarnation, seq=1
        )
        try:
            self._dealer.send(codec.pack(envelope, message))
        except zmq.Again:
            return  # it is sent again

    def _receive(self) -> OperatorReply | Refused | None:
        """Return the next message for an operator, or None after a moment; other messages are ignored.

        A controller of another version refuses in a message of its own version.
        """
        received = receive(self._dealer.socket, 0)
        if received is None:
            return None
        try:
            envelope = codec.unpack_envelope(received[0])
            message = codec.unpack_down(received[0])
        except WireError:
            return None
        if envelope.run != self._run:
            return None
        if isinstance(message, Refused):
            return message
        return message if isinstance(message, OperatorReply) and envelope.protocol == PROTOCOL_VERSION else None
