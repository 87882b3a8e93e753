"""Hostile scorers in one reward service beside an honest one: each attack ends in a typed failure of its own sample.

The honest scorer has workers of its own. Its requests are sent all the time, and each of them is answered.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_reward_http import Client, eventually, port_of

from starling.common.sandbox.launch import choose

PATIENCE_S = 120.0
MEMORY_MB = 512
SCORERS = """
import ctypes
import os
import socket
import sys
import time


def honest(completion, reference, prompt_text, metadata):
    return float(completion == reference)


def loop(completion, reference, prompt_text, metadata):
    while True:
        pass


def bomb(completion, reference, prompt_text, metadata):
    while True:
        if os.fork() == 0:
            while True:
                pass


def memory(completion, reference, prompt_text, metadata):
    return float(len(bytearray(10 << 30)))


def children(completion, reference, prompt_text, metadata):
    for _ in range(8):
        if os.fork() == 0:
            taken = bytearray(200 << 20)
            time.sleep(1000)
    time.sleep(1000)


def segfault(completion, reference, prompt_text, metadata):
    ctypes.string_at(0)


def exits(completion, reference, prompt_text, metadata):
    os._exit(7)


def flood(completion, reference, prompt_text, metadata):
    while True:
        print("x" * 1000)


def writes(completion, reference, prompt_text, metadata):
    with open(completion, "w") as file:
        return float(file.write("was here"))


def connects(completion, reference, prompt_text, metadata):
    with socket.create_connection(("127.0.0.1", int(completion)), timeout=5):
        return 1.0
"""
LIAR = """
import socket
import sys

from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.protocol import WorkerReady, frame

socket.socket(fileno=int(sys.argv[1])).sendall(frame(WorkerReady(((0, ScorerForm()), (99, ScorerForm())))))


def score(completion, reference, prompt_text, metadata):
    return 1.0
"""
SCORER = """
[[reward.scorers]]
name = "{folder}/{file}.py:{name}"
label = "{name}"
tasks = ["{name}"]
timeout_s = {timeout_s}
retries = 0
memory_mb = {memory_mb}
{more}
"""
HTTP = """
[reward]
num_workers = 1

