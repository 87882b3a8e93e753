"""Cold start of engines from S3: one policy reads the model and fans it out, compared with each engine reading it.

    OMP_NUM_THREADS=1 python bench/weightsync_cold_start.py [--quick]

Needs root and the commands `ip`, `tc`, `unshare` and `hostname`. The store (moto's S3), the policy and each engine are
on a host of its own, a network namespace whose link `tc tbf` limits to 200 Mbit/s both ways. The model has 90 MiB.

- `fanned out`: controller, policy and rollouts as `starling serve` with `launch.fan_out` starts them. The rollouts wait
  without weights; the policy then starts, with `policy.weights_from`, and they pull from it and from each other
  (decisions 0044 and 0047). From the first bytes that leave the store until the last rollout has proven what it holds.
- `alone`: one process for each engine copies the model from the store and loads it, all at the same moment, by the
  functions that the policy uses. From that moment until the last one has loaded it.

Both include the load from the files, and neither the start of the processes. The bytes out of the store are counted by
its link, with all headers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import median
from typing import Any, Final

import tomli_w
from figure import machine, print_figure, progress, rounded, versions
from weightsync_fanout import Host, Worker, missing, network
from weightsync_run import EXECUTABLES, await_file, make_keys, on_host, read, sent_bytes, started, tail

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.policy.train.checkpoint.source import whole_model
from starling.policy.train.model.load import load_model

BENCH: Final = "weightsync_cold_start"
LINK_MBIT: Final = 200
PORT: Final = 5000
URL: Final = "s3://models/cold"
START_TIMEOUT_S, RUN_TIMEOUT_S = 180.0, 180.0
BEGUN_BYTES: Final = 64 << 10
"""The first bytes out of the store: more than listing the model takes."""
GOALS: Final = {"seconds_over_alone": 0.5, "store_reads_in_models": 1.1}
MODEL: Final = {
    "model_type": "qwen3",
    "alphabet": "abcdefghijklmnopqrstuvwxyz>",
    "max_length": 64,
    "config": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Outcome:
    """One cold start of several engines."""

    seconds: float
    store_bytes: int


@dataclass(frozen=True)
class Models:
    """The model's folders on this machine."""

    whole: Path
    empty: Path
    """Without weights: what an engine has before its cold start."""

    @property
    def size_bytes(self) -> int:
        """Size of the weights."""
        return sum(path.stat().st_size for path in self.whole.glob("*.safetensors"))


def make_models(folder: Path) -> Models:
    """Make a model with random weights."""
    models = Models(folder / "whole", folder / "empty")
    make_model_folder(ScratchSettings.model_validate(MODEL), models.whole)
    load_model(models.whole, init="random").save_pretrained(models.whole, max_shard_size="16MB")
    copytree(models.whole, models.empty, ignore=ignore_patterns("*.safetensors*"))
    return models


def options(store: Host) -> dict[str, str]:
    """Return fsspec's options for the store."""
    return {"endpoint_url": f"http://{store.address}:{PORT}", "key": "testing", "secret": "testing"}


# --- what workers do -----------------------------------------------------------------------------------------------


def fill_store(whole: Path, access: dict[str, str]) -> None:
    """Put the model into the store, from its own host."""
    import s3fs

    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(access["endpoint_url"], timeout=5.0).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    store = s3fs.S3FileSystem(**access)
    store.mkdir("models")
    for file in whole.iterdir():
        store.put_file(str(file), f"{URL}/{file.name}")


def load_alone(empty: Path, access: dict[str, str], place: Path) -> None:
    """Copy the model from the store, and load it."""
    with whole_model(empty, URL, access, place) as folder:
        load_model(folder)


# --- both sides ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def filled_store(store: Host, models: Models, folder: Path) -> Iterator[None]:
    """Serve the model by S3 on a host."""
    command = ["ip", "netns", "exec", store.namespace, sys.executable, "-m", "moto.server"]
    with started([*command, "-H", store.address, "-p", str(PORT)], folder / "store.log"):
        worker = Worker(store)
        try:
            worker.call(fill_store, models.whole, options(store))
        finally:
            worker.close()
        yield


def measure_alone(num: int, models: Models) -> Outcome:
    """Have `num` engines load the model by themselves."""
    with (
        tempfile.TemporaryDirectory(prefix="starling-cold-") as temporary,
        network(1 + num, LINK_MBIT) as (store, *hosts),
        filled_store(store, models, Path(temporary)),
        contextlib.ExitStack() as stack,
    ):
        workers = []
        for host in hosts:
            workers.append(Worker(host))
            stack.callback(workers[-1].close)
        before, begin = sent_bytes(store), time.monotonic()
        for number, worker in enumerate(workers):
            worker.begin(load_alone, models.empty, options(store), Path(temporary) / f"engine-{number}")
        for worker in workers:
            worker.take()
        return Outcome(time.monotonic() - begin, sent_bytes(store) - before)


