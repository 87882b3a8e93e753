"""The controller's socket: a ROUTER that knows its peers by name and survives whatever they send.

Names are not routing ids: ROUTER assigns those at random, and a peer is known only after an envelope whose sender owns
the key of the connection. No peer can therefore send, or receive, under the name of another.

Peers are bounded (`limits`): the role determines which messages, of which size; an allowance determines the rate.
Messages beyond them are dropped and counted. A peer that keeps flooding, or that sends too much without completing a
message (`traffic`), loses its connection. A peer that does not read costs one log line a minute and the memory of
`SEND_HIGH_WATER` messages: it has one connection, and a new one ends the one before. Changes of the allow-list take
effect during the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import zmq

from starling.common.errors import ConfigError, WireError
from starling.common.net import curve
from starling.common.net.binding import bind
from starling.common.net.frames import is_readable, receive_routed, send
from starling.common.net.hub.connections import PeerConnection, PeerConnections, close_connection
from starling.common.net.hub.notices import Notices
from starling.common.net.hub.publishing import SnapshotPublisher
from starling.common.net.hub.traffic import MAX_SUBSCRIBERS, SUBSCRIBER_BYTES, TrafficGuard
from starling.common.net.limits import (
    DEFAULT_RATE_LIMITS,
    MAX_BYTES,
    MAX_FRAMES,
    MIN_BYTES,
    PeerAllowance,
    RateLimits,
    RoleRules,
    rules_of,
)
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
    ReportFault,
    RequestSettings,
    RoleSettings,
    Up,
)

log = structlog.get_logger(__name__)

MAX_BATCH = 256
"""Maximum number of messages of one `poll`, so that a flood cannot delay the controller's clock."""
LARGE_BYTES: Final = 16 << 10
"""A message of more bytes, without its buffers, takes long enough to decode to be timed."""
MAX_LOGGED = 300
"""Maximum number of characters of a logged reason, which may contain text from a peer."""
RELEASE_WITHIN_S = 0.02
"""How long a release waits for others to the same peer. It is not urgent: it only ends the resending."""
MAX_RELEASES = 64
"""Releases to one peer that are sent at once."""
LOOK_EVERY_S = 0.05
"""How long `poll` waits at a time, and how often it checks for closed connections."""
RELOAD_EVERY_S = 0.25
"""How often the allow-list is checked for changes."""
SNAPSHOTS: Final = 8
"""Snapshots that wait for a subscriber of the telemetry that does not read. Each is the whole state, so that a later
one takes the place of those that it misses."""
MAX_SUBSCRIPTION_BYTES: Final = 4 << 10
"""Maximum size of what a subscriber of the telemetry sends."""
SEND_HIGH_WATER: Final = 1000
"""Messages that are queued for a peer that does not read."""
REFUSE_EVERY_S: Final = 0.1
"""How often, at most, the holder of a key is sent why it is refused."""
SETTINGS_EVERY_S: Final = 0.5
MODEL_EVERY_S: Final = 5.0
"""How often, at most, the holder of a key is sent the settings of its role, and the files of the model with them."""
WARN_EVERY_S: Final = 60.0
"""How often, at most, a peer that does not read is logged."""
MAX_WARNINGS: Final = 10_000
"""Maximum number of pairs of peer and kind of bad message that are logged."""
BACKLOG: Final = 4096
"""Connections that wait to be accepted: a fleet that lost its controller reconnects at once."""
PING_MS: Final = 10_000
SILENT_MS: Final = 60_000
"""Time without a ZeroMQ ping after which a connection is closed: the machine of the peer is gone."""
_USER: Final[Any] = b"User-Id"
"""Property of a frame: the public key of its connection, set by the authenticator."""
_RCVTIMEO: Final = int(zmq.RCVTIMEO)
_NOBLOCK: Final = int(zmq.NOBLOCK)
"""As a number for `setsockopt`: to assign `rcvtimeo` takes four times as long, and releases change it every ms."""
WRONG_KEY_EVERY_S: Final = 600.0
"""How often, at most, it is logged that services have another key of this controller."""
STRANGER: Final = "an unknown peer"
WRONG_CONTROLLER_KEY: Final = (
    "a service has another key of this controller than {key}, and cannot connect; its log names it; give it its key "
    "file of this run"
)
FAULTS: Final = frozenset({"protocol", "run", "key", "role"})
"""Kinds of bad messages that are faults of an installation, and end the peer."""


class ReceivedMessage(msgspec.Struct, frozen=True):
    """One valid message from a peer."""

    envelope: Envelope
    message: Up
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PeerDisconnected:
    """The connection of a peer closed."""

    name: str