[reward.http]
enabled = true
port = 0
"""
FAILURES = {
    "loop": ("reward_timeout", "took longer than 2 s"),
    "bomb": ("reward_error", "raised BlockingIOError: "),
    "memory": ("reward_error", f"exceeded its limit of {MEMORY_MB} MiB"),
    "children": ("reward_error", f"exceeded its limit of {MEMORY_MB} MiB"),
    "segfault": ("reward_error", "ended its worker process (signal SIGSEGV)"),
    "exits": ("reward_error", "ended its worker process (exit status 7)"),
    "flood": ("reward_timeout", "took longer than 2 s"),
    "writes": ("reward_error", "raised "),
    "connects": ("reward_error", "raised "),
}


def recipe(folder: Path, *, with_liar: bool = False) -> str:
    """Return the settings of a service with all scorers of `SCORERS`."""
    (folder / "hostile.py").write_text(SCORERS)
    (folder / "liar.py").write_text(LIAR)
    text = HTTP
    for name in ("honest", *FAILURES):
        more = {"honest": "num_workers = 1", "bomb": "needs = { max_tasks = 64 }"}.get(name, "")
        timeout_s = 2.0 if FAILURES.get(name, ("",))[0] == "reward_timeout" else 60.0
        fields = {"file": "hostile", "name": name, "timeout_s": timeout_s, "memory_mb": MEMORY_MB, "more": more}
        text += SCORER.format(folder=folder, **fields)
    if with_liar:
        fields = {"file": "liar", "name": "score", "timeout_s": 2.0, "memory_mb": 256, "more": "num_workers = 1"}
        text += SCORER.format(folder=folder, **fields)
    return text


@contextmanager
def service(folder: Path, text: str) -> Iterator[tuple[psutil.Process, Client]]:
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # the workers' user is another one
    (folder / "rewards.toml").write_text(text)
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(folder / "rewards.toml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen([*command, "--dir", str(folder)], stderr=log, env=environment, text=True) as process,
    ):
        try:
            client = Client(port_of(folder / "log", process))
            assert eventually(lambda: client.send("GET", "/readyz").status == 200), (folder / "log").read_text()
            yield psutil.Process(process.pid), client
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()
        finally:
            process.kill()


def ask(client: Client, task: str, completion: str) -> Any:
    sample = {"completion": completion, "reference": "abc", "metadata": {"task": task}}
    reply = client.send("POST", "/v1/rewards", {"samples": [sample], "wait_s": 60})
    assert reply.status == 200, reply
    return reply.body


class HonestClient:
    """Sends requests to the honest scorer, one after the other, until it is stopped."""

    def __init__(self, client: Client) -> None:
        self.rewards = list[float | None]()
        self._client, self._stopped = client, threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        while not self._stopped.wait(0.02):
            self.rewards += ask(self._client, "honest", "abc")["rewards"]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)


def attack(client: Client, name: str, completion: str, see: Callable[[], object]) -> None:
    body = ask(client, name, completion)
    see()
    status, problem = FAILURES[name]
    assert (body["rewards"], body["statuses"]) == ([None], [status]), (name, body)
    (sentences,) = body["problems"]
    assert sentences[0].startswith(f"scorer {name!r} {problem}"), (name, body)


@pytest.mark.skipif(not choose("auto").isolates, reason="this machine offers no namespaces")
def test_hostile_scorers_fail_alone_and_leave_nothing(tmp_path: Path) -> None:
    seen = set[psutil.Process]()
    written = tmp_path / "written"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        service(tmp_path, recipe(tmp_path)) as (process, client),
    ):
        server.setblocking(False)
        ask(client, "honest", "abc")
        num_files = process.num_fds()
        honest = HonestClient(client)
        try:
            for name in FAILURES:
                completion = {"writes": str(written), "connects": str(server.getsockname()[1])}.get(name, name)
                attack(client, name, completion, lambda: seen.update(process.children(recursive=True)))
        finally:
            honest.stop()
        assert len(honest.rewards) > len(FAILURES)
        assert set(honest.rewards) == {1.0}
        assert not written.exists()
        with pytest.raises(BlockingIOError):
            server.accept()
        assert eventually(lambda: process.num_fds() <= num_files), "descriptors of ended workers are open"
        assert eventually(lambda: len(process.children(recursive=True)) < 32), "what was forked lives on"
    assert len(seen) > 10
    _, alive = psutil.wait_procs(seen, PATIENCE_S)
    assert not alive
    log = (tmp_path / "log").read_text(errors="replace")
    assert "sandbox_output_dropped" in log
    assert len(log) < 4 << 20


@pytest.mark.skipif(not choose("auto").isolates, reason="this machine offers no namespaces")
def test_scorer_that_lies_about_its_keys_is_quarantined_and_the_others_go_on(tmp_path: Path) -> None:
    with service(tmp_path, recipe(tmp_path, with_liar=True)) as (_, client):
        assert eventually(lambda: client.send("GET", "/readyz").body["status"] == "degraded")
        reply = client.send("GET", "/readyz")
        assert reply.status == 200
        assert reply.body["quarantined"] == {"score": "sent a message in its worker's name"}
        body = ask(client, "score", "abc")
        assert body["statuses"] == ["reward_error"]
        assert "is quarantined, since no worker of it can be started" in body["problems"][0][0]
        assert ask(client, "honest", "abc")["rewards"] == [1.0]
        assert "starling_reward_scorers_quarantined 1.0" in client.send("GET", "/metrics").body
    assert re.search(r"scorer_quarantined .*scorer=score", (tmp_path / "log").read_text())
