"""Messages to a service manager, received by a real datagram socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starling.common.observe import notify as module
from starling.common.observe.notify import NotifySocket
from starling.common.settings import environment_variable, take_variables


class ServiceManagerSocket:
    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def take(self) -> list[list[str]]:
        """Return the lines of each datagram that has arrived."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManagerSocket]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@starling-test-{os.getpid()}"
    made = ServiceManagerSocket(address)
    yield made
    made.close()


def made(manager: ServiceManagerSocket, watchdog_s: float = 0.0) -> NotifySocket:
    return NotifySocket(manager.address, watchdog_s)


def test_readiness_is_told_once_and_only_when_the_service_serves(manager: ServiceManagerSocket) -> None:
    notify = made(manager)
    notify.starting("joins", 60.0)
    notify.turn(lambda: "not joined", serves=False)
    assert manager.take() == [["EXTEND_TIMEOUT_USEC=90000000", "STATUS=joins"], ["STATUS=not joined"]]
    notify.turn(lambda: "joined")
    notify.turn(lambda: "joined")
    assert manager.take() == [["READY=1", "WATCHDOG=1", "STATUS=joined"]]


def test_readiness_comes_with_the_status_though_it_was_sent_before(manager: ServiceManagerSocket) -> None:
    notify = made(manager)
    notify.turn("serves", serves=False)
    notify.turn("serves")
    notify.turn("serves")
    assert manager.take() == [["STATUS=serves"], ["READY=1", "WATCHDOG=1", "STATUS=serves"]]


def test_readiness_is_told_again_where_the_manager_was_away(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    notify = NotifySocket(address)
    notify.turn(lambda: "joined")
    manager = ServiceManagerSocket(address)
    notify.turn(lambda: "joined")
    assert [lines[0] for lines in manager.take()] == ["READY=1"]
    manager.close()


def test_full_queue_of_the_manager_does_not_block(manager: ServiceManagerSocket) -> None:
    notify = made(manager)
    for _ in range(3000):
        notify.starting("x", 1.0)
    notify.turn()
    assert 0 < len(manager.take()) < 3000
    notify.turn()
    assert [lines[0] for lines in manager.take()] == ["READY=1"]


def test_each_turn_feeds_the_watchdog_no_more_often_than_is_needed(
    manager: ServiceManagerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    notify = made(manager, watchdog_s=40.0)
    for _ in range(100):
        notify.turn()
        now[0] += 1.0
    assert len(manager.take()) == 10
    now[0] += 1000.0
    assert manager.take() == [], "a loop that does not turn feeds nothing"


def test_loop_that_has_to_stand_still_raises_the_period_meanwhile(manager: ServiceManagerSocket) -> None:
    notify = made(manager, watchdog_s=60.0)
    with notify.patient(600.0, "loads"):
        assert manager.take() == [["EXTEND_TIMEOUT_USEC=630000000", "STATUS=loads"]]
    notify.turn()
    manager.take()
    with notify.patient(600.0, "saves"):
        assert manager.take() == [["WATCHDOG_USEC=660000000", "WATCHDOG=1", "STATUS=saves"]]
    assert manager.take() == [["WATCHDOG_USEC=60000000", "WATCHDOG=1"]]


def test_service_that_stops_before_it_serves_is_never_ready(manager: ServiceManagerSocket) -> None:
    notify = made(manager, watchdog_s=60.0)
    notify.stopping("stopped by SIGTERM", 20.0)
    notify.turn()
    assert manager.take() == [["STOPPING=1", "EXTEND_TIMEOUT_USEC=50000000", "STATUS=stopped by SIGTERM"]]


def test_status_cannot_begin_a_line(manager: ServiceManagerSocket) -> None:
    made(manager).turn(lambda: "x\nSTOPPING=1\n" + "y" * 5000)
    ((ready, fed, status),) = manager.take()
    assert (ready, fed) == ("READY=1", "WATCHDOG=1")
    assert status.startswith("STATUS=x\\nSTOPPING=1\\nyyy")
    assert len(status) < 300


@pytest.mark.parametrize(
    ("variables", "sends", "has_watchdog"),
    [
        ({}, False, False),
        ({"WATCHDOG_USEC": "5000000"}, False, False),
        ({"NOTIFY_SOCKET": "relative"}, False, False),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, False, False),
        ({"NOTIFY_SOCKET": "SOCKET"}, True, False),
        ({"NOTIFY_SOCKET": "SOCKET", "WATCHDOG_USEC": "5000000"}, True, True),
        ({"NOTIFY_SOCKET": "SOCKET", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, True, False),
        ({"NOTIFY_SOCKET": "SOCKET", "WATCHDOG_USEC": "much"}, True, False),
    ],
)
def test_variables_of_the_environment(
    manager: ServiceManagerSocket, variables: dict[str, str], sends: bool, has_watchdog: bool
) -> None:
    named = {name: value.replace("SOCKET", manager.address) for name, value in variables.items()}
    notify = NotifySocket.from_variables(named)
    notify.turn()
    assert (bool(manager.take()), notify.has_watchdog) == (sends, has_watchdog)


def test_variables_that_are_taken_reach_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    assert take_variables(module.NOTIFY_VARIABLES) == {"NOTIFY_SOCKET": "/run/systemd/notify"}
    assert environment_variable("NOTIFY_SOCKET") is None
    command = [sys.executable, "-c", "import os; print('NOTIFY_SOCKET' in os.environ)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"
