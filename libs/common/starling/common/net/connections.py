"""Who is at the other end of each connection of a ROUTER, and how to cut one: ZeroMQ has no call for that.

A descriptor may be closed, and its number be given to another connection, at any moment: that happens in ZeroMQ's own
threads. A copy stays what it is, so whoever is to be cut off is known again by their address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container
from dataclasses import dataclass

from starling.common.net.limits import PeerAllowance, RoleRules


def far_end(descriptor: int) -> object | None:
    """Return the address at the other end of the connection `descriptor`; None when it is no connection any more."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            address: object = connection.getpeername()
            return address
    except OSError:
        return None


def cut(descriptor: int, address: object | None) -> bool:
    """Shut the connection `descriptor` down, if `address` is still at its other end; ZeroMQ then closes it."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if address is None or connection.getpeername() != address:
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False


@dataclass(slots=True, eq=False)
class PeerConnection:
    """Whoever has said something valid, and the connection over which they did last."""

    name: str
    route: bytes
    """What ROUTER calls the connection."""
    incarnation: int
    key: str
    """Of the connection; empty without CURVE."""
    descriptor: int
    rules: RoleRules
    allowance: PeerAllowance
    address: object | None = None
    seq_out: int = 0
    num_missed: int = 0
    """Messages that could not be sent, because it did not read."""
    has_left: bool = False
    """It has said farewell, and forgotten its leases."""
    complain_at: float = float("-inf")
    """When the log may say so again, in monotonic seconds."""


class PeerConnections:
    """The peers by name and by connection. One name has one connection, and one connection one name."""

    def __init__(self) -> None:
        self.by_name: dict[str, PeerConnection] = {}
        self.by_route: dict[bytes, PeerConnection] = {}

    def remember(self, peer: PeerConnection) -> None:
        """Note a peer, in place of the one that had its name or its connection."""
        for before in (self.by_name.get(peer.name), self.by_route.get(peer.route)):
            if before is not None:
                self.forget(before.name, before.route)
        peer.address = far_end(peer.descriptor)
        self.by_name[peer.name] = self.by_route[peer.route] = peer

    def forget(self, name: str, route: bytes) -> bool:
        """Forget a peer. Returns False when it has come back over another connection meanwhile."""
        peer = self.by_name.get(name)
        if peer is None or peer.route != route:
            return False
        del self.by_name[name]
        self.by_route.pop(route, None)
        return True

    def on(self, descriptors: Container[int]) -> list[PeerConnection]:
        """Return the peers whose connection has one of these descriptors."""
        return [peer for peer in self.by_name.values() if peer.descriptor in descriptors]

    def cut(self, name: str, descriptor: int) -> None:
        """Cut the connection with `descriptor`, unless it is another's than `name`'s by now."""
        holders = self.on((descriptor,))
        if not holders:  # somebody who has said nothing valid yet
            cut(descriptor, far_end(descriptor))
        for peer in holders:
            if peer.name == name:
                cut(descriptor, peer.address)
