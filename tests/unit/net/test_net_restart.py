"""A controller that is killed and restarted at its port: replicas reconnect, and no result is lost."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hub_harness import DEADLINE_S, RUN, HubHarness, envelope, generated, received, running_link, score
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError, UnreachableError
from starling.common.net import dealer as dealer_module
from starling.common.net.link import ReceivedCommand, aged
from starling.common.net.operator import OperatorClient
from starling.common.wire import codec
from starling.common.wire import messages as wire

HUB = Path(__file__).with_name("lone_hub.py")


class LoneHub:
    """A controller process, and the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._unread: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(json.loads(line))

    def until(self, **fields: object) -> dict[str, Any]:
        """Wait for a printed line with these fields, and return it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                line = self._unread.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{fields} never came; the last lines: {self.lines[-10:]}") from None
            self.lines.append(line)
            if fields.items() <= line.items():
                return line

    def kill(self) -> None:
        """Kill the process with SIGKILL, and read its last lines."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(DEADLINE_S)
        while not self._unread.empty():
            self.lines.append(self._unread.get())

    def settled(self) -> list[str]:
        """Return the settled leases, in order."""
        return [line["settled"] for line in self.lines if "settled" in line]


@contextmanager
def hub_process(keys: Path, address: str, incarnation: int, *leases: str) -> Iterator[tuple[LoneHub, str]]:
    """Run a controller process at `address`; yields it with its actual address."""
    command = [sys.executable, str(HUB), str(keys), RUN, address, str(incarnation), *leases]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    hub = LoneHub(process)
    try:
        yield hub, hub.until()["address"]
    finally:
        hub.kill()
        assert process.stdout is not None
        process.stdout.close()


def test_results_made_while_the_controller_was_dead_are_settled_once(keys: Path) -> None:
    leases = ("generate:t1:1.1", "generate:t2:1.2")
    with hub_process(keys, "tcp://127.0.0.1:0", 1, *leases) as (first, address), running_link(address, keys) as link:
        assert [received(link, ReceivedCommand).message.lease for _ in leases] == list(leases)
        link.report(version=5)
        first.kill()
        link.answer(leases[0], generated(leases[0]))  # perhaps before the link has noticed
        with hub_process(keys, address, 2) as (second, again):
            assert again == address, "the port can be bound again although old connections were open"
            hello = second.until(heard="Hello", peer="rollout-0")
            assert hello["version"] == 5
            second.until(settled=leases[0])
            link.answer(leases[1], generated(leases[1]))
            second.until(settled=leases[1])
            for _ in range(3):
                second.until(heard="Heartbeat")
            second.kill()
            assert second.settled() == list(leases)


def test_results_wait_in_the_lease_table_and_not_in_the_socket(keys: Path) -> None:
    lease = "generate:t1:1.1"
    with hub_process(keys, "tcp://127.0.0.1:0", 1, lease) as (first, address), running_link(address, keys) as link:
        assert received(link, ReceivedCommand).message.lease == lease
        deadline = time.monotonic() + DEADLINE_S
        while not link.connected:  # the heartbeat thread may note that after the first command has come
            assert time.monotonic() < deadline, "the link did not notice its connection"
            link.receive(0.05)
        first.kill()
        while link.connected:
            assert time.monotonic() < deadline, "the link did not notice the loss"
            link.receive(0.05)
        link.answer(lease, generated(lease))
        for _ in range(100):
            link.answer(lease, generated(lease))
        with hub_process(keys, address, 2) as (second, _):
            second.until(settled=lease)
            second.until(heard="Heartbeat")
            second.kill()
            heard = [line["heard"] for line in second.lines if "heard" in line]
            assert heard[:2] == ["Heartbeat", "Hello"], (
                "the heartbeat is answered by `RequestHello`, and that by a hello"
            )
            assert heard.count("GroupGenerated") == 1


def test_operator_is_answered_by_a_restarted_controller(keys: Path) -> None:
    key = keys / "operator-0.json"
    with hub_process(keys, "tcp://127.0.0.1:0", 1) as (first, address), OperatorClient(address, key, RUN) as line:
        assert line.ask(wire.QueryRun(request="a", about="status"), DEADLINE_S).text == "incarnation 1"
        first.kill()
        with hub_process(keys, address, 2):
            assert line.ask(wire.QueryRun(request="b", about="why"), DEADLINE_S).text == "incarnation 2"


