"""Weights in a real run on several machines: from a publication to the last adoption, over links of a known rate.

    OMP_NUM_THREADS=1 python bench/weightsync_run.py [--quick] [--engine transformers|vllm]

Needs root and the commands `ip`, `tc`, `unshare` and `hostname`: controller, policy and reward run as `starling run`
starts them on one host, and each rollout by `starling-rollout` on a host of its own, with one of the run's keys. A host
is a network namespace with a name of its own; `tc tbf` limits its link to 200 Mbit/s both ways. Weights travel over
encrypted tcp, as between any hosts.

The model has 37 MiB in float32, all of which changes in each step. Steps are synchronous, and a scorer takes so long
that every rollout has each version before the next one is published. By number of rollouts: the median seconds from a
publication to the last adoption of the version, and how many models left the policy's host for each version, with all
headers and messages. Both engines pull the same bytes; vLLM's run without compilation, and with a small KV cache.

- `relays`: the controller lets rollouts read from each other, as by default (decision 0044).
- `direct`: all read from the policy (`controller.relay_from_mb`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import tomli_w
from figure import machine, print_figure, progress, rounded, versions
from weightsync_fanout import Host, missing, network

BENCH: Final = "weightsync_run"
LINK_MBIT: Final = 200
NUM_STEPS: Final = 5
KV_CACHE_MB: Final = 64
"""Of each vLLM engine: eight of them share one machine here."""
START_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 900.0
GOALS: Final = {"seconds_over_one": 1.5, "egress_in_models": 1.1}
MODEL: Final = {
    "model_type": "qwen3",
    "alphabet": "abcdefghijklmnopqrstuvwxyz>",
    "max_length": 64,
    "config": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
SCORER: Final = """
import time
def score(completion, reference, prompt_text, metadata):
    time.sleep({seconds})
    return float(len(completion) % 3)
"""
EXECUTABLES: Final = Path(sys.executable).parent


@dataclass(frozen=True)
class Outcome:
    """One run: for each version that all rollouts adopted, the seconds until the last one did; and the models sent."""

    seconds: list[float]
    egress_in_models: float
    size_bytes: int

    @property
    def median_s(self) -> float:
        """Return the median of the versions."""
        return median(self.seconds)


def recipe(folder: Path, host: str, engine: str, num: int, *, relays: bool) -> dict[str, Any]:
    """Return the recipe of a run; `folder` has the scorer and the data."""
    transfer_s = 2.0
    wait_s = 4.0 + transfer_s * (1 if relays else num)
    (folder / "slow.py").write_text(SCORER.format(seconds=wait_s))
    words = [json.dumps({"prompt": f"{chr(97 + n % 26) * 4}>", "reference": "x"}) for n in range(256)]
    (folder / "words.jsonl").write_text("\n".join(words) + "\n")
    return {
        "run": {"name": "run", "kind": "rl", "folder": str(folder)},
        "launch": {"num_rollouts": 0, "screen": "plain"},
        "network": {"host": host},
        "model": {"scratch": MODEL, "device": "cpu"},
        "data": {"source": str(folder / "words.jsonl"), "format": "{prompt}", "reference_column": "reference"},
        "rl": {"num_steps": NUM_STEPS, "prompts_per_step": 8, "group_size": 2, "max_staleness": 0},
        "sampling": {"max_tokens": 8},
        "controller": {"num_rollouts": num, "save_every": 0, "relay_from_mb": 0.0 if relays else 1e6},
        "rollout": {"engine": engine, "num_slots": 8, "vllm": {"kv_cache_mb": KV_CACHE_MB, "enforce_eager": True}},
        "reward": {
            "num_slots": 8,
            "num_workers": 8,
            "scorers": [{"name": f"{folder / 'slow.py'}:score", "timeout_s": wait_s + 60}],
        },
    }


def on_host(host: Host, *command: str) -> list[str]:
    """Return a command that runs on a host, which has a name of its own."""
    named = f'hostname {host.namespace} && exec "$@"'
    return ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", named, "sh", *command]


def sent_bytes(host: Host) -> int:
    """Return how many bytes have left a host over its link, with the headers of each packet."""
    shown = subprocess.run(
        ["tc", "-n", host.namespace, "-s", "-j", "qdisc", "show", "dev", "eth0"],
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    return next(int(limiter["bytes"]) for limiter in json.loads(shown) if limiter["kind"] == "tbf")


def make_keys(folder: Path, *names: str) -> None:
    """Make the keys of replicas."""
    command = [EXECUTABLES / "starling", "keys", "make", folder, *names]
    subprocess.run(command, check=True, timeout=60, stdout=sys.stderr)  # standard output is for figures only


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with a log, and end it."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(engine: str, num: int, *, relays: bool) -> Outcome:
    """Run once with `num` rollouts."""
    with (
        tempfile.TemporaryDirectory(prefix="starling-run-") as temporary,
        network(num + 1, LINK_MBIT) as (trainer, *hosts),
        contextlib.ExitStack() as stack,
    ):
        folder = Path(temporary)
        file, attempt = folder / "recipe.toml", folder / "run" / "attempt-1"
        file.write_text(tomli_w.dumps(recipe(folder, trainer.address, engine, num, relays=relays)))
        command = on_host(trainer, str(EXECUTABLES / "starling"), "run", str(file))
        run = stack.enter_context(started(command, folder / "run.log"))
        await_file(attempt / "controller.json", run, folder / "run.log")
        await_file(attempt / "model", run, folder / "run.log")  # made meanwhile; a rollout needs it at its start
        names = [f"rollout-{number}" for number in range(num)]
        make_keys(attempt / "keys", *names)
        address = json.loads((attempt / "controller.json").read_text())["address"]
        for name, host in zip(names, hosts, strict=True):
            (folder / name).mkdir()
            own = ["--config", str(attempt / "config.toml"), "--dir", str(folder / name), "--name", name]
            own += ["--key", str(attempt / "keys" / f"{name}.json"), "--controller", address]
            own += ["--network.host", host.address]
            command = on_host(host, str(EXECUTABLES / "starling-rollout"), *own)
            stack.enter_context(started(command, folder / f"{name}.log"))
        egress = Egress(trainer, attempt / "metrics.jsonl")
        while run.poll() is None:
            egress.look()
            if time.monotonic() - egress.began > RUN_TIMEOUT_S:
                raise SystemExit(f"the run did not end within {RUN_TIMEOUT_S:g} s:\n{tail(folder / 'run.log')}")
            time.sleep(0.05)
        if run.returncode:
            raise SystemExit(f"the run failed:\n{tail(folder / 'run.log')}")
        return outcome(attempt / "metrics.jsonl", num, egress)


class Egress:
    """The bytes that have left the policy's host when each version was published."""

    def __init__(self, host: Host, metrics: Path) -> None:
        self._host, self._metrics = host, metrics
        self.began = time.monotonic()
        self.at: dict[int, int] = {}

    def look(self) -> None:
        """Read the counter when a new version has been published."""
        if self._metrics.exists():
            newest = max((line["version"] for line in read(self._metrics) if line["kind"] == "published"), default=-1)
            if newest not in self.at:
                self.at[newest] = sent_bytes(self._host)


