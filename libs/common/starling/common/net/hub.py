"""The controller's socket: a ROUTER that knows its peers by name and never stops for what they send.

Names are not routing ids: ROUTER assigns those at random, and a peer is known only once an envelope has come whose
sender the connection's own key stands for. Nobody can therefore speak, or receive, under another's name.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import ConfigError, WireError
from starling.common.net import curve
from starling.common.net.frames import receive, send
from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Down, Envelope, Refused, Release, Up

log = structlog.get_logger(__name__)

MAX_BATCH = 256
"""Messages taken in one `poll`, so that a flood cannot keep the controller from its clock."""
MAX_LOGGED = 300
"""Characters of a reason that may hold what a peer chose to send."""
RELEASE_WITHIN_S = 0.02
"""How long a release waits for others to the same peer. Nobody waits for it: it only ends the sending again."""
MAX_RELEASES = 64
"""So many releases to one peer wait for no others."""
LOOK_EVERY_S = 0.05
"""How long `poll` waits at a time, and how often it looks for connections that have closed."""


class Arrival(msgspec.Struct, frozen=True):
    """One valid message from a peer."""

    envelope: Envelope
    message: Up
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PeerLost:
    """The connection of a peer closed."""

    name: str


@dataclass
class _Peer:
    route: bytes
    epoch: int
    descriptor: int
    seq_out: int = 0


@dataclass(frozen=True)
class HubKeys:
    """The controller's key pair and whom it lets in."""

    own: curve.KeyFile
    allowed: dict[str, str] = field(default_factory=dict)


