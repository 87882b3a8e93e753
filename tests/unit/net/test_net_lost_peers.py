"""Connections that close, controllers that are started again, and silence: each is noticed, none waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_harness import RUN, Desk, calling, generated, received, score

from starling.common.errors import UnreachableError
from starling.common.net import link as link_module
from starling.common.net.link import LinkClosed, ReceivedCommand
from starling.common.wire import messages as wire

REPLICA = Path(__file__).with_name("lone_replica.py")


def test_a_killed_process_is_lost_at_once(desk: Desk, keys: Path) -> None:
    command = [sys.executable, str(REPLICA), desk.hub.address, str(keys / "reward-0.json"), "reward-0", RUN]
    with calling(desk.hub.address, keys), subprocess.Popen(command) as process:
        try:
            desk.admit("rollout-0")
            desk.next(wire.Hello, "reward-0")
            # A hub has no clock: only the closed connection can tell.
            process.send_signal(signal.SIGKILL)
            desk.lost("reward-0")
            assert not desk.hub.send("reward-0", wire.RequestHello())
            desk.next(wire.Heartbeat, "rollout-0")
        finally:
            process.kill()


def test_a_link_finds_a_controller_that_was_started_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.1)
    first = Desk(keys, incarnation=1)
    address = first.hub.address
    with calling(address, keys) as link:
        first.admit("rollout-0")
        first.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        first.hub.close(0.0)
        link.answer("score:1:0", generated("score:1:0"))
        second = Desk(keys, bind=address, incarnation=2)
        try:
            _, heartbeat = second.next(wire.Heartbeat)
            assert heartbeat.leases == (wire.HeldLease(lease="score:1:0", phase="answered"),)
            second.hub.send("rollout-0", wire.RequestHello())
            second.next(wire.Hello)
            second.hub.send("rollout-0", wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
            second.next(wire.GroupGenerated)  # what nobody released is still there
            second.hub.send("rollout-0", score("score:2:0"))
            assert received(link, ReceivedCommand).message == score("score:2:0")
        finally:
            second.hub.close(0.0)


def test_nobody_there_is_one_sentence(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with calling(f"tcp://127.0.0.1:{port}", keys, connect_s=0.6) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert str(error).startswith(
        f"the controller at tcp://127.0.0.1:{port} cannot be reached by rollout-0 (no answer for 1 s); check "
    )


def test_a_controller_that_listens_and_says_nothing_is_one_sentence(desk: Desk, keys: Path) -> None:
    with calling(desk.hub.address, keys, connect_s=0.6) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    desk.next(wire.Hello)


def test_a_controller_that_falls_silent_is_one_sentence(desk: Desk, keys: Path) -> None:
    with calling(desk.hub.address, keys, connect_s=60.0, silence_s=0.5) as link:
        desk.admit("rollout-0")
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert "cannot be reached by rollout-0" in str(error)


def test_an_address_that_is_none_is_one_sentence(keys: Path) -> None:
    with calling("tcp://nowhere", keys) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert "tcp://nowhere cannot be reached by rollout-0" in str(error)


def test_a_closed_link_leaves_no_descriptor(keys: Path) -> None:
    desk = Desk(keys)
    try:

        def come_and_go() -> None:
            with calling(desk.hub.address, keys):
                desk.admit("rollout-0")
            desk.lost("rollout-0")

        come_and_go()  # what is opened once for good is open from now on
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            come_and_go()
        # The hub hears of a connection that closes just before its descriptor does.
        desk.poll_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        desk.hub.close(0.0)
