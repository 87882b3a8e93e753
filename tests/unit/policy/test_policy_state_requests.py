"""Requests of policy replicas for the state of another one, through its store."""

from __future__ import annotations

import queue
import time

import pytest

from starling.common.errors import ConfigError
from starling.policy.shell.peers import MAX_REQUESTS, PeerServer, StateRequest, request_state
from starling.policy.train.parallel.replicas.peers import connect_store

WAIT_S = 60.0
PEER, GROUP = "127.0.0.1:5000", "adopt:3:1.7"


def push(server: PeerServer, *entries: bytes | str) -> None:
    """Add entries to the requests of a server, as any process can that reaches its port."""
    store = connect_store(server.address, WAIT_S)
    for entry in entries:
        store.queue_push("state_requests", entry)


def test_requests_of_several_replicas_arrive_in_their_order() -> None:
    received = queue.Queue[StateRequest]()
    server = PeerServer("127.0.0.1")  # they may come before it listens
    asked = [StateRequest(f"127.0.0.1:{5000 + number}", f"adopt:{number}:1.7") for number in range(3)]
    for one in asked:
        request_state(server.address, one.peer, one.group)
    server.listen(received.put)
    assert [received.get(timeout=WAIT_S) for _ in asked] == asked


def test_replica_that_has_ended_cannot_be_asked() -> None:
    with pytest.raises((OSError, RuntimeError)):
        request_state("127.0.0.1:1", "127.0.0.1:5000", "lease")


def test_server_at_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1 .*; give network\.host an address of this"):
        PeerServer("192.0.2.1")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "entry",
    [
        b"\xff\xfe",
        b"",
        "127.0.0.1:5000",
        f"nowhere {GROUP}",
        f"127.0.0.1:99999 {GROUP}",
        f"127.0.0.1:-1 {GROUP}",
        f"a\0b:5000 {GROUP}",
        f"a..b:5000 {GROUP}",
        f"{'a' * 64}:5000 {GROUP}",
        f"{PEER} train:3:1.7",
        f"{PEER} lease",
        f"{PEER} adopt:3:1.7/0 x",
        f"{PEER} adopt:{'9' * 5000}:1.7",
    ],
    ids=range(13),
)
def test_entry_that_is_no_request_is_left_out(entry: bytes | str) -> None:
    """Any process that reaches the port can add one: it must neither end the thread nor reach the policy."""
    received = queue.Queue[StateRequest]()
    server = PeerServer("127.0.0.1")
    server.listen(received.put)
    push(server, entry)
    request_state(server.address, PEER, GROUP)
    assert received.get(timeout=WAIT_S) == StateRequest(PEER, GROUP)
    assert received.empty()


def test_requests_beyond_the_limit_are_left_out_until_others_are_answered() -> None:
    received = queue.Queue[StateRequest]()
    server = PeerServer("127.0.0.1")
    server.listen(received.put)
    push(server, *(f"{PEER} adopt:{number}:1.7" for number in range(MAX_REQUESTS + 5)), b"the last")
    taken = [received.get(timeout=WAIT_S) for _ in range(MAX_REQUESTS)]
    await_empty(server)
    assert received.empty()
    for _ in taken:
        server.note_answered()
    request_state(server.address, PEER, GROUP)
    assert received.get(timeout=WAIT_S) == StateRequest(PEER, GROUP)


def await_empty(server: PeerServer) -> None:
    """Wait until a server has taken all entries of its requests."""
    store, end = connect_store(server.address, WAIT_S), time.monotonic() + WAIT_S
    while store.queue_len("state_requests"):
        assert time.monotonic() < end, "the server does not take its requests"
        time.sleep(0.01)
