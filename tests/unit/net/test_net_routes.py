"""Routing ids that peers give their connections: libzmq ends a process whose next id is that of a peer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import zmq
from hub_harness import RUN, HubHarness, envelope, running_link

from starling.common.errors import ConfigError
from starling.common.net import curve
from starling.common.wire import codec
from starling.common.wire import messages as wire

HUB = Path(__file__).with_name("lone_hub.py")
FIRST = 0xE43C9869
"""Number of the first connection of a hub: libzmq draws it by `rand`, without a seed."""


@contextmanager
def named_socket(address: str, keys: Path, route: bytes, name: str = "reward-0") -> Iterator[zmq.Socket[Any]]:
    """A bare DEALER that gives its connection the routing id `route`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.routing_id = 0, route
        curve.connect_with(socket, curve.load_key(keys / f"{name}.json"))
        socket.connect(address)
        yield socket


def hello(name: str) -> list[Any]:
    role: Any = name.partition("-")[0]
    return codec.pack(envelope(name), wire.Hello(role=role, host="h", pid=1, num_slots=1))


def until(lines: IO[str], **fields: object) -> dict[str, Any]:
    """Return the next printed line with these fields."""
    for line in lines:
        found: dict[str, Any] = json.loads(line)
        if fields.items() <= found.items():
            return found
    raise AssertionError(f"the process ended before it printed {fields}")


def test_controller_goes_on_when_a_peer_has_the_id_of_the_next_connection(keys: Path) -> None:
    command = [sys.executable, str(HUB), str(keys), RUN, "tcp://127.0.0.1:0", "1"]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        address = until(process.stdout)["address"]
        socket = stack.enter_context(named_socket(address, keys, bytes(1) + FIRST.to_bytes(4)))
        socket.send_multipart(hello("reward-0"))
        until(process.stdout, heard="Hello", peer="reward-0")
        for name in ("rollout-0", "rollout-1"):
            stack.enter_context(running_link(address, keys, name))
            until(process.stdout, heard="Hello", peer=name)


def test_peers_do_not_choose_the_ids_of_their_connections(harness: HubHarness, keys: Path) -> None:
    """Also not where the thread for input and output is interrupted between a peer's key and what else it says."""
    for number in range(200):
        route = b"mine" + number.to_bytes(2)
        with named_socket(harness.hub.address, keys, route) as socket:
            socket.send_multipart(hello("reward-0"))
            harness.next(wire.Hello, "reward-0")
            routes = [*harness.hub._peers.by_route]
            assert all(route[:1] == curve.FIRST_OF_ROUTE and len(route) == curve.ROUTE_BYTES for route in routes)


def test_peers_that_connect_at_once_are_admitted_together(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for the thread for input and output by itself: a flood of handshakes kept all others waiting."""
    waits = curve.Authenticator._io_thread_answers

    def slowly(authenticator: curve.Authenticator) -> bool:
        time.sleep(0.5)
        return waits(authenticator)

    monkeypatch.setattr(curve.Authenticator, "_io_thread_answers", slowly)
    with ExitStack() as stack:
        sockets = [stack.enter_context(named_socket(harness.hub.address, keys, b"mine")) for _ in range(60)]
        for socket in sockets:
            socket.send_multipart(hello("reward-0"))
        begin = time.monotonic()
        for _ in sockets:
            harness.next(wire.Hello, "reward-0")
        assert time.monotonic() - begin < 10


def test_authenticator_without_a_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / (100 * "x")
    long.mkdir()
    with zmq.Context() as context:
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(ConfigError, match=r"longer than 107 characters .*set TMPDIR"):
            curve.start_authenticator(context, curve.AllowList({})).stop()
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
        with pytest.raises(ConfigError, match="set TMPDIR"):
            curve.start_authenticator(context, curve.AllowList({})).stop()


def test_peer_that_could_not_be_admitted_connects_again_at_once(
    harness: HubHarness, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for 30 s, the time of libzmq for a handshake."""
    waits, answers = curve.Authenticator._io_thread_answers, [False]
    monkeypatch.setattr(curve.Authenticator, "_io_thread_answers", lambda one: answers.pop() if answers else waits(one))
    with running_link(harness.hub.address, keys, "reward-0"):
        harness.next(wire.Hello, "reward-0")
    assert not answers