class Hub:
    """ROUTER at the controller. Not thread-safe: one thread polls and sends."""

    def __init__(self, bind: str, run: str, epoch: int, keys: HubKeys | None) -> None:
        """Bind to `bind` (``tcp://host:port``, port 0 for a free one). Raises ConfigError if that is taken."""
        self.run, self.epoch = run, epoch
        self.dropped: Counter[str] = Counter()
        self._keys = keys
        self._peers: dict[str, _Peer] = {}
        self._names: dict[bytes, str] = {}
        self._closed: list[tuple[str, bytes]] = []
        self._releases: dict[str, dict[str, None]] = {}
        self._release_at = float("inf")
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = None
        if keys is not None:
            self._authenticator = curve.start_authenticator(self._context, curve.AllowList(keys.allowed))
        self._socket = self._open(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._publisher = self._open(zmq.PUB)
        try:
            self._socket.bind(bind)
            self._publisher.bind(bind.rpartition(":")[0] + ":0")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {bind}: {error.strerror}; choose another port, or 0") from None
        self.address = self._last_endpoint(self._socket)
        self.telemetry_address = self._last_endpoint(self._publisher)
        self._patience_ms = -1
        self._look_at = float("-inf")

    def poll(self, timeout_s: float) -> list[Arrival | PeerLost]:
        """Wait up to `timeout_s` and return what happened first; invalid frames are counted and dropped.

        That is one message, or nothing, or, after connections have closed, the messages that are there already and
        then the peers that are lost: what a peer said last counts.
        """
        happened: list[Arrival | PeerLost] = []
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            if now >= self._look_at:
                self._look_at = now + LOOK_EVERY_S
                self._note_closed()
            if now >= self._release_at:
                self._send_releases(*self._releases)
            received = self._next(0.0 if self._closed else min(deadline - now, LOOK_EVERY_S, self._release_at - now))
            arrival = self._admit(*received) if received is not None else None
            if arrival is not None:
                happened.append(arrival)
            if not self._closed and happened:
                return happened
            if self._closed and (received is None or len(happened) == MAX_BATCH):
                closed, self._closed = self._closed, []
                return happened + [PeerLost(name) for name, route in closed if self._forget(name, route)]
            now = time.monotonic()
            if now >= deadline:
                return happened

    def send(self, name: str, message: Down, *, cause: str = "", buffers: codec.Buffers = ()) -> bool:
        """Send to a peer. Returns False when it is not connected or not reading; its heartbeats will heal that."""
        peer = self._peers.get(name)
        if peer is None:
            return False
        if name in self._releases and getattr(message, "lease", None) in self._releases[name]:
            self._send_releases(name)  # it is granted anew, and must not be forgotten thereafter
        peer.seq_out += 1
        envelope = Envelope(
            protocol=PROTOCOL_VERSION,
            run=self.run,
            sender=curve.CONTROLLER,
            epoch=self.epoch,
            seq=peer.seq_out,
            cause=cause,
        )
        try:
            send(self._socket, [peer.route, *codec.pack(envelope, message, buffers)])
        except zmq.ZMQError as error:
            log.warning("cannot send", peer=name, message=type(message).__name__, error=error.strerror)
            return False
        return True

    def release(self, name: str, leases: tuple[str, ...]) -> None:
        """Tell a peer within `RELEASE_WITHIN_S`, in one message with its other releases, to forget `leases`.

        One message for each would be a third of all messages.
        """
        if not self._releases:
            self._release_at = time.monotonic() + RELEASE_WITHIN_S
        waiting = self._releases.setdefault(name, {})
        waiting.update(dict.fromkeys(leases))
        if len(waiting) >= MAX_RELEASES:
            self._send_releases(name)

    def _send_releases(self, *names: str) -> None:
        for name in names:
            self.send(name, Release(leases=tuple(self._releases.pop(name))))
        if not self._releases:
            self._release_at = float("inf")

    def publish(self, payload: bytes) -> None:
        """Offer telemetry to whoever listens; it may be lost."""
        self._publisher.send(payload, zmq.NOBLOCK)

    def close(self, linger_s: float = 1.0) -> None:
        """Let the last messages leave for at most `linger_s`, then close everything."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))
        self._publisher.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _open(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = codec.MAX_BUFFER_BYTES
        socket.sndhwm = 10_000
        if self._keys is not None:
            curve.serve_with(socket, self._keys.own)
        return socket

    def _last_endpoint(self, socket: zmq.Socket[Any]) -> str:
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _next(self, timeout_s: float) -> tuple[list[bytes], zmq.Frame] | None:
        """Return the next message, or None after `timeout_s`."""
        # Waiting in `recv` costs a third of what a poller of two sockets does, which is why closed connections are
        # looked for by the clock.
        patience_ms = int(timeout_s * 1000) + 1 if timeout_s > 0 else 0
        if patience_ms != self._patience_ms:
            self._patience_ms = self._socket.rcvtimeo = patience_ms
        return receive(self._socket, 0)

    def _admit(self, frames: list[bytes], last: zmq.Frame) -> Arrival | None:
        route, *parts = frames
        envelope = None
        try:
            envelope = codec.unpack_envelope(parts)
            self._check(envelope, last)
            message = codec.unpack_up(parts)
        except WireError as error:
            self._drop(route, error)
            if envelope is not None and error.kind in ("protocol", "run", "key"):
                self._refuse(route, envelope, str(error))
            return None
        self._remember(route, envelope, last)
        return Arrival(envelope, message, tuple(parts[2:]))

    def _check(self, envelope: Envelope, frame: zmq.Frame) -> None:
        if envelope.protocol != PROTOCOL_VERSION:
            raise WireError(f"protocol {envelope.protocol} instead of {PROTOCOL_VERSION}", "protocol")
        if envelope.run != self.run:
            raise WireError(f"this is run {self.run}, not {envelope.run}", "run")
        if self._keys is not None and self._keys.allowed.get(str(frame.get("User-Id"))) != envelope.sender:
            raise WireError(f"{envelope.sender} does not own the key of its connection", "key")
        known = self._peers.get(envelope.sender)
        if known is not None and envelope.epoch < known.epoch:
            raise WireError(f"{envelope.sender} is an older incarnation", "epoch")

    def _remember(self, route: bytes, envelope: Envelope, frame: zmq.Frame) -> None:
        peer = self._peers.get(envelope.sender)
        if peer is not None and peer.route == route and peer.epoch == envelope.epoch:
            return
        # A new connection may have the descriptor of one that closed, which is therefore noted before.
        self._note_closed()
        if peer is not None:
            self._names.pop(peer.route, None)
        self._peers[envelope.sender] = _Peer(route, envelope.epoch, frame.get(zmq.SRCFD))
        self._names[route] = envelope.sender

    def _note_closed(self) -> None:
        """Take in which connections have closed."""
        while (received := receive(self._monitor)) is not None:
            descriptor = int(parse_monitor_message(received[0])["value"])
            self._closed += [(name, peer.route) for name, peer in self._peers.items() if peer.descriptor == descriptor]

    def _forget(self, name: str, route: bytes) -> bool:
        """Forget a peer, unless it has come back over another connection meanwhile."""
        peer = self._peers.get(name)
        if peer is None or peer.route != route:
            return False
        del self._peers[name]
        self._names.pop(route, None)
        return True

    def _drop(self, route: bytes, error: WireError) -> None:
        if self.dropped[error.kind] == 0:
            peer = self._names.get(route, "an unknown peer")
            log.warning("dropped a message", peer=peer, kind=error.kind, reason=str(error)[:MAX_LOGGED])
        self.dropped[error.kind] += 1

    def _refuse(self, route: bytes, envelope: Envelope, reason: str) -> None:
        """Tell a peer that can never become a member why, in an envelope that it takes for its own run's."""
        answer = Envelope(protocol=PROTOCOL_VERSION, run=envelope.run, sender=curve.CONTROLLER, epoch=self.epoch, seq=0)
        try:
            send(self._socket, [route, *codec.pack(answer, Refused(reason=reason[:MAX_LOGGED]))])
        except zmq.ZMQError:
            return  # it is gone already
