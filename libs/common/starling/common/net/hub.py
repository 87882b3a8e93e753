"""The controller's socket: a ROUTER that knows its peers by name and never stops for what they send.

Names are not routing ids: ROUTER assigns those at random, and a peer is known only once an envelope has come whose
sender the connection's own key stands for. Nobody can therefore speak, or receive, under another's name.

What a peer may do is bounded (`limits`): its role says which messages, how large; an allowance says how many. What is
beyond is dropped and counted, and who goes on floods no longer: its connection is cut. Whoever does not read costs one
log line a minute and the memory of `SEND_HIGH_WATER` messages. The allow-list is looked at again while the run goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import ConfigError, WireError
from starling.common.net import curve
from starling.common.net.connections import PeerConnection, PeerConnections, cut
from starling.common.net.frames import receive, send
from starling.common.net.limits import DEFAULT_RATE_LIMITS, PeerAllowance, RateLimits, RoleRules, rules_of
from starling.common.wire import codec
from starling.common.wire.messages import (
    PROTOCOL_VERSION,
    Down,
    Drain,
    Envelope,
    Hello,
    Leave,
    Refused,
    ReleaseLeases,
    Up,
)

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
RELOAD_EVERY_S = 0.25
"""How often the allow-list is looked at."""
SEND_HIGH_WATER: Final = 1000
"""Messages that wait for one peer that does not read."""
COMPLAIN_EVERY_S: Final = 60.0
"""How often, at most, a peer that does not read gets a line in the log."""
MAX_TOLD: Final = 10_000
"""So many kinds of bad messages, over all peers, get a line in the log."""
BIND_WITHIN_S = 1.0
"""How long to try for an address that is in use: the last owner's may close at this moment."""
BACKLOG: Final = 4096
"""Connections that wait to be accepted: a fleet that lost its controller comes back at once."""
PING_MS: Final = 10_000
SILENT_MS: Final = 60_000
"""Who sends no sign of life on ZeroMQ's own level for so long has no connection any more: its machine is gone."""
_USER: Final[Any] = b"User-Id"
"""The public key of a connection, as the authenticator has found it."""
STRANGER: Final = "an unknown peer"


class ReceivedMessage(msgspec.Struct, frozen=True):
    """One valid message from a peer."""

    envelope: Envelope
    message: Up
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PeerDisconnected:
    """The connection of a peer closed."""

    name: str


