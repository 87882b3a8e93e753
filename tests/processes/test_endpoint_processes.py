"""Health and metrics of real services over HTTP, the last scrape of a run, and how a stopped controller ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica

from starling.common.wire import messages as wire

WAIT_S = 300.0
LOADED = ("--policy.init", "random", "--policy.transport", "local", "--model.device", "cpu")
SCORER = """
def reward(completion, reference, prompt_text, metadata):
    return 1.0
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def asked(port: int, path: str) -> tuple[int, str]:
    """Return status and text of an answer; 0 where nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def await_answer(port: int, path: str, status: int, text: str = "") -> str:
    """Wait for an answer with this status, and this text in it; return it."""
    end = time.monotonic() + WAIT_S
    while True:
        found = asked(port, path)
        if found[0] == status and text in found[1]:
            return found[1]
        assert time.monotonic() < end, found
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("rollout-0", "starling_rollout_version -1"),
        ("policy-0", "starling_policy_version 0"),
        ("reward-0", 'starling_reward_latency_seconds_count{front_end="controller"} 0'),
    ],
)
def test_replica_is_ready_when_it_has_joined_and_shows_its_metrics(
    name: str, sample: str, hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    flags = ["--observe.http", f"127.0.0.1:{port}", "--model.path", str(model)]
    if name == "policy-0":
        flags += LOADED
    if name == "reward-0":
        (tmp_path / "mine.py").write_text(SCORER)
        (tmp_path / "rewards.toml").write_text(f'[[reward.scorers]]\nname = "{tmp_path}/mine.py:reward"\n')
        flags = [*flags[:2], "--config", str(tmp_path / "rewards.toml")]
    with replica(hub, name, tmp_path, *flags) as process:
        await_answer(port, "/readyz", 503)
        assert asked(port, "/healthz")[0] == 200
        hub.hello(name)
        await_answer(port, "/readyz", 200)
        text = await_answer(port, "/metrics", 200, f"\n{sample}\n")
        assert f'starling_service_info{{name="{name}"' in text
        hub.send(name, wire.Drain(reason="the run is over"))
        assert exit_code(process) == 0
    assert asked(port, "/healthz") == (0, "")


def test_controller_says_that_it_was_stopped_to_its_last_scrape_in_a_file_and_by_its_exit_code(tmp_path: Path) -> None:
    recipe, folder, port = Path(__file__).parents[2] / "recipes/quickstart.toml", tmp_path / "run", free_port()
    folder.mkdir()
    (folder / "outcome.json").write_text("of an earlier start")
    command = [sys.executable, "-m", "starling.controller.shell.main", "--config", str(recipe), "--dir", str(folder)]
    flags = ["--run.id", "mine", "--network.curve", "false", "--controller.stop-s", "5", "--controller.drain-s", "1"]
    flags += ["--observe.http", f"127.0.0.1:{port}", "--controller.stopped-exit-code", "75"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        await_answer(port, "/readyz", 200)
        assert not (folder / "outcome.json").exists()
        text = await_answer(port, "/metrics", 200, "\nstarling_run_incarnation 1\n")
        assert '\nstarling_run_outcome{outcome="stopped"} 0\n' in text
        process.send_signal(signal.SIGTERM)
        last = text
        while text:
            last = text
            _, text = asked(port, "/metrics")
            time.sleep(0.05)
        assert '\nstarling_run_outcome{outcome="stopped"} 1\n' in last
        assert '\nstarling_run_phase{phase="over"} 1\n' in last
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert re.search(r"^starling controller: the run was stopped by SIGTERM, and can be resumed$", errors, re.M)
        assert process.returncode == 75
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["reason"], outcome["version"]) == ("stopped", "stopped by SIGTERM", 0)
