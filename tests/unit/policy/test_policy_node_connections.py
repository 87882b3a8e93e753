"""Connections of the nodes of a policy: who is admitted, with which ranks, and what passes."""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils.monitor import recv_monitor_message

from starling.common.errors import ConfigError, UnreachableError
from starling.common.net import curve
from starling.common.net.keyring import make_keys
from starling.common.nodes.children import Loss
from starling.common.nodes.facts import NodeFacts
from starling.common.nodes.nodes import (
    DOWN,
    JOIN_BYTES,
    MAX_CONNECTIONS,
    Answer,
    Down,
    Join,
    JoinLimit,
    Lost,
    Nodes,
    Request,
    Up,
    Welcome,
)
from starling.common.service import NodeArguments
from starling.common.settings import NetworkSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.shell.facts import gather_ranks

NAME = "policy-0"
WAIT_S = 60.0
TOO_MANY = "closed a connection with too many undelivered bytes"
NETWORK = NetworkSettings(heartbeat_s=0.1, lease_s=1.0)


def facts(node: int, num_ranks: int, **changes: Any) -> NodeFacts:
    """Return the facts of one of three nodes."""
    first = NodeFacts(
        node=node,
        num_nodes=3,
        num_ranks=num_ranks,
        host=f"host-{node}",
        settings={"run.seed": "1"},
        model="/model",
        model_digest="2",
        folder="/run",
        marker="3",
    )
    return msgspec.structs.replace(first, **changes)


@pytest.fixture
def key(tmp_path: Path) -> curve.KeyFile:
    """Return the key of the replica."""
    make_keys(tmp_path / "keys", [NAME])
    return curve.load_key(tmp_path / "keys" / f"{NAME}.json")


