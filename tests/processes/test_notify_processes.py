"""What real services tell a service manager: that they have joined, that their loop is alive, that they end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica
from reward_processes import Client
from reward_processes import run_service as reward_service

from starling.common.wire import messages as wire

WATCHDOG_S = 1.0
WAIT_S = 120.0
LOADED = ("--policy.init", "random", "--policy.transport", "local", "--model.device", "cpu")


class ServiceManagerSocket:
    """The socket of a service manager."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._unread: list[str] = []

    def variables(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}

    def wait_for(self, line: str) -> list[str]:
        """Wait for a line that begins with `line`; return the lines up to it."""
        end, found = time.monotonic() + WAIT_S, list[str]()
        while not (found and found[-1].startswith(line)):
            if not self._unread:
                self._socket.settimeout(max(0.01, end - time.monotonic()))
                self._unread = self._socket.recv(4096).decode().split("\n")
            found.append(self._unread.pop(0))
        return found

    def fed_after(self) -> bool:
        """Forget what has arrived, and return whether the watchdog is fed within three periods from now on."""
        self._unread.clear()
        self._socket.setblocking(False)
        try:
            while self._socket.recv(4096):
                pass
        except BlockingIOError:
            pass
        end = time.monotonic() + 3 * WATCHDOG_S
        while (left_s := end - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                if b"WATCHDOG=1" in self._socket.recv(4096):
                    return True
            except TimeoutError:
                break
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceManagerSocket]:
    made = ServiceManagerSocket(tmp_path)
    for name, value in made.variables().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


SCORER = """
import os

def reward(completion, reference, prompt_text, metadata):
    return float(completion in os.environ)
"""
REWARD = """
[[reward.scorers]]
name = "{folder}/mine.py:reward"

[reward.http]
enabled = true
port = 0
"""


def test_reward_service_over_http(manager: ServiceManagerSocket, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORER)
    with reward_service(tmp_path, REWARD.format(folder=tmp_path)) as (process, port):
        told = manager.wait_for("READY=1")
        assert "EXTEND_TIMEOUT_USEC=" in told[0]
        assert all(line == "STATUS=loads its scorers" for line in told if line.startswith("STATUS=")), told
        assert "serves http://" in manager.wait_for("STATUS=")[-1]
        # What a scorer sees: a variable of every process, but not the socket of the service manager.
        reply = Client(port).send(
            "POST", "/v1/rewards", {"samples": [{"completion": one} for one in ("PATH", "NOTIFY_SOCKET")], "wait_s": 60}
        )
        assert reply.body["rewards"] == [1.0, 0.0], reply
        assert manager.fed_after()
        process.send_signal(signal.SIGSTOP)
        assert not manager.fed_after(), "a process that stands still feeds nothing"
        process.send_signal(signal.SIGCONT)
        assert manager.fed_after()
        process.terminate()
        assert "STOPPING=1" in manager.wait_for("STATUS=stopped by SIGTERM")
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("name", ["rollout-0", "policy-0"])
def test_replica_is_ready_when_the_controller_has_welcomed_it(
    name: str, manager: ServiceManagerSocket, hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    flags = LOADED if name == "policy-0" else ()
    with replica(hub, name, tmp_path, "--model.path", str(model), *flags, fresh=True) as process:
        told = manager.wait_for("STATUS=joins the run")
        assert "READY=1" not in told
        hub.hello(name)
        told = manager.wait_for("READY=1")
        assert "STOPPING=1" not in told
        assert manager.wait_for("STATUS=joined")
        assert manager.fed_after()
        hub.send(name, wire.Drain(reason="the run is over"))
        told = manager.wait_for("STOPPING=1")
        assert "READY=1" not in told
        assert exit_code(process) == 0


def test_controller_is_ready_when_it_serves(manager: ServiceManagerSocket, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes/quickstart.toml"
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "starling.controller.shell.main", "--config", str(recipe), "--dir", str(folder)]
    flags = ["--run.id", "mine", "--network.curve", "false", "--controller.stop-s", "5", "--controller.drain-s", "1"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        manager.wait_for("READY=1")
        assert "waits for" in manager.wait_for("STATUS=")[-1]
        assert manager.fed_after()
        process.terminate()
        manager.wait_for("STOPPING=1")
        manager.wait_for("STATUS=ends")
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait(DEADLINE_S)
