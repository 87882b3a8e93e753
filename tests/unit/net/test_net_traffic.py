"""Memory that a peer can take from the controller by messages that it never completes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hub_harness import DEADLINE_S, HubHarness, envelope, running_link, socket_of
from structlog.testing import capture_logs
from test_net_restart import hub_process

from starling.common.net import curve
from starling.common.net.hub import connections, traffic
from starling.common.net.hub.traffic import MAX_SUBSCRIBERS
from starling.common.net.keyring import make_keys
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.wire import codec
from starling.common.wire import messages as wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the counts are those of Linux")

MIB = 1 << 20
MORE, LONG, COMMAND = 1, 2, 4


def peak_rss(pid: int) -> int:
    """Return the most memory that a process has had, in bytes."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) << 10


def wait_for_closed(monitor: zmq.Socket[bytes]) -> None:
    assert monitor.poll(int(DEADLINE_S * 1000) * 3), "the connection stays open"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "has_joined", "most_mib"),
    [("observer-0", False, 64), ("reward-0", True, 1024), ("reward-0", False, 1024)],
)
def test_controller_bounds_memory_of_unfinished_messages(
    tmp_path: Path, name: str, has_joined: bool, most_mib: int
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ("observer-0", "reward-0", "rollout-0"))
    hello = wire.Hello(role="reward", host="h", pid=1, num_slots=1)
    first = [bytes(part) for part in codec.pack(envelope(name), hello)] if has_joined else []
    with hub_process(keys, "tcp://127.0.0.1:0", 1) as (hub, address):
        before = peak_rss(hub.process.pid)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = context.socket(zmq.DEALER)
        client.linger = 0
        curve.connect_with(client, curve.load_key(keys / f"{name}.json"))
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor = client.get_monitor_socket(ended)
        client.connect(address)
        try:
            if first:
                client.send_multipart(first)
                hub.until(heard="Hello", peer=name)
            with contextlib.suppress(zmq.Again):  # refused before it could send
                client.send_multipart([bytes(32 * MIB)] * 64, zmq.NOBLOCK, copy=False)
            wait_for_closed(monitor)
        finally:
            client.disable_monitor()
            monitor.close(0)
            client.close()
            context.term()
        with running_link(address, keys):  # it serves the others
            hub.until(heard="Hello", peer="rollout-0")
        assert peak_rss(hub.process.pid) - before < most_mib * MIB


def raw_connection(address: str, kind: bytes) -> socket.socket:
    """Connect without CURVE as a socket of `kind`, and finish ZeroMQ's handshake (ZMTP 3.1)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    line.sendall(struct.pack("BB", COMMAND, len(body)) + body)
    return line


def frame_of(body: bytes, flags: int) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def sent_until_closed(harness: HubHarness, line: socket.socket, data: bytes, most: int) -> int:
    """Send `data` again and again while the hub polls, until the connection closes; return the number of bytes."""
    sent, deadline = 0, time.monotonic() + DEADLINE_S
    line.setblocking(False)
    while sent < most and time.monotonic() < deadline:
        harness.events += harness.hub.poll(0.01)
        with contextlib.suppress(BlockingIOError):
            try:
                sent += line.send(data[sent % len(data) :])
            except (ConnectionResetError, BrokenPipeError):
                return sent
    raise AssertionError(f"{sent} bytes were taken")


@pytest.fixture
def open_hub() -> Iterator[HubHarness]:
    """A hub without CURVE, whose clients can be written byte by byte."""
    harness = HubHarness(None)
    yield harness
    harness.hub.close(0.0)


def test_connection_that_completes_no_first_message_is_closed(
    open_hub: HubHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "FIRST_BYTES", 4 * MIB)
    with capture_logs() as logs, raw_connection(open_hub.hub.address, b"DEALER") as line:
        sent_until_closed(open_hub, line, frame_of(bytes(MIB), MORE), most=256 * MIB)
    (closed,) = [entry for entry in logs if entry["event"] == "closed a connection with too many undelivered bytes"]
    assert closed["undelivered_mb"] >= 4


def test_connections_before_their_first_messages_share_a_limit(
    open_hub: HubHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "ALL_FIRST_BYTES", 4 * MIB)
    with raw_connection(open_hub.hub.address, b"DEALER") as one, raw_connection(open_hub.hub.address, b"DEALER") as two:
        one.sendall(frame_of(bytes(2 * MIB), MORE))
        sent_until_closed(open_hub, two, frame_of(bytes(MIB), MORE), most=256 * MIB)
        one.setblocking(False)
        one.send(b"\0")  # the smaller one stays


def test_subscriber_with_more_than_one_subscription_is_closed(open_hub: HubHarness) -> None:
    """libzmq needs some 50 bytes of memory for each byte of a topic, and time in proportion to them."""
    with raw_connection(open_hub.hub.telemetry_address, b"SUB") as line:
        line.sendall(frame_of(b"\x01" + bytes(1000), 0) * 64)
        line.setblocking(False)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline, "the connection stays open"
            open_hub.events += open_hub.hub.poll(0.01)
            with contextlib.suppress(BlockingIOError):
                try:
                    if not line.recv(4096):
                        return
                except ConnectionError:
                    return


def test_subscribers_use_up_no_files_of_the_controller(open_hub: HubHarness) -> None:
    """An observer may connect as often as it likes, and replicas need files to connect, too."""
    with contextlib.ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        lines = []
        for _ in range(MAX_SUBSCRIBERS + 50):
            host, _, port = open_hub.hub.telemetry_address.removeprefix("tcp://").rpartition(":")
            lines.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S)))
        accepted = MAX_SUBSCRIBERS + len(lines)
        open_hub.poll_until(lambda: open_hub.hub._subscribers.num_closed >= 50)
        open_hub.poll_until(lambda: len(os.listdir("/proc/self/fd")) <= before + accepted + 10)
        assert len(open_hub.hub._subscribers._connections) == MAX_SUBSCRIBERS


def test_newest_snapshot_is_published_while_the_hub_works(open_hub: HubHarness) -> None:
    """Its own thread sends it: the hub's would wait for what libzmq does with subscriptions."""
    subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.subscribe(b"")
    subscriber.connect(open_hub.hub.telemetry_address)
    deadline, number = time.monotonic() + DEADLINE_S, 0
    while not subscriber.poll(10):
        assert time.monotonic() < deadline
        number += 1
        open_hub.hub.publish(b"%d" % number)
    last = b"%d" % (number + 1)
    open_hub.hub.publish(last)
    while subscriber.recv() != last:
        pass
    subscriber.close()
    assert "telemetry" in [thread.name for thread in threading.enumerate()]


