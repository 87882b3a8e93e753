"""The agent of a node, in a process of its own, with node 0 in the test."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from starling.common.net import curve
from starling.common.net.keyring import make_keys
from starling.common.nodes import agent
from starling.common.nodes import nodes as nodes_module
from starling.common.nodes.agent import NodeAgent, Serve
from starling.common.nodes.children import END
from starling.common.nodes.facts import NodeFacts, mark
from starling.common.nodes.nodes import JoinLimit, Nodes
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import StopSignal
from starling.common.service import NodeArguments, ServiceArguments
from starling.common.settings import NetworkSettings, ServiceSettings
from starling.common.wire.codec import MAX_BUFFER_BYTES

NAME = "policy-0"
WAIT_S = 60.0
LIMIT = JoinLimit(WAIT_S, "join_s")


def facts(node: int, folder: Path) -> NodeFacts:
    """Return the facts of one of two nodes, with a rank each."""
    return NodeFacts(
        node=node,
        num_nodes=2,
        num_ranks=1,
        host=f"host-{node}",
        settings={},
        model="/model",
        model_digest="1",
        folder=str(folder),
        marker="2",
    )


def ignore(_: int, __: int, ___: Connection) -> None:
    """Be a rank that hangs: read nothing."""
    threading.Event().wait()


def measure(_: int, __: int, connection: Connection) -> None:
    """Be a rank that answers with the bytes of each request."""
    while (frame := connection.recv_bytes()) != END:
        connection.send_bytes(b"%d" % len(frame))


def be_agent(folder: Path, port: int, serve: Serve = ignore, key: Path | None = None) -> None:
    """Be node 1."""
    arguments = ServiceArguments(
        name=NAME,
        configs=(),
        folder=folder,
        controller="",
        key=key,
        flags=(),
        nodes=NodeArguments(1, 2, "127.0.0.1", port, 0),
    )
    settings = ServiceSettings(network=NetworkSettings(curve=key is not None, heartbeat_s=0.2, lease_s=3.0))
    NodeAgent(settings, arguments, facts(1, folder), serve, limit=LIMIT).run(StopSignal(), NotifySocket())


def free_port() -> int:
    """Return a port that is free."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=32_000)


def slow_proxy(port: int, bytes_per_s: float) -> int:
    """Pass connections on to `port`, with a limited rate back. Returns the port to connect to."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, *, is_slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 17):
                sink.sendall(data)
                time.sleep(len(data) / bytes_per_s if is_slow else 0.0)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:  # node 0 does not listen yet
                near.close()
                continue
            for ends, is_slow in (((near, far), False), ((far, near), True)):
                threading.Thread(target=pump, args=ends, kwargs={"is_slow": is_slow}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("size", "bytes_per_s"),
    [
        pytest.param(MAX_BUFFER_BYTES + 1, 0.0, marks=pytest.mark.campaign, id="more than the largest buffer"),
        pytest.param((24 << 20) + 1, 4 << 20, id="over a network that takes longer than a lease"),
    ],
)
def test_step_may_be_large(size: int, bytes_per_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the buffers of all its groups. Else the connection ends, again after each restart."""
    mark(tmp_path, NAME, "2")
    make_keys(tmp_path / "keys", [NAME])
    path, port = tmp_path / "keys" / f"{NAME}.json", free_port()
    to = slow_proxy(port, bytes_per_s) if bytes_per_s else port
    if bytes_per_s:
        monkeypatch.setattr(nodes_module, "PIECE_BYTES", 1 << 19)
    process = multiprocessing.get_context("fork").Process(target=be_agent, args=(tmp_path, to, measure, path))
    process.start()
    arguments, key = NodeArguments(0, 2, "127.0.0.1", port, 0), curve.load_key(path)
    network = NetworkSettings(heartbeat_s=0.2, lease_s=3.0) if bytes_per_s else NetworkSettings()
    nodes = Nodes(NAME, arguments, network, key, facts(0, tmp_path))
    answers = queue.Queue[bytes]()
    try:
        nodes.gather(LIMIT)
        nodes.welcome([0, 1])
        nodes.serve(lambda _, frame: answers.put(frame), lambda loss: answers.put(loss.what.encode()))
        nodes.send(bytes(size))
        assert answers.get(timeout=2 * WAIT_S) == b"%d" % size
        nodes.end(is_over=True)
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        nodes.close()


def test_agent_ends_with_a_rank_that_has_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last request does not fit into the buffer of the rank's pipe."""
    monkeypatch.setattr(agent, "END_S", 2.0)
    mark(tmp_path, NAME, "2")
    port = free_port()
    process = multiprocessing.get_context("fork").Process(target=be_agent, args=(tmp_path, port))
    process.start()
    nodes = Nodes(NAME, NodeArguments(0, 2, "127.0.0.1", port, 0), NetworkSettings(), None, facts(0, tmp_path))
    try:
        nodes.gather(LIMIT)
        nodes.welcome([0, 1])
        nodes.serve(lambda _, __: None, lambda _: None)
        nodes.send(bytes(1 << 24))
        nodes.end(is_over=True)
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        nodes.close()
