"""Connections by descriptor, whose numbers ZeroMQ uses again while messages of earlier connections wait."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from starling.common.net.hub.connections import (
    PeerConnection,
    PeerConnections,
    close_connection,
    keep_spare,
    peer_address,
)
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


def test_connection_is_closed_although_the_process_can_open_no_file(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """A stranger can open as many connections as the process may have files."""
    ours = connection[1].fileno()
    keep_spare()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, before[1]))
        with suppress(OSError):
            while True:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        for _ in range(2):
            address = peer_address(ours)
            assert address is not None
        assert close_connection(ours, address)
    assert not is_open(connection)