@dataclass(frozen=True)
class HubKeys:
    """The controller's key pair and whom it lets in."""

    own: curve.KeyFile
    allowed: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Where `allowed.json` is: it is read again whenever it changes. None: `allowed` holds for good."""


class Hub:
    """ROUTER at the controller. Not thread-safe: one thread polls and sends."""

    def __init__(
        self,
        bind: str,
        run: str,
        incarnation: int,
        keys: HubKeys | None,
        *,
        telemetry: str = "",
        limits: RateLimits = DEFAULT_RATE_LIMITS,
    ) -> None:
        """Bind to `bind` (``tcp://host:port``, port 0 for a free one), the telemetry to `telemetry` or beside it.

        `incarnation` must exceed that of any earlier controller of this run. Raises ConfigError if an address is taken.
        """
        self.run, self.incarnation = run, incarnation
        self.dropped: Counter[str] = Counter()
        self.num_unsent = 0
        """Messages for peers that do not read."""
        self._told: set[tuple[str, str]] = set()
        self._keys, self._limits = keys, limits
        self._peers = PeerConnections()
        self._allowances: dict[str, PeerAllowance] = {}
        self._closed: list[tuple[str, bytes]] = []
        self._releases: dict[str, dict[str, None]] = {}
        self._release_at = float("inf")
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = None
        self._allowed = curve.AllowList({}) if keys is None else curve.AllowList(keys.allowed, keys.folder)
        if keys is not None:
            self._authenticator = curve.start_authenticator(self._context, self._allowed)
        self._socket = self._open(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.backlog = BACKLOG
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._publisher = self._open(zmq.PUB)
        self._bind(self._socket, bind)
        self._bind(self._publisher, telemetry or bind.rpartition(":")[0] + ":0")
        self.address = self._last_endpoint(self._socket)
        self.telemetry_address = self._last_endpoint(self._publisher)
        self._patience_ms, self._awoken = -1, False
        self._look_at = self._reload_at = float("-inf")

    def poll(self, timeout_s: float) -> list[ReceivedMessage | PeerDisconnected]:
        """Wait up to `timeout_s` and return what happened first; invalid frames are counted and dropped.

        That is one message, or nothing, or, after connections have closed, the messages that are there already and
        then the peers that are lost: what a peer said last counts.
        """
        happened: list[ReceivedMessage | PeerDisconnected] = []
        deadline = (now := time.monotonic()) + timeout_s
        while True:
            if now >= self._look_at:
                self._look_at = now + LOOK_EVERY_S
                self._note_closed()
                if now >= self._reload_at:
                    self._reload_at = now + RELOAD_EVERY_S
                    self._note_revoked()
            if now >= self._release_at:
                self._send_releases(*self._releases)
            until = deadline if deadline < self._release_at else self._release_at
            received = self._next(0.0 if self._closed else min(until - now, LOOK_EVERY_S))
            arrival = self._admit(*received) if received is not None else None
            if arrival is not None:
                happened.append(arrival)
            if not self._closed and happened:
                return happened
            if self._closed and (received is None or len(happened) == MAX_BATCH):
                closed, self._closed = self._closed, []
                return happened + [PeerDisconnected(name) for name, route in closed if self._peers.forget(name, route)]
            now = time.monotonic()
            if now >= deadline or self._awoken:
                self._awoken = False
                return happened

    def wake(self) -> None:
        """End a `poll` that waits, within `LOOK_EVERY_S`. From any thread."""
        self._awoken = True

    def send(self, name: str, message: Down, *, cause: str = "", buffers: codec.Buffers = ()) -> bool:
        """Send to a peer. Returns False when it is not connected or not reading; its heartbeats will heal that."""
        peer = self._peers.by_name.get(name)
        if peer is None:
            return False
        waiting = self._releases.get(name)
        if waiting is not None and (isinstance(message, Drain) or getattr(message, "lease", None) in waiting):
            self._send_releases(name)  # it goes at once; or it is granted anew, and must not be forgotten thereafter
        peer.seq_out += 1
        envelope = Envelope(
            protocol=PROTOCOL_VERSION,
            run=self.run,
            sender=curve.CONTROLLER,
            incarnation=self.incarnation,
            seq=peer.seq_out,
            cause=cause,
        )
        try:
            send(self._socket, [peer.route, *codec.pack(envelope, message, buffers)])
        except zmq.ZMQError as error:
            self._note_unsent(peer, message, error)
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

    def _note_unsent(self, peer: PeerConnection, message: Down, error: zmq.ZMQError) -> None:
        self.num_unsent += 1
        peer.num_missed += 1
        now = time.monotonic()
        if now >= peer.complain_at:
            peer.complain_at = now + COMPLAIN_EVERY_S
            kind, reason = type(message).__name__, error.strerror
            log.warning("cannot send", peer=peer.name, message=kind, num_missed=peer.num_missed, error=reason)

    def _send_releases(self, *names: str) -> None:
        for name in names:
            leases, peer = self._releases.pop(name), self._peers.by_name.get(name)
            if peer is not None and not peer.has_left:
                self.send(name, ReleaseLeases(leases=tuple(leases)))
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
        socket.sndhwm = SEND_HIGH_WATER
        socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, SILENT_MS
        if self._keys is not None:
            curve.serve_with(socket, self._keys.own)
        return socket

    def _bind(self, socket: zmq.Socket[Any], address: str) -> None:
        deadline = time.monotonic() + BIND_WITHIN_S
        while True:
            try:
                socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                self.close()
                raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another port, or 0") from None

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

    def _admit(self, frames: list[bytes], last: zmq.Frame) -> ReceivedMessage | None:
        route, *parts = frames
        buffers = tuple(parts[2:]) if len(parts) > 2 else ()
        size = sum(map(len, parts))
        peer = self._peers.by_route.get(route)
        allowance = self._allowance(self._owner(last) or STRANGER) if peer is None else peer.allowance
        allowance.num_messages -= 1
        allowance.num_bytes -= size
        if (allowance.num_messages < 0 or allowance.num_bytes < 0) and not allowance.refill(time.monotonic()):
            self._throttle(allowance, size, route, last)
            return None
        envelope = None
        try:
            envelope = codec.unpack_envelope(parts)
            rules = self._check(envelope, last, peer)
            if size > rules.max_bytes:
                raise rules.oversize(size)
            message = codec.unpack_up(parts)
            if type(message) is Hello or type(message) not in rules.may_say:
                rules.check(envelope.sender, message)
        except WireError as error:
            self._drop(route, last, error)
            if envelope is not None and error.kind in ("protocol", "run", "key", "role"):
                self._refuse(route, envelope, str(error))
            return None
        if peer is None or peer.incarnation != envelope.incarnation or peer.name != envelope.sender:
            self._remember(route, envelope, last, rules)
        if isinstance(message, Leave):
            self._peers.by_name[envelope.sender].has_left = True
        return ReceivedMessage(envelope, message, buffers)

    def _check(self, envelope: Envelope, frame: zmq.Frame, peer: PeerConnection | None) -> RoleRules:
        """Return what the sender may say. Raises WireError when this is not for us, or not from whom it says."""
        sender = envelope.sender
        if envelope.protocol != PROTOCOL_VERSION:
            raise WireError(f"protocol {envelope.protocol} instead of {PROTOCOL_VERSION}", "protocol")
        if envelope.run != self.run:
            raise WireError(f"this is run {self.run}, not {envelope.run}", "run")
        # Asked for each message: a ROUTER takes from its peers what they want to be called, a key cannot be taken.
        if self._keys is not None and self._owner(frame) != sender:
            raise WireError(f"{sender} does not own the key of its connection", "key")
        if peer is None or peer.name != sender:
            peer = self._peers.by_name.get(sender)
        if peer is None:
            return rules_of(sender)
        if envelope.incarnation < peer.incarnation:
            raise WireError(f"{sender} is an older incarnation", "epoch")
        return peer.rules

    def _owner(self, frame: zmq.Frame) -> str | None:
        """Return whose key the connection of `frame` has; None for nobody's (any more), and without CURVE."""
        if self._keys is None:
            return None
        key: Any = frame.get(_USER)
        return self._allowed.names.get(key)

    def _allowance(self, name: str) -> PeerAllowance:
        """Return what is left to `name`: all connections with one key share it."""
        allowance = self._allowances.get(name)
        if allowance is None:
            allowance = self._allowances[name] = PeerAllowance(self._limits, time.monotonic())
        return allowance

    def _remember(self, route: bytes, envelope: Envelope, frame: zmq.Frame, rules: RoleRules) -> None:
        # A new connection may have the descriptor of one that closed, which is therefore noted before.
        self._note_closed()
        now = time.monotonic()
        peer = PeerConnection(
            name=envelope.sender,
            route=route,
            incarnation=envelope.incarnation,
            key="" if self._keys is None else str(frame.get(_USER)),
            descriptor=int(frame.get(zmq.SRCFD)),
            rules=rules,
            allowance=PeerAllowance(self._limits, now) if self._keys is None else self._allowance(envelope.sender),
        )
        self._peers.remember(peer)

    def _note_closed(self) -> None:
        """Take in which connections have closed."""
        descriptors = set()
        while (received := receive(self._monitor)) is not None:
            descriptors.add(int(parse_monitor_message(received[0])["value"]))
        if descriptors:
            self._closed += [(peer.name, peer.route) for peer in self._peers.on(descriptors)]

    def _note_revoked(self) -> None:
        """Drop whoever's key is no longer allowed; what they have sent already is not heard any more."""
        if not self._allowed.reload():
            return
        names = self._allowed.names
        for peer in self._peers.by_name.values():
            if names.get(peer.key) != peer.name:
                cut(peer.descriptor, peer.address)
                self._closed.append((peer.name, peer.route))
        known = {STRANGER, *names.values()}
        self._allowances = {name: left for name, left in self._allowances.items() if name in known}

    def _throttle(self, allowance: PeerAllowance, size: int, route: bytes, frame: zmq.Frame) -> None:
        """Drop a message of a peer that says too much; when it goes on and on, cut its connection."""
        allowance.give_back(size)
        self.dropped["rate"] += 1
        limits, name = self._limits, self._who(route, frame)
        if allowance.dropped == 1:
            rates = {"messages_per_s": limits.messages_per_s, "bytes_per_s": limits.bytes_per_s}
            log.warning("a peer says too much", peer=name, **rates)
        if allowance.dropped % limits.patience == 0:
            if allowance.dropped == limits.patience:
                log.warning("cut the connection of a peer that goes on to say too much", peer=name)
            self._peers.cut(name, int(frame.get(zmq.SRCFD)))

    def _drop(self, route: bytes, frame: zmq.Frame, error: WireError) -> None:
        self.dropped[error.kind] += 1
        told = (self._who(route, frame), error.kind)
        if told not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(told)
            log.warning("dropped a message", peer=told[0], kind=error.kind, reason=str(error)[:MAX_LOGGED])

    def _who(self, route: bytes, frame: zmq.Frame) -> str:
        peer = self._peers.by_route.get(route)
        return self._owner(frame) or (peer.name if peer is not None else STRANGER)

    def _refuse(self, route: bytes, envelope: Envelope, reason: str) -> None:
        """Tell a peer that can never become a member why, in an envelope that it takes for its own run's."""
        answer = Envelope(
            protocol=PROTOCOL_VERSION, run=envelope.run, sender=curve.CONTROLLER, incarnation=self.incarnation, seq=0
        )
        try:
            send(self._socket, [route, *codec.pack(answer, Refused(reason=reason[:MAX_LOGGED]))])
        except zmq.ZMQError:
            return  # it is gone already
