"""Services with metrics: a small run, and a reward service."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_files import PATIENCE_S
from small_recipe import SMALL_RUN, write_prompts

RECIPE: Final = f"""{SMALL_RUN}
[run]
name = "metrics"

[launch]
num_rollouts = 1
screen = "plain"

[observe]
http = "127.0.0.1:0"

[sft]
num_steps = 3
examples_per_step = 4

[evaluation]
at_start = true
training_share = 1.0

[policy]
peak_tflops = 1.0

# On in every step: the alarm that is to reach the receiver of Alertmanager.
[policy.alarms]
entropy = 100.0
entropy_steps = 1

[reward]
num_workers = 1

[[reward.scorers]]
name = "{{folder}}/scorers.py:paced"

[[reward.scorers]]
name = "prefix_match"
label = "judge"
use = "evaluation"
"""

REWARDS: Final = """
[reward]
num_workers = 1

[[reward.scorers]]
name = "{folder}/scorers.py:length"

[reward.http]
enabled = true
port = 0
token = "secret"
"""

DECODERS: Final = """
[[reward.scorers]]
name = "{folder}/scorers.py:Shade"
label = "shade"

[reward.decoder]
folders = ["{folder}/vae"]
"""

SCORERS: Final = """
import time


def paced(completion, reference, prompt_text, metadata):
    time.sleep(0.05)  # so that the run leaves the machine to the others
    if prompt_text.startswith("d"):
        raise ValueError("a group without rewards")
    return completion.count("a") / 6


def length(completion, reference, prompt_text, metadata):
    return float(len(completion))


class Shade:
    media = "pixels"

    def score(self, batch):
        return [float(one.mean()) for one in batch.pixels]
"""


PROCESSES: Final = ("controller", "policy-0", "rollout-0", "reward-0")
"""Of the run."""


def start_run(
    stack: ExitStack, folder: Path, recipe: str = RECIPE
) -> tuple[subprocess.Popen[bytes], Mapping[str, str]]:
    """Start a run. Returns its process, and the addresses of the endpoints of its processes."""
    (folder / "recipe.toml").write_text(recipe.replace("{folder}", str(folder)))
    (folder / "scorers.py").write_text(SCORERS)
    write_prompts(folder)
    run = stack.enter_context(started(folder, "run", sys.executable, "-m", "starling.cli.main", "run", "recipe.toml"))
    logs = folder / "runs/metrics/attempt-1/logs"
    pattern = r"endpoint +role=\S+ url=http://([\d.:]+)"
    return run, {name: await_match(logs / f"{name}.log", pattern, run) for name in PROCESSES}


def start_rewards(stack: ExitStack, folder: Path, more: str = "") -> str:
    """Start a reward service. Returns its address, once it is ready."""
    (folder / "scorers.py").write_text(SCORERS)
    (folder / "rewards.toml").write_text((REWARDS + more).replace("{folder}", str(folder)))
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", "rewards.toml", "--dir", "."]
    service = stack.enter_context(started(folder, "reward", *command))
    address = await_match(folder / "reward.log", r"base_url=http://([\d.:]+)", service)
    await_all(lambda: asked(f"http://{address}/readyz").startswith('{"status":"ok"'))
    return address


def save_decoder(folder: Path) -> None:
    """Save a small VAE with random weights."""
    from diffusers import AutoencoderKLWan

    AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


@contextmanager
def started(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in `folder`, with its output in `<name>.log`; SIGTERM ends it, and SIGKILL all of its group."""
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def process_titled(title: str, folder: Path) -> psutil.Process:
    """Return the process of the run in `folder` that has this title."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if (process.info["cmdline"] or [""])[0] == f"starling: {title}" and process.info["cwd"] == str(folder)
    ]
    assert len(found) == 1, found
    return found[0]


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def await_all(*conditions: Callable[[], object]) -> None:
    """Wait until each condition has held."""
    for number, condition in enumerate(conditions):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"condition {number} does not hold"
            time.sleep(0.1)


def await_match(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """Return the first group of a pattern, once it is in the log of a process."""
    end = time.monotonic() + PATIENCE_S
    while (found := re.search(pattern, log.read_text() if log.exists() else "")) is None:
        assert process.poll() is None, log
        assert time.monotonic() < end, log
        time.sleep(0.05)
    return found[1]


def asked(url: str, body: object = None) -> str:
    """Return the answer to a request, also one with an error; empty where nothing listens yet."""
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())
    except OSError:
        return ""


def scrape(address: str) -> str:
    """Return the metrics of a service."""
    return asked(f"http://{address}/metrics")


def values(text: str) -> dict[str, float]:
    """Return the samples of metrics in the text format."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def labels_by_metric(*texts: str) -> dict[str, frozenset[str]]:
    """Return the labels of each metric that has samples, with the parser of Prometheus' own client."""
    found: dict[str, frozenset[str]] = {}
    for family in (family for text in texts for family in text_string_to_metric_families(text)):
        names = {family.name, f"{family.name}_total"} if family.type == "counter" else {family.name}
        found |= {name: found.get(name, frozenset()) for name in names}
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | sample.labels.keys()
    return found