def test_link_accepts_the_newest_controller_only() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvtimeo = int(DEADLINE_S * 1000)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def send_as(incarnation: int, message: wire.Down) -> None:
        router.send_multipart([route, *codec.pack(envelope("controller", incarnation=incarnation), message)])

    def next_message(kind: type) -> None:
        while not isinstance(codec.unpack_up(router.recv_multipart()[1:]), kind):
            pass

    try:
        with running_link(f"tcp://127.0.0.1:{port}", None, buffers=()) as link:
            route = router.recv_multipart()[0]
            send_as(5, wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
            next_message(wire.Heartbeat)
            send_as(4, score("score:old:1.1"))
            send_as(4, wire.Drain(reason="the run of a ghost is over"))
            send_as(5, score("score:now:2.1"))
            assert received(link, ReceivedCommand).message.lease == "score:now:2.1"
            send_as(6, wire.ReleaseLeases(leases=()))
            next_message(wire.Hello)  # the new one does not know it
            send_as(6, wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
            next_message(wire.Heartbeat)
            send_as(5, score("score:late:2.2"))
            send_as(6, score("score:new:3.1"))
            assert received(link, ReceivedCommand).message.lease == "score:new:3.1"
    finally:
        router.close()
        context.term()


def test_heartbeat_reports_offers_and_waits(harness: HubHarness, keys: Path) -> None:
    wait = wire.Wait(what="buckets of version 7", on="policy-0", since_s=1.0, seconds_left=30.0)
    with running_link(harness.hub.address, keys) as link:
        harness.welcome("rollout-0")
        link.report(version=6, offered=6, waits=(wait,))
        beats: list[wire.Heartbeat] = []

        def has_reported() -> bool:
            beats.append(harness.next(wire.Heartbeat)[1])
            return bool(beats[-1].waits) and beats[-1].waits[0].since_s > beats[0].waits[0].since_s

        harness.poll_until(lambda: bool(harness.next(wire.Heartbeat)[1].waits))
        harness.poll_until(has_reported)
        assert (beats[-1].version, beats[-1].offered, beats[-1].waits[0].what) == (6, 6, wait.what)
        link.report(waits=())
        harness.poll_until(lambda: harness.next(wire.Heartbeat)[1] == wire.Heartbeat(version=6, offered=6))


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_aged_moves_a_wait_toward_its_deadline(since_s: float, seconds_left: float, elapsed_s: float) -> None:
    (wait,) = aged((wire.Wait(what="w", on="o", since_s=since_s, seconds_left=seconds_left),), elapsed_s)
    assert wait.since_s == since_s + elapsed_s
    assert 0.0 <= wait.seconds_left <= seconds_left


def test_reconnect_delays_differ_between_replicas() -> None:
    drawn = set()
    for _ in range(10):
        line = dealer_module.Dealer("tcp://127.0.0.1:1", "rollout-0", None)
        drawn.add((line.socket.reconnect_ivl, line.socket.reconnect_ivl_max))
        line.close()
    assert len(drawn) > 1
    assert all(least < most for least, most in drawn), "and the delays grow"


def test_operator_without_a_reply_gets_one_sentence(keys: Path) -> None:
    with (
        OperatorClient("tcp://127.0.0.1:1", keys / "operator-0.json", RUN) as line,
        pytest.raises(UnreachableError, match=r"1 cannot be reached by operator-0 \(no answer for 0\.3 s\); check the"),
    ):
        line.ask(wire.QueryRun(request="a", about="status"), 0.3)
    with pytest.raises(UnreachableError, match="tcp://nowhere cannot be reached by operator-0"):
        OperatorClient("tcp://nowhere", None, RUN)
    with pytest.raises(ConfigError, match=r"reward-0\.json was made for reward-0, not for operator-0"):
        OperatorClient("tcp://127.0.0.1:1", keys / "reward-0.json", RUN)


def test_two_operators_with_one_key_are_both_answered(keys: Path) -> None:
    key = keys / "operator-0.json"
    with (
        hub_process(keys, "tcp://127.0.0.1:0", 1) as (_, address),
        OperatorClient(address, key, RUN) as one,
        OperatorClient(address, key, RUN) as other,
    ):
        for number in range(3):
            for line in (one, other):
                request = f"{number} of {id(line)}"
                assert line.ask(wire.QueryRun(request=request, about="why"), DEADLINE_S).request == request