@contextmanager
def listening(num_ranks: int, key: curve.KeyFile | None = None) -> Iterator[tuple[Nodes, str]]:
    """Listen as node 0, with so many ranks on it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=32_000)
    nodes = Nodes(NAME, NodeArguments(0, 3, "127.0.0.1", port, 0), NETWORK, key, facts(0, num_ranks))
    try:
        yield nodes, f"tcp://127.0.0.1:{port}"
    finally:
        nodes.close()


class Agent:
    """The connection of an agent."""

    def __init__(self, address: str, key: curve.KeyFile | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(WAIT_S * 1000)
        if key is not None:
            curve.connect_with(self._socket, key)
        self._monitor = self._socket.get_monitor_socket()
        self._monitor.rcvtimeo = int(WAIT_S * 1000)
        self._socket.connect(address)

    def send(self, message: Up, *frames: bytes) -> None:
        self.send_raw(msgspec.msgpack.encode(message), *frames)

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> tuple[Down, list[bytes]]:
        head, *frames = self._socket.recv_multipart()
        return DOWN.decode(head), frames

    def wait_for(self, event: int) -> None:
        """Wait for an event of the connection."""
        deadline = time.monotonic() + WAIT_S
        while recv_monitor_message(self._monitor)["event"] != event:
            assert time.monotonic() < deadline

    def close(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        self._context.term()


def test_ranks_are_numbered_through_the_nodes_and_frames_pass(key: curve.KeyFile) -> None:
    """With the key of the replica at both ends."""
    own = msgspec.structs.replace(key, controller_public=key.public)
    received, losses, arrived = list[tuple[int, bytes]](), list[Loss](), threading.Semaphore(0)

    def take(rank: int, frame: bytes) -> None:
        received.append((rank, frame))
        arrived.release()

    def lose(loss: Loss) -> None:
        losses.append(loss)
        arrived.release()

    with listening(2, key) as (nodes, address), closing(Agent(address, own)) as one:
        two = Agent(address, own)
        two.send(Join(facts=facts(2, 1)))
        one.send(Join(facts=facts(1, 3)))
        gather_ranks(nodes, ParallelSettings(dp_shard=6, join_s=WAIT_S))
        assert nodes.num_ranks == 4
        nodes.serve(take, lose)
        nodes.send(b"work")
        assert [one.receive() for _ in range(2)] == [(Welcome(first_rank=2), []), (Request(), [b"work"])]
        assert [two.receive() for _ in range(2)] == [(Welcome(first_rank=5), []), (Request(), [b"work"])]
        two.send(Answer(rank=5), b"done")
        assert arrived.acquire(timeout=WAIT_S)
        assert received == [(5, b"done")]
        one.send(Lost(loss=Loss(what="rank 3 was killed", log="l", was_killed=True)))
        assert arrived.acquire(timeout=WAIT_S)
        two.close()
        assert arrived.acquire(timeout=WAIT_S)
        assert [loss.what for loss in losses] == ["rank 3 was killed", "node 2 (host-2) of policy-0 is gone"]


def test_stranger_who_knows_the_public_key_is_refused(key: curve.KeyFile) -> None:
    public, secret = zmq.curve_keypair()
    stranger = curve.KeyFile(name=NAME, public=public.decode(), secret=secret.decode(), controller_public=key.public)
    with listening(1, key) as (_, address), closing(Agent(address, stranger)) as agent:
        agent.wait_for(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def test_nodes_whose_ranks_are_not_those_of_the_mesh_are_refused() -> None:
    with listening(1) as (nodes, address), closing(Agent(address)) as one, closing(Agent(address)) as two:
        one.send(Join(facts=facts(1, 1)))
        two.send(Join(facts=facts(2, 1)))
        sentence = r"the nodes have 1 \+ 1 \+ 1 = 3 ranks, and policy.parallel has 4; give --ranks-per-node that fit"
        with pytest.raises(ConfigError, match=sentence):
            gather_ranks(nodes, ParallelSettings(tp=4, join_s=WAIT_S))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": {"run.seed": "2"}}, "run.seed of node 1 (host-1) is not that of node 0"),
        ({"settings": {}}, "run.seed of node 1 (host-1) is not that of node 0"),
        ({"settings": {"run.seed": "1", "a.b": "1"}}, "a.b of node 1 (host-1) is not that of node 0"),
        ({"num_nodes": 2}, "--nnodes 2 of node 1 (host-1) is not the --nnodes 3 of node 0"),
        ({"model_digest": "1"}, "the model folder /model of node 1 (host-1) has other files than /model of node 0"),
        ({"marker": ""}, "node 1 (host-1) has --dir /run and does not see the folder /run of node 0"),
        ({"folder": "/other"}, "node 1 (host-1) has --dir /other and does not see the folder /run of node 0"),
        ({"host": "another"}, ""),
        ({"model": "/another"}, ""),
    ],
)
def test_difference_of_a_node_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    found = facts(1, 2, **changes).differs(facts(0, 2))
    assert found.startswith(sentence)
    assert bool(found) == bool(sentence)


def test_connection_that_sends_much_before_its_handshake_is_closed(key: curve.KeyFile) -> None:
    """Without a key: the frame of a command has any length, and would be kept until it is complete."""
    with capture_logs() as logs, listening(1, key) as (nodes, address), gathering(nodes):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as stranger:
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
            with suppress(OSError):  # it may be closed before all is sent
                stranger.sendall(b"\x06" + struct.pack(">Q", 300 << 20) + bytes(8 << 20))
            deadline = time.monotonic() + WAIT_S
            while not [entry for entry in logs if entry["event"] == TOO_MANY]:
                assert time.monotonic() < deadline, "the connection was not closed"
                time.sleep(0.02)


def test_admitted_node_may_send_more_than_one_that_asks(key: curve.KeyFile) -> None:
    own = msgspec.structs.replace(key, controller_public=key.public)
    received = queue.Queue[int]()
    with (
        listening(1, key) as (nodes, address),
        closing(Agent(address, own)) as one,
        closing(Agent(address, own)) as two,
    ):
        one.send(Join(facts=facts(1, 1)))
        two.send(Join(facts=facts(2, 1)))
        gather_ranks(nodes, ParallelSettings(dp_shard=3))
        nodes.serve(lambda _, frame: received.put(len(frame)), lambda _: None)
        for _ in range(4):
            one.send(Answer(rank=1), bytes(2 * JOIN_BYTES))
            assert received.get(timeout=WAIT_S) == 2 * JOIN_BYTES
        one.send(Answer(rank=1), b"last")
        assert received.get(timeout=WAIT_S) == 4


@pytest.mark.parametrize(
    "frame",
    [
        b"junk",
        msgspec.msgpack.encode({"type": "join"}),
        b"\x81\xa4type\xa1\xff",
        b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 9999,
    ],
    ids=["none", "without facts", "a text that is not UTF-8", "lists in each other"],
)
def test_frame_that_is_no_message_is_dropped(frame: bytes) -> None:
    with listening(1) as (nodes, address), closing(Agent(address)) as one, closing(Agent(address)) as two:
        one.send_raw(frame)
        one.send(Join(facts=facts(1, 1)))
        two.send(Join(facts=facts(2, 1)))
        nodes.gather(JoinLimit(WAIT_S, "join_s"))
        assert nodes.num_ranks == 2


def test_node_whose_connection_has_ended_is_not_admitted() -> None:
    """Its place would be taken until another message came over a connection with the same descriptor."""
    with listening(1) as (nodes, address), closing(Agent(address)) as last:
        lost = Agent(address)
        lost.send(Join(facts=facts(1, 1)))
        lost.wait_for(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        lost.close(linger_ms=1000)
        time.sleep(0.5)  # for ZeroMQ to close the connection, while the message waits to be received
        last.send(Join(facts=facts(2, 1)))
        with pytest.raises(UnreachableError, match=r"^node 1 of policy-0 did not join"):
            nodes.gather(JoinLimit(1.0, "join_s"))


def test_node_0_takes_a_bounded_number_of_connections() -> None:
    """Each takes a file, also of those who never send anything."""
    with listening(1) as (nodes, address), gathering(nodes), ExitStack() as strangers:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        opened = []
        for _ in range(MAX_CONNECTIONS + 20):
            opened.append(strangers.enter_context(socket.create_connection((host, int(port)), WAIT_S)))
        ended = wait_for_ends(opened, 20)
        assert len(ended) == 20


def wait_for_ends(connections: list[socket.socket], num: int) -> set[int]:
    """Return the descriptors of the connections that the other end has closed, once there are `num`."""
    ended = set[int]()
    poller = select.poll()
    for one in connections:
        poller.register(one, select.POLLRDHUP)
    deadline = time.monotonic() + WAIT_S
    while len(ended) < num:
        assert time.monotonic() < deadline, f"{len(ended)} of {num} connections were closed"
        for descriptor, _ in poller.poll(1000):
            ended.add(descriptor)
            poller.unregister(descriptor)
    ended.update(descriptor for descriptor, _ in poller.poll(1000))
    return ended


@contextmanager
def gathering(nodes: Nodes) -> Iterator[None]:
    """Wait for the other nodes in a thread, until the context ends."""
    ended = threading.Event()

    def gather() -> None:
        while not ended.is_set():
            with suppress(UnreachableError):
                nodes.gather(JoinLimit(0.5, "join_s"))

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
