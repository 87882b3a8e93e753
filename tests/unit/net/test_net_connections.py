"""Connections by descriptor, whose numbers ZeroMQ uses again while messages of earlier connections wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from starling.common.net.hub.connections import PeerConnection, PeerConnections, close_connection
from starling.common.net.limits import DEFAULT_RATE_LIMITS, PeerAllowance, rules_of


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: that of the peer, and the hub's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            theirs.settimeout(10.0)
            yield theirs, ours


def peer(name: str, route: bytes, ours: socket.socket) -> PeerConnection:
    allowance = PeerAllowance(DEFAULT_RATE_LIMITS, 0.0)
    return PeerConnection(name, route, 1, "", ours.fileno(), rules_of(name), allowance)


def is_open(connection: tuple[socket.socket, socket.socket]) -> bool:
    theirs, ours = connection
    try:
        ours.send(b"x")
    except OSError:
        return False
    return theirs.recv(1) == b"x"


@pytest.mark.parametrize("names", [("rollout-9", "rollout-0"), ("rollout-0", "rollout-9")])
def test_peer_whose_message_arrives_late_cannot_end_the_connection_that_has_its_descriptor(
    names: tuple[str, str], connection: tuple[socket.socket, socket.socket]
) -> None:
    """`rollout-9` has sent a message and closed; its descriptor is that of `rollout-0` before the message arrives."""
    peers = PeerConnections()
    for name in names:
        peers.add(peer(name, name.encode(), connection[1]))
    peers.replace(peers.by_name["rollout-9"])  # it has connected again
    assert is_open(connection)


def test_descriptor_of_a_connection_whose_end_was_noted_is_that_of_the_next_one(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    peers = PeerConnections()
    peers.add(peer("rollout-9", b"9", connection[1]))
    peers.note_closed({connection[1].fileno()})
    present = peer("rollout-0", b"0", connection[1])
    peers.add(present)
    assert peers.remove("rollout-9", b"9")
    assert close_connection(present.descriptor, present.address)
    assert not is_open(connection)
