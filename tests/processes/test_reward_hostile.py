"""Hostile scorers in one reward service beside an honest one: each attack ends in a typed failure of its own sample.

The honest scorer has workers of its own. Its requests are sent all the time, and each of them is answered.
"""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_processes import Client, eventually, run_service

from starling.common.sandbox.launch import choose

PATIENCE_S = 120.0
MEMORY_MB = 512
SCORERS = Path(__file__).parents[2] / "bench" / "hostile_scorers.py"
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
HTTP = SCORERS.with_name("honest_scorer.toml").read_text()
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

UNKNOWN_EXIT = "(it closed its connection"
"""The service waits 0.2 s for a worker to exit; a busy machine may take longer, and the cause is then unknown."""
MAX_TRIES = 5


def recipe(folder: Path, *, with_liar: bool = False) -> str:
    """Return the settings of a service with an honest scorer and all hostile ones."""
    (folder / "hostile.py").write_text(SCORERS.read_text())
    (folder / "liar.py").write_text(LIAR)
    text = HTTP
    for name, (status, _) in FAILURES.items():
        more = "needs = { max_tasks = 64 }" if name == "bomb" else ""
        timeout_s = 2.0 if status == "reward_timeout" else 60.0
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
    with run_service(folder, text) as (process, port):
        client = Client(port)
        assert eventually(lambda: client.send("GET", "/readyz").status == 200), (folder / "log").read_text()
        yield psutil.Process(process.pid), client
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()


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
    status, problem = FAILURES[name]
    for _ in range(MAX_TRIES):
        body = ask(client, name, completion)
        see()
        assert (body["rewards"], body["statuses"]) == ([None], [status]), (name, body)
        (sentences,) = body["problems"]
        if UNKNOWN_EXIT not in sentences[0]:
            break
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
