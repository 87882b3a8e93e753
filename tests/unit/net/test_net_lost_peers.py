"""Closed connections, restarted controllers and silence: each is detected within its deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_harness import RUN, HubHarness, generated, received, running_link, score

from starling.common.errors import UnreachableError
from starling.common.net import link as link_module
from starling.common.net.link import LinkClosed, ReceivedCommand
from starling.common.wire import messages as wire

WAIT_S = 50.0
"""Longer than a busy machine takes, and shorter than a process that hangs lives."""
REPLICA = Path(__file__).with_name("lone_replica.py")


def test_killed_process_is_disconnected_at_once(harness: HubHarness, keys: Path) -> None:
    command = [sys.executable, str(REPLICA), harness.hub.address, str(keys / "reward-0.json"), "reward-0", RUN]
    with running_link(harness.hub.address, keys), subprocess.Popen(command) as process:
        try:
            harness.welcome("rollout-0")
            harness.next(wire.Hello, "reward-0")
            # A hub has no clock: only the closed connection can tell.
            process.send_signal(signal.SIGKILL)
            harness.wait_disconnected("reward-0")
            assert not harness.hub.send("reward-0", wire.RequestHello())
            harness.next(wire.Heartbeat, "rollout-0")
        finally:
            process.kill()


def test_replica_that_hangs_ends_when_it_is_refused(harness: HubHarness, keys: Path) -> None:
    """Its link reads that without its working thread. The supervisor then starts it again."""
    command = [sys.executable, str(REPLICA), harness.hub.address, str(keys / "reward-0.json"), "reward-0", RUN, "0.5"]
    with subprocess.Popen(command) as process:
        try:
            harness.welcome("reward-0")
            harness.hub.send("reward-0", wire.Refused(reason="it did not answer"))
            assert process.wait(WAIT_S) == 1
        finally:
            process.kill()


def test_link_reconnects_to_a_restarted_controller(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.1)
    first = HubHarness(keys, incarnation=1)
    address = first.hub.address
    with running_link(address, keys) as link:
        first.welcome("rollout-0")
        first.hub.send("rollout-0", score("score:1:0"))
        received(link, ReceivedCommand)
        first.hub.close(0.0)
        link.answer("score:1:0", generated("score:1:0"))
        second = HubHarness(keys, bind=address, incarnation=2)
        try:
            _, heartbeat = second.next(wire.Heartbeat)
            assert heartbeat.leases == (wire.HeldLease(lease="score:1:0", phase="answered"),)
            second.hub.send("rollout-0", wire.RequestHello())
            second.next(wire.Hello)
            second.hub.send("rollout-0", wire.Welcome(heartbeat_s=0.05, lease_s=10.0))
            second.next(wire.GroupGenerated)  # not released yet, so it is resent
            second.hub.send("rollout-0", score("score:2:0"))
            assert received(link, ReceivedCommand).message == score("score:2:0")
        finally:
            second.hub.close(0.0)


def test_unreachable_controller_is_one_sentence(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with running_link(f"tcp://127.0.0.1:{port}", keys, connect_s=0.6) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert str(error).startswith(
        f"the controller at tcp://127.0.0.1:{port} cannot be reached by rollout-0 (no answer for 1 s); check "
    )


def test_controller_that_never_answers_is_one_sentence(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys, connect_s=0.6) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    harness.next(wire.Hello)


def test_controller_that_falls_silent_is_one_sentence(harness: HubHarness, keys: Path) -> None:
    with running_link(harness.hub.address, keys, connect_s=60.0, silence_s=0.5) as link:
        harness.welcome("rollout-0")
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert "cannot be reached by rollout-0" in str(error)


def test_malformed_address_is_one_sentence(keys: Path) -> None:
    with running_link("tcp://nowhere", keys) as link:
        error = received(link, LinkClosed).error
    assert isinstance(error, UnreachableError)
    assert "tcp://nowhere cannot be reached by rollout-0" in str(error)


def test_closed_link_leaves_no_descriptor(keys: Path) -> None:
    harness = HubHarness(keys)
    try:

        def connect_and_close() -> None:
            with running_link(harness.hub.address, keys):
                harness.welcome("rollout-0")
            harness.wait_disconnected("rollout-0")

        connect_and_close()  # descriptors that are opened once per process are open from now on
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            connect_and_close()
        # The hub hears of a connection that closes just before its descriptor does.
        harness.poll_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        harness.hub.close(0.0)
