"""Media over HTTP, with a service as a process of its own: scores, refusals, quarantine, and what is left of it all."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_processes import Client, Reply, eventually, run_service

SCORER = """
import os
import time

class Sum:
    media = "pixels"
    batch_size = 4

    def score(self, batch):
        for text in batch.completions:
            if text == "hang":
                time.sleep(3600.0)
            if text == "exit":
                os._exit(3)
        return {"score": [float(clip.sum()) + fps for clip, fps in zip(batch.pixels, batch.fps)]}

def size(completion, reference, prompt_text, metadata):
    return float(len(completion))
"""
RECIPE = """
[reward]
num_workers = 2

[[reward.scorers]]
name = "{folder}/mine.py:Sum"
label = "sum"
timeout_s = 2.0
retries = 0
tasks = ["video"]

[[reward.scorers]]
name = "{folder}/mine.py:Sum"
label = "slow"
timeout_s = 8.0
retries = 0
tasks = ["slow"]

[[reward.scorers]]
name = "{folder}/mine.py:size"
label = "size"

[reward.http]
enabled = true
port = 0
max_memory_mb = 32
max_body_mb = 16
"""


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    (folder / "mine.py").write_text(SCORER)
    with run_service(folder, RECIPE.format(folder=folder)) as (process, port):
        client = Client(port)
        assert eventually(lambda: client.send("GET", "/readyz").status == 200)
        yield process, client


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Client, Path]]:
    folder = tmp_path_factory.mktemp("service")
    with service(folder) as (process, client):
        yield process, client, folder


@pytest.fixture
def client(running: tuple[subprocess.Popen[str], Client, Path]) -> Client:
    return running[1]


def sample(value: int, text: str = "", *, side: int = 8, task: str = "video") -> dict[str, Any]:
    stream = io.BytesIO()
    np.save(stream, np.full((2, side, side, 3), value, np.uint8), allow_pickle=False)
    media = {"kind": "pixels", "npy": base64.b64encode(stream.getvalue()).decode(), "fps": 16.0}
    return {"completion": text, "media": media, "metadata": {"task": task}}


def ask(client: Client, *samples: dict[str, Any], wait_s: float = 30.0) -> Reply:
    return client.send("POST", "/v1/rewards", {"samples": samples, "wait_s": wait_s})


def metric(client: Client, name: str) -> float:
    lines = client.send("GET", "/metrics").body.splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def test_clips_of_any_size_are_scored_beside_texts(client: Client) -> None:
    reply = ask(client, sample(1, "ab"), sample(2, side=4), {"completion": "abc", "metadata": {"task": "text"}})
    assert reply.status == 200, reply
    assert reply.body["rewards"] == [2 * 64 * 3 + 16.0 + 2, 2 * 2 * 16 * 3 + 16.0, 3.0]
    assert reply.body["scores"]["sum"] == [400.0, 208.0, None]


def test_large_body_is_scored(client: Client) -> None:
    """It is read in a thread of its own, in many parts."""
    reply = ask(client, sample(1, side=600), sample(2, side=601))
    assert reply.body["scores"]["sum"] == [2 * 600 * 600 * 3 + 16.0, 2 * 2 * 601 * 601 * 3 + 16.0]


def test_sample_without_media_is_refused(client: Client) -> None:
    reply = ask(client, sample(1), {"completion": "abc", "metadata": {"task": "video"}})
    assert reply.status == 422
    assert reply.body["detail"].startswith("sample 1 has no pixels, which scorer 'sum' reads; send them with it")


def test_clip_that_ends_its_worker_fails_alone(client: Client) -> None:
    reply = ask(client, sample(1), sample(1, "exit"), sample(2), sample(1, "hang"))
    assert reply.body["statuses"] == ["ok", "reward_error", "ok", "reward_timeout"]
    assert reply.body["scores"]["sum"] == [400.0, None, 784.0, None]


def test_lost_clip_is_kept_and_scored_again(tmp_path: Path) -> None:
    with service(tmp_path) as (_, client):
        ask(client, sample(3, "exit"))
        assert eventually(lambda: bool(list((tmp_path / "quarantine").glob("*.json"))))
    (file,) = (tmp_path / "quarantine").glob("*.json")
    recipe = str(tmp_path / "rewards.toml")
    command = [sys.executable, "-m", "starling.reward.shell.main", "replay", str(file), "--config", recipe]
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 1
    assert "ended its worker process (exit status 3)" in again.stdout
    (tmp_path / "mine.py").write_text(SCORER.replace("os._exit(3)", "pass"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.stdout == f"{file}: {2 * 64 * 3 * 3 + 16.0}\n", again.stderr


def test_media_count_for_the_limit_on_memory(client: Client) -> None:
    """Requests that are held by a scorer that hangs fill the memory, and it is free when they are removed."""
    held = [ask(client, sample(1, "hang", side=1200, task="slow"), wait_s=0.0) for _ in range(6)]
    statuses = [reply.status for reply in held]
    assert statuses[0] == 202
    assert statuses[-1] == 429, statuses
    refused = held[statuses.index(429)]
    assert "MiB of reward.http.max_memory_mb" in refused.body["detail"]
    assert "retry-after" in refused.headers
    for reply in held:
        if reply.status == 202:
            assert client.send("DELETE", f"/v1/rewards/{reply.body['id']}").status == 204
    # A call that runs continues up to its limit, with its media.
    assert eventually(lambda: metric(client, "starling_reward_held_bytes ") < 1 << 20)
    assert ask(client, sample(1)).status == 200


def test_service_keeps_nothing_of_hundreds_of_requests(
    running: tuple[subprocess.Popen[str], Client, Path],
) -> None:
    """Answered, cancelled, refused and ended ones: no descriptor, and no memory but that of results."""
    process, client, _ = running

    def descriptors() -> list[str]:
        found = []
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{process.pid}/fd/{name}"))
            except FileNotFoundError:
                continue
        return [one for one in found if "starling-media" in one]

    bad = sample(1)
    bad["media"] = {**bad["media"], "npy": bad["media"]["npy"][:-4] + "AAAA"}
    ids = []
    for number in range(200):
        match number % 10:
            case 3:
                assert ask(client, sample(1), bad).status == 422
            case 5:
                reply = ask(client, sample(1), sample(2), wait_s=0.0)
                assert client.send("DELETE", f"/v1/rewards/{reply.body['id']}").status == 204
            case 7 if number < 100:
                ids.append(ask(client, sample(1), sample(1, "exit")).body["id"])
            case 8 if number < 30:
                reply = ask(client, sample(1, "hang"), wait_s=0.0)
                assert client.send("DELETE", f"/v1/rewards/{reply.body['id']}").status == 204
            case _:
                ids.append(ask(client, sample(1), sample(2)).body["id"])
    assert eventually(lambda: not descriptors()), descriptors()
    for id in ids:
        assert client.send("DELETE", f"/v1/rewards/{id}").status == 204
    assert eventually(lambda: metric(client, "starling_reward_held_bytes ") < 1 << 16)