def test_connection_that_closes_while_it_is_noted_is_forgotten(
    open_hub: HubHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address_and_close(descriptor: int) -> object | None:
        address = connections.peer_address(descriptor)
        os.close(descriptor)  # as a thread of ZeroMQ does
        return address

    monkeypatch.setattr(traffic, "peer_address", address_and_close)
    guard = open_hub.hub._traffic
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        descriptor = server.accept()[0].detach()
        guard._add(descriptor, now=0.0)
    assert descriptor not in guard._connections
    guard.check(now=1.0)


def test_messages_that_wait_for_a_busy_controller_are_kept(harness: HubHarness, keys: Path) -> None:
    with socket_of(harness.hub.address, keys) as client:
        client.send_multipart(codec.pack(envelope(), wire.Hello(role="rollout", host="h", pid=1)))
        harness.next(wire.Hello, "rollout-1")
        for number in range(500):
            client.send_multipart(codec.pack(envelope(seq=2 + number), wire.Leave(reason="x" * 20_000)))
        for _ in range(500):
            harness.next(wire.Leave, "rollout-1")
    assert harness.hub._traffic.num_closed == 0


def test_observer_gets_telemetry_and_no_other_connection(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ("observer-0",))
    harness = HubHarness(keys)
    subscriber = TelemetrySubscriber(harness.hub.telemetry_address, keys / "observer-0.json")
    try:
        with capture_logs() as logs, socket_of(harness.hub.address, keys, "observer-0") as client:
            client.linger = 0
            monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            client.send_multipart([b"anything"])
            assert monitor.poll(DEADLINE_S * 1000)
            client.disable_monitor()
            monitor.close(0)
        assert [entry["peer"] for entry in logs if entry["event"] == "refused a peer that may only subscribe"] == [
            "observer-0"
        ]
        deadline = time.monotonic() + DEADLINE_S
        while not subscriber._socket.poll(50):
            assert time.monotonic() < deadline
            harness.hub.publish(b"a snapshot")
        assert not harness.hub.dropped
    finally:
        subscriber.close()
        harness.hub.close(0.0)


def test_descriptor_of_a_file_leaves_no_duplicate_open(tmp_path: Path) -> None:
    """ZeroMQ has closed the connection, and its number is that of a file by now."""
    with (tmp_path / "file").open("w") as file:
        before = os.listdir("/proc/self/fd")
        assert connections.peer_address(file.fileno()) is None
        assert not connections.close_connection(file.fileno(), ("127.0.0.1", 1))
        assert os.listdir("/proc/self/fd") == before


CLOSES_UNREAD = """
import socket, time
from starling.common.net.hub.hub import Hub
hub = Hub("tcp://127.0.0.1:0", "run", 1, None)
port = int(hub.address.rpartition(":")[2])
for _ in range(2500):
    socket.create_connection(("127.0.0.1", port), 60.0).close()
time.sleep(0.3)  # libzmq takes note of them
hub.close()
print("closed")
"""


def test_hub_ends_although_nobody_has_read_of_many_connections() -> None:
    """As where the controller loads its data and cannot, while a stranger opens and closes connections."""
    command = [sys.executable, "-c", CLOSES_UNREAD]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3 * DEADLINE_S, check=True)
    assert ended.stdout == "closed\n"
