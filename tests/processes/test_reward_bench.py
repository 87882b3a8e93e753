"""`starling reward bench` against a service: what it counts, prints and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from reward_processes import PATIENCE_S
from test_reward_http import service

PIXELS = """
[[reward.scorers]]
name = "{folder}/pixels.py:Brightness"
label = "brightness"
tasks = ["video"]
"""
SCORER = """
class Brightness:
    media = "pixels"
    batch_size = 8

    def score(self, batch):
        return {"score": [float(one.mean()) / 255.0 for one in batch.pixels]}
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "pixels.py").write_text(SCORER)
    with service(folder, 'token = "secret"\n' + PIXELS.format(folder=folder)) as (_, found):
        yield found


def bench(*flags: str, token: str = "secret") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starling.reward.shell.main", "bench", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WFM_REWARD_TOKEN": token}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    "flags",
    [
        ("--completion", "abc"),
        ("--media", "video", "--metadata", '{"task": "video"}'),
        ("--media", "image", "--shape", "32,48", "--metadata", '{"task": "video"}'),
    ],
)
def test_every_sample_is_counted_once(port: int, flags: tuple[str, ...]) -> None:
    done = bench(
        "--url", f"http://127.0.0.1:{port}", "--requests", "7", "--batch", "5", "--clients", "3", "--json", *flags
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == 35
    assert found["statuses"] == {"ok": 35}
    assert found["rewards_per_s"] > 0
    assert 0 < found["request_p50_s"] <= found["request_p90_s"] <= found["request_p99_s"] <= found["seconds"]


def test_samples_without_a_reward_are_counted_and_the_reason_is_printed(port: int) -> None:
    done = bench("--url", f"http://127.0.0.1:{port}", "--requests", "2", "--batch", "3", "--completion", "exit")
    assert done.returncode == 1
    assert "{'reward_error': 6}" in done.stdout
    assert "6 samples have no reward: scorer 'right' ended its worker process (exit status 3)." in done.stderr


@pytest.mark.parametrize(
    ("flags", "token", "problem"),
    [
        (("--batch", "0"), "secret", "--batch is 0; give a number from 1"),
        (("--media", "video", "--shape", "3"), "secret", "--shape is '3'; give T,H,W"),
        (("--shape", "3"), "secret", "--shape is for --media"),
        (("--metadata", "[]"), "secret", "--metadata must be a JSON object"),
        (("--url", "http://127.0.0.1:9/api/reward/enqueue"), "secret", "give --scorer LABEL"),
        ((), "wrong", "401"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(port: int, flags: tuple[str, ...], token: str, problem: str) -> None:
    done = bench("--url", f"http://127.0.0.1:{port}", *flags, token=token)
    assert done.returncode == (1 if problem == "401" else 2)
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_service_that_is_not_there_ends_the_measurement() -> None:
    done = bench("--url", "http://127.0.0.1:9", "--timeout", "3")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1/rewards did not answer" in done.stderr
