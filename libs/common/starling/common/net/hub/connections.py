"""Peers of a ROUTER by connection, and closing a single connection: ZeroMQ has no call for that.

ZeroMQ's own threads may close a descriptor, and reuse its number for another connection, at any moment. A duplicate of
the descriptor stays valid, and the peer's address shows whether it is still the intended connection.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from starling.common.net.limits import PeerAllowance, RoleRules

MAX_REPLACED: Final = 100_000
"""Replaced connections that are remembered: far more than close while a message of theirs waits to be received."""


_spare: Final[list[int]] = []


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket on a duplicate of `descriptor`. Raises OSError: it is closed, or by now that of a file."""
    duplicate = _duplicate_descriptor(descriptor)
    try:
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        with connection:
            yield connection
    finally:
        keep_spare()


def _duplicate_descriptor(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno != errno.EMFILE or not _spare:
            raise
        os.close(_spare.pop())
        return os.dup(descriptor)


def keep_spare() -> None:
    """Keep a descriptor in reserve: connections must also be closed when strangers have opened as many as there are."""
    if not _spare:
        with suppress(OSError):
            _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def peer_address(descriptor: int) -> object | None:
    """Return the address of the peer of the connection `descriptor`; None if it is closed."""
    try:
        with _duplicate(descriptor) as connection:
            address: object = connection.getpeername()
            return address
    except OSError:
        return None


def close_connection(descriptor: int, address: object | None) -> bool:
    """Shut the connection `descriptor` down, if its peer still has `address`; ZeroMQ then closes it."""
    try:
        with _duplicate(descriptor) as connection:
            if address is None or connection.getpeername() != address:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False


@dataclass(slots=True, eq=False)
class PeerConnection:
    """A peer that has sent a valid message, and the connection that it used last."""

    name: str
    route: bytes
    """Routing id of the connection."""
    incarnation: int
    key: str
    """Public key of the connection; empty without CURVE."""
    descriptor: int
    rules: RoleRules
    allowance: PeerAllowance
    address: object | None = None
    seq_out: int = 0
    num_missed: int = 0
    """Messages that could not be sent because it did not read."""
    has_left: bool = False
    """It has sent `Leave`, and forgotten its leases."""
    warn_at: float = float("-inf")
    """When the next warning about it may be logged, in monotonic seconds."""


class PeerConnections:
    """Peers by name and by connection. Each name has one connection, and each connection one name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PeerConnection] = {}
        self.by_route: dict[bytes, PeerConnection] = {}
        self._by_descriptor: dict[int, PeerConnection] = {}
        """Peers by connection, until its end is noted."""
        self.replaced: dict[bytes, None] = {}
        """Routing ids of connections in whose place their peers use others, the newest last. What still arrives over
        one does not make it the peer's connection again."""

    def add(self, peer: PeerConnection) -> None:
        """Add a peer, in place of the one that had its name or its connection."""
        for before in (self.by_name.get(peer.name), self.by_route.get(peer.route)):
            if before is not None:
                self.remove(before.name, before.route)
        peer.address = peer_address(peer.descriptor)
        other = self._by_descriptor.get(peer.descriptor)
        if other is not None and other.route != peer.route:
            # One of the two has closed, and what it had sent is received only now. It is not known which one: neither
            # may close the connection of the other.
            other.address = peer.address = None
        self._by_descriptor[peer.descriptor] = peer
        self.by_name[peer.name] = self.by_route[peer.route] = peer

    def replace(self, before: PeerConnection) -> None:
        """Close the connection that a peer used before."""
        close_connection(before.descriptor, before.address)
        self.replaced[before.route] = None
        while len(self.replaced) > MAX_REPLACED:
            del self.replaced[next(iter(self.replaced))]

    def remove(self, name: str, route: bytes) -> bool:
        """Remove a peer. Returns False if it has reconnected meanwhile."""
        peer = self.by_name.get(name)
        if peer is None or peer.route != route:
            return False
        del self.by_name[name]
        self.by_route.pop(route, None)
        if self._by_descriptor.get(peer.descriptor) is peer:
            del self._by_descriptor[peer.descriptor]
        return True

    def with_descriptors(self, descriptors: Container[int]) -> list[PeerConnection]:
        """Return the peers whose connection has one of these descriptors."""
        return [peer for peer in self.by_name.values() if peer.descriptor in descriptors]

    def note_closed(self, descriptors: Iterable[int]) -> None:
        """Note that these connections have closed: their descriptors may be those of others from now on."""
        for descriptor in descriptors:
            self._by_descriptor.pop(descriptor, None)

    def close(self, name: str, descriptor: int) -> None:
        """Close the connection `descriptor`, unless it belongs to another peer than `name` by now."""
        holders = self.with_descriptors((descriptor,))
        if not holders:  # a peer that has sent no valid message yet
            close_connection(descriptor, peer_address(descriptor))
        for peer in holders:
            if peer.name == name:
                close_connection(descriptor, peer.address)
