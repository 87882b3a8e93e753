"""Quick benches of `make bench-check`: the costs of a start, an event, a round trip and a step.

    python bench/check_samples.py start|core|wire|loop [--rounds N]

    start  `starling --help`
    core   the controller's core, 256 rollouts (`controller.py`)
    wire   round trips of a `ControllerLink`, 16 in flight (`wire.py`)
    loop   a run of 40 steps of a tiny model: from the start of the process to the first step, and the steps after it

Processor seconds are user and system time of all processes that take part. They depend less on other load of the
machine than wall clock does, but do not see a wait. So figures exist of both kinds where a wait is possible. The run
has one rollout and no staleness: its services work one after the other, so that a wait of any of them makes the step
longer by as much, and no overlap hides it. From the wall clock of a step the time is subtracted in which its services
waited for a core (`check_processes.py`), and the lower quartile is taken over a run's steps, those that other load
disturbed least. Prints the median of N samples (1 by default).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from check_processes import Delays, cpu_of_process, cpu_of_tree, delay_s, descendants, run_delays
from figure import machine, print_figure, quantile, rounded

HERE = Path(__file__).resolve().parent
NUM_STEPS = 40
RUN_TIMEOUT_S = 240.0
POLL_S = 0.005
HELP_CALLS = 5
CORE_SIZE = (256, 8)
"""Rollouts and steps of the run that the core decides."""
CORE_RUNS = 3
ROUND_TRIPS, IN_FLIGHT, EXCHANGES = 4000, 16, 4
GOALS = {"first_step_s": 3.5}
MODEL = {
    "model_type": "qwen3",
    "alphabet": "abcdefghijklmnopqrstuvwxyz>",
    "max_length": 64,
    "config": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Cost:
    """One sample of a figure."""

    figure: str
    value: float
    unit: str


# --- the start of the command line -----------------------------------------------------------------------------------


def sample_start() -> list[Cost]:
    """Processor seconds of `starling --help`, the least of some calls."""
    command = [str(Path(sys.executable).with_name("starling")), "--help"]
    spent = []
    for _ in range(HELP_CALLS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [Cost("help_cpu_s", min(spent), "CPU s")]


# --- the controller's core -------------------------------------------------------------------------------------------


def sample_core() -> list[Cost]:
    """Processor microseconds of an event in the core, the least of some runs."""
    from controller import measure_run

    from starling.common.observe.process import collect_seldom

    collect_seldom()  # as the controller's process does
    measure_run(32, 2)
    runs = [measure_run(*CORE_SIZE, clock=time.thread_time) for _ in range(CORE_RUNS)]
    return [Cost("event_cpu_us", min(1e6 * spent / num for num, spent in runs), "CPU us")]


# --- the wire --------------------------------------------------------------------------------------------------------


def sample_wire() -> list[Cost]:
    """Round trips of a link, the least of some exchanges: processor time at both ends, and wall clock."""
    import wire

    from starling.common.net.keyring import make_keys

    name = wire.NAMES["link"]
    with tempfile.TemporaryDirectory(prefix="starling-check-") as folder:
        make_keys(Path(folder), [name])
        controller = wire.HubController(Path(folder), [name])
        replica = subprocess.Popen([sys.executable, wire.__file__, "--replica", "link", controller.address, folder])
        try:
            controller.meet()
            exchange = controller.exchange_with(name)
            exchange(ROUND_TRIPS // 4, IN_FLIGHT)
            spent, rates = [], []
            for _ in range(EXCHANGES):
                before = time.process_time() + cpu_of_process(replica.pid)
                rates.append(exchange(ROUND_TRIPS, IN_FLIGHT).rate)
                spent.append(time.process_time() + cpu_of_process(replica.pid) - before)
        finally:
            replica.kill()
            replica.wait()
            controller.hub.close()
    return [
        Cost("link_round_trip_cpu_us", 1e6 * min(spent) / ROUND_TRIPS, "CPU us"),
        Cost("link_round_trip_us", 1e6 / max(rates), "us"),
    ]


# --- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Steps whose lines appeared together in metrics.jsonl, nearly always one, and the state of the run then."""

    num_steps: int
    time: float
    """Of the last line, by the clock of the run."""
    clock_s: float
    """When the lines were read, monotonic."""
    cpu_s: float
    """Of all processes so far; 0 but for the first and the last step."""
    delays: Delays


