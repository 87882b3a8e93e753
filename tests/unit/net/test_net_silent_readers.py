"""Peers that read nothing: what waits for them in the controller is bounded, over all connections that they open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hub_harness import DEADLINE_S, HubHarness, envelope, socket_of

from starling.common.net import curve
from starling.common.net.hub import hub as hub_module
from starling.common.wire import codec
from starling.common.wire import messages as wire

HELLO = wire.Hello(role="rollout", host="h", pid=1, num_slots=1)


@contextmanager
def monitored(socket: zmq.Socket[Any], events: int) -> Iterator[zmq.Socket[Any]]:
    """Yield the socket's monitor of `events`."""
    monitor = socket.get_monitor_socket(events)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(0)


def test_connection_that_its_peer_has_replaced_is_closed(harness: HubHarness, keys: Path) -> None:
    with (
        socket_of(harness.hub.address, keys) as first,
        socket_of(harness.hub.address, keys) as second,
        monitored(first, zmq.EVENT_DISCONNECTED) as monitor,
    ):
        first.send_multipart(codec.pack(envelope(), HELLO))
        harness.next(wire.Hello, "rollout-1")
        second.send_multipart(codec.pack(envelope(seq=2), HELLO))
        harness.next(wire.Hello, "rollout-1")
        harness.poll_until(lambda: monitor.poll(0) != 0)
        assert harness.hub.send("rollout-1", wire.RequestHello())
        assert second.poll(int(DEADLINE_S * 1000)), "the newest connection is the peer's"


def test_last_messages_of_a_replaced_connection_do_not_bring_it_back(harness: HubHarness, keys: Path) -> None:
    num = 2000
    with (
        # The hub closes it. Over another connection it would send the messages that are left, and be the newest again.
        socket_of(harness.hub.address, keys, reconnects=False) as first,
        socket_of(harness.hub.address, keys) as second,
    ):
        for connection in (first, second):  # both are connected, and neither is the peer's
            connection.send_multipart(codec.pack(envelope(run="another"), HELLO))
        harness.poll_until(lambda: harness.hub.dropped["run"] == 2)
        for seq in range(num):
            first.send_multipart(codec.pack(envelope(seq=seq), wire.Heartbeat(version=1)))
        second.send_multipart(codec.pack(envelope(seq=num), wire.Heartbeat(version=2)))
        # The hub takes one message of each connection in turn.
        versions = []
        while 2 not in versions:
            versions.append(harness.next(wire.Heartbeat, "rollout-1")[1].version)
        while harness.hub.poll(0.1):
            pass
        assert harness.hub.send("rollout-1", wire.RequestHello())
        answer = second.recv_multipart() if second.poll(int(DEADLINE_S * 1000)) else []
        while answer and not isinstance(codec.unpack_down(answer), wire.RequestHello):  # why it was refused
            answer = second.recv_multipart() if second.poll(int(DEADLINE_S * 1000)) else []
        assert answer, f"the first connection is the peer's again after {len(versions)} messages"


def test_peer_that_is_refused_again_and_again_is_told_seldom(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "REFUSE_EVERY_S", 1e6)
    with socket_of(harness.hub.address, keys) as client:
        for seq in range(50):
            client.send_multipart(codec.pack(envelope(seq=seq, run="another"), HELLO))
        harness.poll_until(lambda: harness.hub.dropped["run"] == 50)
        client.send_multipart(codec.pack(envelope(), HELLO))
        harness.next(wire.Hello)
        harness.hub.send("rollout-1", wire.RequestHello())
        answers = []
        while not answers or not isinstance(answers[-1], wire.RequestHello):
            assert client.poll(int(DEADLINE_S * 1000))
            answers.append(codec.unpack_down(client.recv_multipart()))
        assert [type(answer) for answer in answers] == [wire.Refused, wire.RequestHello]


def test_few_snapshots_wait_for_a_subscriber_that_does_not_read(harness: HubHarness, keys: Path) -> None:
    num, snapshot = 200, bytes(1 << 20)
    context: zmq.Context[Any] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.linger, subscriber.rcvhwm = 0, 1
    curve.connect_with(subscriber, curve.load_key(keys / "rollout-1.json"))
    subscriber.subscribe(b"")
    subscriber.connect(harness.hub.telemetry_address)
    try:
        while not subscriber.poll(10):  # until its subscription has arrived
            harness.hub.publish(b"first")
        for _ in range(num):
            harness.hub.publish(snapshot)
        received, last = 0, b""
        while last != b"last":
            harness.hub.publish(b"last")
            if subscriber.poll(10):
                last = subscriber.recv()
                received += last == snapshot
        # Besides those in the socket, some are in the buffers of the kernel.
        assert received < num // 2, "the controller kept them all"
    finally:
        subscriber.close()
        context.term()
