"""Requests of policy replicas for the state of another one, through its store."""

from __future__ import annotations

import queue

import pytest

from starling.common.errors import ConfigError
from starling.policy.shell.peers import PeerServer, StateRequest, request_state

WAIT_S = 60.0


def test_requests_of_several_replicas_arrive_in_their_order() -> None:
    received = queue.Queue[StateRequest]()
    server = PeerServer("127.0.0.1", received.put)
    asked = [StateRequest(f"127.0.0.1:{5000 + number}", f"lease-{number}") for number in range(3)]
    for one in asked:
        request_state(server.address, one.peer, one.group)
    assert [received.get(timeout=WAIT_S) for _ in asked] == asked


def test_replica_that_has_ended_cannot_be_asked() -> None:
    with pytest.raises((OSError, RuntimeError)):
        request_state("127.0.0.1:1", "127.0.0.1:5000", "lease")


def test_server_at_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1 .*; give network\.host an address of this"):
        PeerServer("192.0.2.1", lambda _: None)