def sample_loop() -> list[Cost]:
    """A run on a tiny model with random weights: its start, and a step, in wall clock and processor time."""
    with tempfile.TemporaryDirectory(prefix="starling-check-") as temporary:
        folder = Path(temporary)
        recipe = write_recipe(folder)
        command = [str(Path(sys.executable).with_name("starling")), "run", str(recipe)]
        with (folder / "output.log").open("w+") as log:
            started = time.time()
            run = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
            try:
                steps = list(watch(run, folder / "check" / "attempt-1" / "metrics.jsonl"))
            finally:
                run.terminate()
                try:
                    code = run.wait(RUN_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    run.kill()
                    code = run.wait()
            if code or sum(seen.num_steps for seen in steps) < NUM_STEPS:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} exited with {code}:\n{log.read()[-4000:]}")
    first, last = steps[0], steps[-1]
    undisturbed = [undisturbed_step_s(before, after) for before, after in pairwise(steps)]
    return [
        Cost("first_step_s", first.time - started, "s"),
        Cost("first_step_cpu_s", first.cpu_s, "CPU s"),
        Cost("step_s", quantile(undisturbed, 0.25), "s"),
        Cost("step_cpu_s", (last.cpu_s - first.cpu_s) / sum(seen.num_steps for seen in steps[1:]), "CPU s"),
    ]


def undisturbed_step_s(before: Seen, after: Seen) -> float:
    """Return the wall clock of a step without the time in which its services waited for a core."""
    return (after.clock_s - before.clock_s - delay_s(before.delays, after.delays)) / after.num_steps


def write_recipe(folder: Path) -> Path:
    """Write prompts and recipe; nothing is imported for the data, and nothing is saved."""
    import tomli_w

    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(3, 8))) for _ in range(2000)]
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{word}>", "reference": word[::-1]}) + "\n" for word in words))
    recipe: dict[str, Any] = {
        "run": {"name": "check", "kind": "rl", "seed": 0, "folder": str(folder)},
        "launch": {"num_rollouts": 1, "screen": "plain"},
        "model": {"scratch": MODEL, "device": "cpu"},
        "data": {"source": str(data), "format": "{prompt}", "reference_column": "reference", "shuffle": False},
        "rl": {"num_steps": NUM_STEPS, "prompts_per_step": 16, "group_size": 8, "max_staleness": 0},
        "sampling": {"max_tokens": 12},
        "policy": {"optimizer": {"learning_rate": 3e-4}},
        "reward": {"scorers": [{"name": f"{HERE / 'check_reward.py'}:score"}]},
    }
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))
    return path


def watch(run: subprocess.Popen[bytes], metrics: Path) -> Iterator[Seen]:
    """Yield the steps of a run as their lines appear, until the run ends."""
    deadline, position, num_seen, pids = time.monotonic() + RUN_TIMEOUT_S, 0, 0, list[int]()
    while True:
        ended = run.poll() is not None
        steps, position = read_steps(metrics, position)
        if steps:
            pids = pids or descendants(run.pid)
            clock_s, delays = time.monotonic(), run_delays(pids)
            is_end = not num_seen or num_seen + len(steps) >= NUM_STEPS
            num_seen += len(steps)
            cpu_s = cpu_of_tree(run.pid) if is_end else 0.0
            yield Seen(len(steps), steps[-1]["time"], clock_s, cpu_s, delays)
        if ended:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not end within {RUN_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def read_steps(metrics: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Return the steps from a position of metrics.jsonl on, and the position behind its last complete line."""
    if not metrics.exists():
        return [], position
    steps = []
    with metrics.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                break
            position += len(line)
            entry = json.loads(line)
            if entry["kind"] == "step":
                steps.append(entry)
    return steps, position


SAMPLES: dict[str, Callable[[], list[Cost]]] = {
    "start": sample_start,
    "core": sample_core,
    "wire": sample_wire,
    "loop": sample_loop,
}


def end(number: int, frame: object) -> None:
    """Leave by an exception, so that what was started is ended and what was written is removed."""
    raise SystemExit(128 + number)


def main() -> None:
    """Sample and print."""
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=tuple(SAMPLES))
    parser.add_argument("--rounds", type=int, default=1, help="samples; their median is printed")
    options = parser.parse_args()
    rounds = [SAMPLES[options.bench]() for _ in range(options.rounds)]
    for costs in zip(*rounds, strict=True):
        values = [cost.value for cost in costs]
        detail = {"rounds": options.rounds, "samples": [rounded(value) for value in values], **machine()}
        print_figure(
            f"check_{options.bench}",
            costs[0].figure,
            median(values),
            unit=costs[0].unit,
            goal=GOALS.get(costs[0].figure),
            better="lower",
            detail=detail,
        )


if __name__ == "__main__":
    main()
