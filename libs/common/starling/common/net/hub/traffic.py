"""Bytes that connections have sent and that no message has delivered yet, and the end of those with too many.

ZeroMQ hands a message over when its last frame is there, bounds the size of a frame and not their number, and keeps one
limit for all connections of a socket. A peer could therefore fill the memory with a message that it never completes,
before its role's limit is known. The kernel counts the bytes that each connection has received; what a connection has
sent beyond the messages that it delivered is in ZeroMQ's memory.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.net.frames import receive
from starling.common.net.hub.connections import close_connection, keep_spare, peer_address

log = structlog.get_logger(__name__)

_MIB: Final = 1 << 20

FRAME_BYTES: Final = 42
"""Most that CURVE and ZeroMQ add to a frame: `MESSAGE` (8), nonce (8), box (16), flags (1), and the length (9)."""
QUEUED_BYTES: Final = 64 * _MIB
"""Undelivered bytes of a known peer beyond the limit of one message: further messages, while the controller works."""
MIN_QUEUED_BYTES: Final = 16 * _MIB
"""The same of a peer with small messages: each of a million empty frames takes 42 bytes."""
FIRST_BYTES: Final = 96 * _MIB
"""Undelivered bytes of a connection before its first valid message, a `Hello` with a layout of up to 64 MiB. 2.4
million empty frames have as many, and take the controller about a second."""
ALL_FIRST_BYTES: Final = 512 * _MIB
"""Undelivered bytes of all such connections together."""
SUBSCRIBER_BYTES: Final = 16 << 10
"""Bytes that a subscriber of the telemetry may send besides pings: its handshake, and one subscription. libzmq uses
some 50 bytes of memory for each byte of a topic."""
MAX_SUBSCRIBERS: Final = 256
"""Connections to the telemetry: with any number, a subscriber could use up the files that replicas need to connect."""
PING_BYTES_PER_S: Final = 16.0
"""Bytes that a connection may send in no message: pings and their answers."""
CHECKED_AT_ONCE: Final = 256
"""Connections that one look checks, in a millisecond; 10,000 take two seconds."""
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WRONG_KEY: Final = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
"""Why a handshake fails whose sender knows another public key of this end."""
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""Offset of `tcpi_bytes_received` in the kernel's `struct tcp_info` (Linux 4.1)."""


@dataclass(slots=True, eq=False)
class ConnectionTraffic:
    """Bytes of one connection."""

    descriptor: int
    address: object | None
    line: socket.socket
    """ZeroMQ's own descriptor, never closed here."""
    checked_at: float
    limit: int = 0
    """Undelivered bytes of a known peer; 0 before its first valid message."""
    delivered: int = 0
    """Bytes of its messages since the last check, with at least what ZeroMQ and CURVE added."""
    received: int = 0
    undelivered: float = 0.0

    def measure(self, now: float) -> None:
        """Compute `undelivered` from the kernel's count."""
        try:
            info = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        except OSError:
            return  # it is closing
        if len(info) < _RECEIVED_AT + _RECEIVED.size:
            return  # an older kernel
        (received,) = _RECEIVED.unpack_from(info, _RECEIVED_AT)
        pings = PING_BYTES_PER_S * (now - self.checked_at)
        self.undelivered = max(0.0, self.undelivered + received - self.received - self.delivered - pings)
        self.received, self.delivered, self.checked_at = received, 0, now


def _monitor(monitored: zmq.Socket[Any]) -> zmq.Socket[Any]:
    """Return a socket with the events of another one, however many wait.

    With a limit, libzmq would wait for room with a lock that it also needs to end the monitoring.
    """
    address = f"inproc://connections-{id(monitored)}"
    monitored.monitor(address, _EVENTS)
    monitor: zmq.Socket[Any] = monitored.context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