def await_file(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > end or process.poll() is not None:
            raise SystemExit(f"the run does not start:\n{tail(log)}")
        time.sleep(0.1)


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-4000:]


def read(metrics: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of metrics."""
    return [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]


def outcome(metrics: Path, num: int, egress: Egress) -> Outcome:
    """Return what a run measured, over the versions after the first one, which rollouts adopt as they join."""
    lines = read(metrics)
    published = {line["version"]: line["time"] for line in lines if line["kind"] == "published"}
    adopted: dict[int, list[float]] = {}
    for line in lines:
        if line["kind"] == "adopted" and line["attested"]:
            adopted.setdefault(line["version"], []).append(line["time"])
    size_bytes = next(line["size_bytes"] for line in lines if line["kind"] == "adopted")
    measured = [version for version in range(1, NUM_STEPS) if len(adopted.get(version, ())) == num]
    if not measured:
        raise SystemExit(f"no version was adopted by all of {num} rollouts before the next one: {adopted}")
    seconds = [max(adopted[version]) - published[version] for version in measured]
    models = [(egress.at[version + 1] - egress.at[version]) / size_bytes for version in measured]
    return Outcome(seconds, median(models), size_bytes)


def report(engine: str, relayed: dict[int, Outcome], direct: dict[int, Outcome]) -> None:
    """Print the figures."""
    most = max(relayed)
    detail = {
        "engine": engine,
        "link_mbit_per_s": LINK_MBIT,
        "model_bytes": relayed[most].size_bytes,
        "seconds": {num: [rounded(s) for s in one.seconds] for num, one in relayed.items()},
        "egress_in_models": {num: rounded(one.egress_in_models) for num, one in relayed.items()},
        "seconds_direct": {num: [rounded(s) for s in one.seconds] for num, one in direct.items()},
        "egress_in_models_direct": {num: rounded(one.egress_in_models) for num, one in direct.items()},
        **machine(),
        "versions": versions("torch", "pyzmq"),
    }
    ratio = relayed[most].median_s / relayed[min(relayed)].median_s
    for figure, value, unit, goal in (
        (f"seconds_{most}_over_{min(relayed)}_{engine}", ratio, "ratio", GOALS["seconds_over_one"]),
        (f"egress_in_models_{most}_{engine}", relayed[most].egress_in_models, "models", GOALS["egress_in_models"]),
    ):
        print_figure(BENCH, figure, value, unit=unit, goal=goal, better="lower", detail=detail)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one and four rollouts, with relays only")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments = parser.parse_args()
    if reason := missing():
        figure = f"seconds_8_over_1_{arguments.engine}"
        print_figure(BENCH, figure, None, unit="ratio", better="lower", detail={"reason": reason})
        return 0
    relayed: dict[int, Outcome] = {}
    direct: dict[int, Outcome] = {}
    for num in (1, 4) if arguments.quick else (1, 2, 4, 8):
        for relays, kept in ((True, relayed), (False, direct)):
            if relays or (not arguments.quick and num in (1, 8)):
                kept[num] = one = measure(arguments.engine, num, relays=relays)
                progress(
                    f"{num} rollouts, {'relays' if relays else 'direct'}: {one.median_s:.2f} s, "
                    f"{one.egress_in_models:.2f} models"
                )
    report(arguments.engine, relayed, direct)
    return 0


if __name__ == "__main__":
    sys.exit(main())