def recipe(store: Host, source: Host, num: int) -> dict[str, Any]:
    """Return the settings of all services."""
    return {
        "run": {"kind": "serve", "id": "cold"},
        "network": {"host": source.address},
        "policy": {"weights_from": URL, "saving": {"storage_options": options(store)}},
        "data": {"source": ""},
        "controller": {"fan_out": True, "num_rollouts": num},
        "model": {"device": "cpu"},
    }


def measure_fanned_out(num: int, models: Models) -> Outcome:
    """Have one policy load the model, and `num` rollouts pull it."""
    with (
        tempfile.TemporaryDirectory(prefix="starling-cold-") as temporary,
        network(2 + num, LINK_MBIT) as (store, source, *hosts),
        filled_store(store, models, Path(temporary)),
        contextlib.ExitStack() as stack,
    ):
        folder = Path(temporary)
        config, run = folder / "serve.toml", folder / "run"
        run.mkdir()
        names = [f"rollout-{number}" for number in range(num)]
        make_keys(run / "keys", "policy-0", *names)
        config.write_text(tomli_w.dumps(recipe(store, source, num)))
        shared = ["--config", str(config), "--dir"]
        command = on_host(source, str(EXECUTABLES / "starling-controller"), *shared, str(run))
        controller = stack.enter_context(started(command, folder / "controller.log"))
        await_file(run / "controller.json", controller, folder / "controller.log")
        address = json.loads((run / "controller.json").read_text())["address"]

        def start(role: str, name: str, host: Host) -> subprocess.Popen[bytes]:
            (folder / name).mkdir()
            words = [*shared, str(folder / name), "--name", name, "--key", str(run / "keys" / f"{name}.json")]
            words += ["--controller", address, "--model.path", str(models.empty), "--network.host", host.address]
            command = on_host(host, str(EXECUTABLES / f"starling-{role}"), *words)
            return stack.enter_context(started(command, folder / f"{name}.log"))

        for name, host in zip(names, hosts, strict=True):
            start("rollout", name, host)
        metrics = run / "metrics.jsonl"
        await_lines(metrics, "joined", num, controller, folder / "controller.log")
        before = sent_bytes(store)
        policy = start("policy", "policy-0", source)
        end = time.monotonic() + RUN_TIMEOUT_S
        while sent_bytes(store) - before < BEGUN_BYTES:
            if time.monotonic() > end or policy.poll() is not None:
                raise SystemExit(f"the policy reads nothing:\n{tail(folder / 'policy-0.log')}")
            time.sleep(0.02)
        begin = time.monotonic()
        await_lines(metrics, "adopted", num, policy, folder / "policy-0.log")
        return Outcome(time.monotonic() - begin, sent_bytes(store) - before)


def await_lines(metrics: Path, kind: str, num: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until as many rollouts have joined, or have adopted and proven the model."""
    end = time.monotonic() + RUN_TIMEOUT_S
    while True:
        lines = [line for line in (read(metrics) if metrics.exists() else []) if line["kind"] == kind]
        if len({line["replica"] for line in lines if kind == "joined" or line["attested"]}) >= num:
            return
        if time.monotonic() > end or process.poll() is not None:
            raise SystemExit(f"{len(lines)} of {num} rollouts have {kind}:\n{tail(log)}")
        time.sleep(0.05)


def report(num: int, models: Models, fanned: Sequence[Outcome], alone: Sequence[Outcome]) -> None:
    """Print the figures."""
    size = models.size_bytes
    sides = {"fanned_out": fanned, "alone": alone}
    models_read = {name: [rounded(one.store_bytes / size) for one in side] for name, side in sides.items()}
    detail = {
        "num_engines": num,
        "link_mbit_per_s": LINK_MBIT,
        "model_bytes": size,
        "rounds": len(fanned),
        "seconds": {name: [rounded(one.seconds) for one in side] for name, side in sides.items()},
        "store_reads_in_models": models_read,
        **machine(),
        "versions": versions("torch", "transformers", "s3fs"),
    }
    ratio = median(one.seconds for one in fanned) / median(one.seconds for one in alone)
    reads = median(one.store_bytes for one in fanned) / size
    for figure, value, unit in (("seconds_over_alone", ratio, "ratio"), ("store_reads_in_models", reads, "models")):
        print_figure(BENCH, f"{figure}_{num}", value, unit=unit, goal=GOALS[figure], better="lower", detail=detail)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four engines, once")
    arguments = parser.parse_args()
    num, rounds = (4, 1) if arguments.quick else (8, 2)
    if reason := missing():
        figure = f"seconds_over_alone_{num}"
        print_figure(BENCH, figure, None, unit="ratio", goal=None, better="lower", detail={"reason": reason})
        return 0
    fanned: list[Outcome] = []
    alone: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="starling-cold-model-") as temporary:
        models = make_models(Path(temporary))
        for _ in range(rounds):
            for name, side, measure in (("fanned out", fanned, measure_fanned_out), ("alone", alone, measure_alone)):
                side.append(measure(num, models))
                num_models = side[-1].store_bytes / models.size_bytes
                progress(f"{num} engines, {name}: {side[-1].seconds:.2f} s, {num_models:.2f} models read")
        report(num, models, fanned, alone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