class TrafficGuard:
    """Connections of one socket, with limits on their undelivered bytes. Not thread-safe.

    Args:
        monitored: a socket that is not bound yet.
        fixed_limit: limit for each connection of a socket that delivers no messages; 0 for the limits by role.
        most: connections that may be open at a time, beyond which new ones are closed; 0 for any number.
    """

    def __init__(self, monitored: zmq.Socket[Any], fixed_limit: int = 0, most: int = 0) -> None:
        self._socket, self._fixed_limit, self._most = monitored, fixed_limit, most
        keep_spare()
        self.monitor = _monitor(monitored)
        """Readable when connections have been opened or closed."""
        self._connections: dict[int, ConnectionTraffic] = {}
        self._unknown: dict[int, ConnectionTraffic] = {}
        """Those without a limit of their own."""
        self._due: deque[ConnectionTraffic] = deque()
        self.num_closed = 0
        """Connections that exceeded their limits."""
        self.num_wrong_keys = 0
        """Handshakes of peers that know another public key of this socket."""

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def note_events(self, now: float) -> set[int]:
        """Take note of new and closed connections; return the descriptors of the closed ones."""
        closed = set[int]()
        while (received := receive(self.monitor)) is not None:
            event = parse_monitor_message(received[0])
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # its value is a reason, and no descriptor
                self.num_wrong_keys += event["value"] == _WRONG_KEY
                continue
            descriptor = int(event["value"])
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                closed.add(descriptor)
            elif sys.platform == "linux":
                self._add(descriptor, now)
        return closed

    def is_open(self, descriptor: int) -> bool:
        """Return whether there is a connection `descriptor`, as far as is noted; outside of Linux none is."""
        return descriptor in self._connections or sys.platform != "linux"

    def deliver(self, descriptor: int, size: int, num_frames: int) -> None:
        """Count a message that a connection has delivered."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.delivered += size + FRAME_BYTES * num_frames

    def identify(self, descriptor: int, max_bytes: int) -> None:
        """Set the limit of a connection whose peer is known by now, and may send messages of `max_bytes`."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.limit = max_bytes + min(QUEUED_BYTES, max(max_bytes, MIN_QUEUED_BYTES))
            self._unknown.pop(descriptor, None)

    def replace(self, descriptor: int) -> None:
        """Count a connection, in whose place its peer uses another one by now, among those without a known peer."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.limit = 0
            self._unknown[descriptor] = connection

    def check(self, now: float) -> None:
        """Measure the next connections, and close those that exceed their limits."""
        for _ in range(min(CHECKED_AT_ONCE, len(self._due))):
            connection = self._due.popleft()
            if self._connections.get(connection.descriptor) is not connection:
                continue
            self._due.append(connection)
            connection.measure(now)
            if connection.undelivered > (connection.limit or FIRST_BYTES):
                self._close(connection)
        while sum(one.undelivered for one in self._unknown.values()) > ALL_FIRST_BYTES:
            if not self._close(max(self._unknown.values(), key=lambda one: one.undelivered)):
                break

    def close(self) -> None:
        """End the monitoring."""
        self._socket.disable_monitor()
        self.monitor.close(0)
        for descriptor in tuple(self._connections):
            self._forget(descriptor)

    def _add(self, descriptor: int, now: float) -> None:
        address = peer_address(descriptor)
        if address is None:  # it has closed again
            return
        if 0 < self._most <= len(self._connections):
            self.num_closed += 1
            if self.num_closed & (self.num_closed - 1) == 0:
                log.warning("closed a connection beyond the limit", address=address, limit=self._most)
            close_connection(descriptor, address)
            return
        try:
            line = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
        except OSError:  # it has closed since, and its number may be that of a file by now
            return
        connection = ConnectionTraffic(descriptor, address, line, checked_at=now, limit=self._fixed_limit)
        self._connections[descriptor] = connection
        self._due.append(connection)
        if not connection.limit:
            self._unknown[descriptor] = connection

    def _forget(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        self._unknown.pop(descriptor, None)
        if connection is not None:
            connection.line.detach()

    def _close(self, connection: ConnectionTraffic) -> bool:
        """Close a connection; return whether that was possible, else the next look tries again."""
        if not close_connection(connection.descriptor, connection.address):
            return False
        self.num_closed += 1
        if self.num_closed & (self.num_closed - 1) == 0:  # a log line for the first, the second, the fourth, ...
            log.warning(
                "closed a connection with too many undelivered bytes",
                address=connection.address,
                undelivered_mb=int(connection.undelivered) >> 20,
                num_closed=self.num_closed,
            )
        self._forget(connection.descriptor)
        return True