SettingsSource = Callable[[str, bool], tuple[RoleSettings, codec.Buffers]]
"""Returns the settings of a role, if asked with the files of the model. It must not raise, nor take long."""


@dataclass(frozen=True)
class HubKeys:
    """The controller's key pair and the keys that it accepts."""

    own: curve.KeyFile
    allowed: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Folder of `allowed.json`, which is read again when it changes. None: `allowed` never changes."""


class Hub:
    """ROUTER at the controller. Not thread-safe: one thread polls and sends."""

    def __init__(
        self,
        address: str,
        run: str,
        incarnation: int,
        keys: HubKeys | None,
        *,
        telemetry: str = "",
        limits: RateLimits = DEFAULT_RATE_LIMITS,
    ) -> None:
        """Bind to `address` (``tcp://host:port``, port 0 for a free one), and telemetry to `telemetry` or a free port.

        `incarnation` must exceed that of any earlier controller of this run. Raises ConfigError if an address is taken.
        """
        self.run, self.incarnation = run, incarnation
        self.dropped: Counter[str] = Counter()
        self.num_unsent = 0
        """Messages that could not be sent, because their peers do not read."""
        self.notices = Notices()
        """Faults that an operator has to mend."""
        self._warned: set[tuple[str, str]] = set()
        self._num_wrong_keys, self._wrong_key_at = 0, float("-inf")
        """Handshakes that failed for a wrong key of this controller, and when that was logged last."""
        self.settings_source: SettingsSource | None = None
        """What a process that wants to join is told. None: such requests are dropped."""
        self._keys, self._limits = keys, limits
        self._max_bytes = dict(MAX_BYTES)
        self._peers = PeerConnections()
        self._allowances: dict[str, PeerAllowance] = {}
        self._closed: list[tuple[str, bytes]] = []
        self._releases: dict[str, dict[str, None]] = {}
        self._release_at = float("inf")
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = None
        self._allowed = curve.AllowList({}) if keys is None else curve.AllowList(keys.allowed, keys.folder)
        self._allowed.on_refusal = lambda text: self.notices.add("key", text, time.monotonic())
        if keys is not None:
            self._authenticator = curve.start_authenticator(self._context, self._allowed)
        self._socket = self._open(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.backlog = BACKLOG
        self._traffic = TrafficGuard(self._socket)
        self._publisher = self._open(zmq.PUB)
        self._publisher.maxmsgsize = MAX_SUBSCRIPTION_BYTES
        self._publisher.sndhwm = SNAPSHOTS
        self._publisher.rcvhwm = 0  # libzmq (4.3) aborts when a connection ends whose subscriptions wait for room
        self._subscribers = TrafficGuard(self._publisher, SUBSCRIBER_BYTES, MAX_SUBSCRIBERS)
        self._snapshots = SnapshotPublisher(self._publisher)
        try:
            bind(self._socket, address)
            bind(self._publisher, telemetry or address.rpartition(":")[0] + ":0")
        except ConfigError:
            self.close()
            raise
        self.address = self._last_endpoint(self._socket)
        self.telemetry_address = self._last_endpoint(self._publisher)
        self._timeout_ms, self._woken = -1, False
        self._check_at = self._reload_at = float("-inf")

    def poll(self, timeout_s: float) -> list[ReceivedMessage | PeerDisconnected]:
        """Wait up to `timeout_s` for the next event; invalid frames are counted and dropped.

        Returns one message, or nothing, or, after connections have closed, the messages that are there already and
        then the disconnected peers: their last messages count.
        """
        happened: list[ReceivedMessage | PeerDisconnected] = []
        deadline = (now := time.monotonic()) + timeout_s
        while True:
            if now >= self._check_at:
                self._check_at = now + LOOK_EVERY_S
                self._note_closed()
                self._subscribers.note_events(now)
                for guard in (self._traffic, self._subscribers):
                    guard.check(now)
                self._note_wrong_keys(now)
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
                return happened + [PeerDisconnected(name) for name, route in closed if self._peers.remove(name, route)]
            now = time.monotonic()
            if now >= deadline or self._woken:
                self._woken = False
                return happened

    def limit_messages(self, role: str, max_bytes: int) -> None:
        """Drop messages of `role` that are larger than `max_bytes`, in place of the limit before.

        A limit that is lower than a `Hello` may need, or higher than the role may have in any run, is not taken.
        """
        limit = min(MAX_BYTES[role], max(MIN_BYTES, max_bytes))
        if limit == self._max_bytes[role]:
            return
        self._max_bytes[role] = limit
        self._note_closed()
        for peer in self._peers.by_name.values():
            if peer.rules.role == role:
                self._traffic.identify(peer.descriptor, limit)

    def wake(self) -> None:
        """End a `poll` that waits, within `LOOK_EVERY_S`. From any thread."""
        self._woken = True

    def send(self, name: str, message: Down, *, cause: str = "", buffers: codec.Buffers = ()) -> bool:
        """Send to a peer. Returns False if it is not connected or not reading; its heartbeats show what it missed.

        Raises:
            WireError: `message` is larger than a message can be.
        """
        peer = self._peers.by_name.get(name)
        if peer is None:
            return False
        waiting = self._releases.get(name)
        if waiting is not None and (isinstance(message, Drain) or getattr(message, "lease", None) in waiting):
            self._send_releases(name)  # before the peer exits, or before the same lease is granted again
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
        """Send a peer the release of `leases` within `RELEASE_WITHIN_S`, together with its other releases.

        One message for each release would be a third of all messages.
        """
        if not self._releases:
            self._release_at = time.monotonic() + RELEASE_WITHIN_S
        waiting = self._releases.setdefault(name, {})
        for lease in leases:
            waiting[lease] = None
        if len(waiting) >= MAX_RELEASES:
            self._send_releases(name)

    def _note_unsent(self, peer: PeerConnection, message: Down, error: zmq.ZMQError) -> None:
        self.num_unsent += 1
        peer.num_missed += 1
        now = time.monotonic()
        if now >= peer.warn_at:
            peer.warn_at = now + WARN_EVERY_S
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
        """Publish telemetry to the subscribers; it may be lost."""
        self._snapshots.publish(payload)

    def close(self, linger_s: float = 1.0) -> None:
        """Flush the last messages for at most `linger_s`, then close everything."""
        self._traffic.close()
        self._socket.close(int(linger_s * 1000))
        can_close = self._snapshots.end()
        if can_close:
            self._subscribers.close()
            self._publisher.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()
        if can_close:
            self._context.term()

    def _open(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = codec.MAX_BUFFER_BYTES
        socket.sndhwm = SEND_HIGH_WATER
        socket.heartbeat_ivl, socket.heartbeat_timeout = PING_MS, SILENT_MS
        if self._keys is not None:
            curve.serve_with(socket, self._keys.own, curve.TELEMETRY_DOMAIN if kind == zmq.PUB else curve.ZAP_DOMAIN)
        return socket

    def _last_endpoint(self, socket: zmq.Socket[Any]) -> str:
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _next(self, timeout_s: float) -> tuple[bytes, list[bytes], zmq.Frame] | None:
        """Return the next message with its routing id, or None after `timeout_s`."""
        if timeout_s <= 0:
            return receive_routed(self._socket, _NOBLOCK, MAX_FRAMES + 1) if is_readable(self._socket) else None
        # Waiting in `recv` costs a third of a poller of two sockets; therefore closed connections are checked for
        # periodically.
        timeout_ms = int(timeout_s * 1000) + 1
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.setsockopt(_RCVTIMEO, timeout_ms)
        return receive_routed(self._socket, 0, MAX_FRAMES + 1)

    def _admit(self, route: bytes, parts: list[bytes], last: zmq.Frame) -> ReceivedMessage | None:
        size = sum(map(len, parts))
        peer = self._peers.by_route.get(route)
        allowance = self._allowance(self._owner(last) or STRANGER) if peer is None else peer.allowance
        self._traffic.deliver(int(last.get(zmq.SRCFD)) if peer is None else peer.descriptor, size, len(parts))
        if len(parts) > MAX_FRAMES:
            self._bar(route, last)
            return None
        allowance.num_messages -= 1
        allowance.num_bytes -= size
        is_within = allowance.num_messages >= 0 and allowance.num_bytes >= 0 and allowance.num_seconds >= 0
        if not is_within and not allowance.refill(time.monotonic()):
            self._throttle(allowance, size, route, last)
            return None
        if len(parts) > 1 and len(parts[1]) > LARGE_BYTES:
            begin = time.monotonic()
            arrival = self._decode(route, parts, last, peer, allowance, size)
            allowance.take_time(time.monotonic() - begin)
            return arrival
        return self._decode(route, parts, last, peer, allowance, size)

    def charge(self, name: str, seconds: float) -> None:
        """Count the time that a message of a peer has taken after `poll` returned it.

        A policy is trusted, and what it says may make work due that others have caused.
        """
        peer = self._peers.by_name.get(name)
        if peer is not None and peer.rules.role != "policy":
            peer.allowance.take_time(seconds)

    def _decode(
        self,
        route: bytes,
        parts: list[bytes],
        last: zmq.Frame,
        peer: PeerConnection | None,
        allowance: PeerAllowance,
        size: int,
    ) -> ReceivedMessage | None:
        """Return the message of these frames; an invalid one is counted and dropped."""
        buffers = tuple(parts[2:]) if len(parts) > 2 else ()
        envelope = None
        try:
            envelope = codec.unpack_envelope(parts)
            rules = self._check(envelope, last, peer)
            if size > self._max_bytes[rules.role]:
                raise rules.oversize(size, self._max_bytes[rules.role])
            message = codec.unpack_up(parts)
            if type(message) is Hello or type(message) not in rules.allowed:
                rules.check(envelope.sender, message)
            if type(message) is RequestSettings:
                self._send_settings(route, envelope, message, rules, allowance)
                return None
            if not envelope.run:
                raise WireError(f"this is run {self.run}, and the message names none", "run")
            if type(message) is ReportFault:
                self._note_fault(envelope.sender, message.reason)
                return None
        except WireError as error:
            self._drop(route, last, error)
            if envelope is not None and error.kind in FAULTS:
                self._refuse(route, envelope, str(error), allowance)
            return None
        is_new = peer is None or peer.incarnation != envelope.incarnation or peer.name != envelope.sender
        if is_new and route not in self._peers.replaced:
            self._add_peer(route, envelope, last, rules)
        if isinstance(message, Leave) and (sender := self._peers.by_name.get(envelope.sender)) is not None:
            sender.has_left = True
        return ReceivedMessage(envelope, message, buffers)

    def _check(self, envelope: Envelope, frame: zmq.Frame, peer: PeerConnection | None) -> RoleRules:
        """Return the rules of the sender. Raises WireError if the message is of another run, or of another sender."""
        sender = envelope.sender
        if envelope.protocol != PROTOCOL_VERSION:
            raise WireError(
                f"it speaks version {envelope.protocol} of the protocol, and the controller version "
                f"{PROTOCOL_VERSION}; install the same version of Starling for both",
                "protocol",
            )
        if envelope.run != self.run and envelope.run:  # `_decode` looks at messages without a run
            raise WireError(f"this is run {self.run}, not {envelope.run}", "run")
        # Checked for each message: a routing id proves no name, and the key of the connection does.
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
        """Return the owner of the key of the connection of `frame`; None for an unknown key, and without CURVE."""
        if self._keys is None:
            return None
        key: Any = frame.get(_USER)
        return self._allowed.names.get(key)

    def _allowance(self, name: str) -> PeerAllowance:
        """Return the allowance of `name`: all connections with one key share it."""
        allowance = self._allowances.get(name)
        if allowance is None:
            allowance = self._allowances[name] = PeerAllowance(self._limits, time.monotonic())
        return allowance

    def _add_peer(self, route: bytes, envelope: Envelope, frame: zmq.Frame, rules: RoleRules) -> None:
        # A new connection may reuse the descriptor of one that closed, which is therefore recorded before.
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
        before = self._peers.by_name.get(peer.name)
        self._traffic.identify(peer.descriptor, self._max_bytes[rules.role])
        self._peers.add(peer)
        if before is not None and before.route != route:
            # What waits in it for a peer that does not read would stay as long as it is open.
            if before.descriptor != peer.descriptor:
                self._traffic.replace(before.descriptor)
            self._peers.replace(before)

    def _note_closed(self) -> None:
        """Record the connections that have closed."""
        descriptors = self._traffic.note_events(time.monotonic())
        if descriptors:
            self._closed += [(peer.name, peer.route) for peer in self._peers.with_descriptors(descriptors)]
            self._peers.note_closed(descriptors)

    def _note_wrong_keys(self, now: float) -> None:
        """Report services that have another public key of this controller; no message of them can arrive."""
        num = self._traffic.num_wrong_keys + self._subscribers.num_wrong_keys
        if num == self._num_wrong_keys or self._keys is None:
            return
        self._num_wrong_keys = num
        self.notices.add("controller key", WRONG_CONTROLLER_KEY.format(key=self._keys.own.public), now)
        if now >= self._wrong_key_at + WRONG_KEY_EVERY_S:
            self._wrong_key_at = now
            log.warning("wrong_controller_key", public_key=self._keys.own.public)

    def _note_revoked(self) -> None:
        """Disconnect peers whose keys were revoked; messages that they have sent already are dropped."""
        if not self._allowed.reload():
            return
        names = self._allowed.names
        for peer in self._peers.by_name.values():
            if names.get(peer.key) != peer.name:
                close_connection(peer.descriptor, peer.address)
                self._closed.append((peer.name, peer.route))
        known = {STRANGER, *names.values()}
        self._allowances = {name: left for name, left in self._allowances.items() if name in known}

    def _note_fault(self, name: str, reason: str) -> None:
        """Show a fault that a replica reports, without making the sender a peer: one of its name may be well."""
        if self.notices.add(f"{name} fault", f"{name}: {reason}", time.monotonic()):
            log.warning("replica_fault", peer=name, reason=reason[:MAX_LOGGED])

    def _throttle(self, allowance: PeerAllowance, size: int, route: bytes, frame: zmq.Frame) -> None:
        """Drop a message of a peer that exceeds its rate limit; if it keeps doing so, close its connection."""
        allowance.refund(size)
        self.dropped["rate"] += 1
        limits, name = self._limits, self._name_of(route, frame)
        if allowance.dropped == 1:
            rates = {"messages_per_s": limits.messages_per_s, "bytes_per_s": limits.bytes_per_s}
            rates["seconds_per_s"] = limits.seconds_per_s
            log.warning("a peer exceeds its rate limit", peer=name, **rates)
        if allowance.dropped % limits.patience == 0:
            if allowance.dropped == limits.patience:
                log.warning("closed the connection of a peer that exceeds its rate limit", peer=name)
            self._peers.close(name, int(frame.get(zmq.SRCFD)))

    def _bar(self, route: bytes, frame: zmq.Frame) -> None:
        """Close the connection of a peer that sends messages of many frames, and let its key connect no more.

        A message is received as a whole, so that the time that it takes is spent before its frames can be counted.
        """
        self._drop(route, frame, WireError(f"a message of more than {MAX_FRAMES} frames is over the limit", "size"))
        if self._keys is not None:
            self._allowed.bar(str(frame.get(_USER)))
        self._peers.close(self._name_of(route, frame), int(frame.get(zmq.SRCFD)))

    def _drop(self, route: bytes, frame: zmq.Frame, error: WireError) -> None:
        self.dropped[error.kind] += 1
        warning = (self._name_of(route, frame), error.kind)
        if error.kind in FAULTS:
            self.notices.add(" ".join(warning), f"{warning[0]} is refused: {error}", time.monotonic())
        if warning not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(warning)
            log.warning("dropped a message", peer=warning[0], kind=error.kind, reason=str(error)[:MAX_LOGGED])

    def _name_of(self, route: bytes, frame: zmq.Frame) -> str:
        peer = self._peers.by_route.get(route)
        return self._owner(frame) or (peer.name if peer is not None else STRANGER)

    def _send_settings(
        self,
        route: bytes,
        envelope: Envelope,
        message: RequestSettings,
        rules: RoleRules,
        allowance: PeerAllowance,
    ) -> None:
        """Send the settings of its role to a process that has a key, without making it a peer.

        A peer of its name keeps its connection. The bytes of files are those of the source: what waits for a process
        that does not read takes no memory of its own.
        """
        now = time.monotonic()
        interval_s = MODEL_EVERY_S if message.with_model else SETTINGS_EVERY_S
        asked_at = allowance.asked_at.get(message.with_model, float("-inf"))
        if self.settings_source is None or now < asked_at + interval_s:
            return
        allowance.asked_at[message.with_model] = now
        settings, buffers = self.settings_source(rules.role, message.with_model)
        settings = msgspec.structs.replace(settings, connected=envelope.sender in self._peers.by_name)
        answer = Envelope(
            protocol=PROTOCOL_VERSION, run="", sender=curve.CONTROLLER, incarnation=self.incarnation, seq=0
        )
        try:
            send(self._socket, [route, *codec.pack(answer, settings, buffers)])
        except zmq.ZMQError:
            return  # it is gone already
        allowance.take_time(time.monotonic() - now)

    def _refuse(self, route: bytes, envelope: Envelope, reason: str, allowance: PeerAllowance) -> None:
        """Send a peer that can never become a member the reason, in an envelope that it accepts as its own run's.

        The holder of a key gets it seldom: it may read nothing, over any number of connections.
        """
        now = time.monotonic()
        if self._keys is not None and now < allowance.refused_at + REFUSE_EVERY_S:
            return
        allowance.refused_at = now
        answer = Envelope(
            protocol=PROTOCOL_VERSION, run=envelope.run, sender=curve.CONTROLLER, incarnation=self.incarnation, seq=0
        )
        try:
            send(self._socket, [route, *codec.pack(answer, Refused(reason=reason[:MAX_LOGGED]))])
        except zmq.ZMQError:
            return  # it is gone already
