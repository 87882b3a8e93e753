"""Benchmark of the controller's core: events per second with and without the journal, and memory per replica.

    python bench/controller.py [--quick] [--profile]

A whole run is driven through the real core by replicas that answer at once (`controller_cluster.py`): they join,
generate, score, train, publish, adopt and send heartbeats. Measured are `Controller.step` and, with the journal,
appending and committing on the disk of the working folder; the replicas' own time is excluded. One group of completions
has 8 x 256 tokens, 20 KB in the journal.

    events_per_second          core alone, 1,024 rollouts
    events_per_second_durable  with the journal, one transaction for up to 64 events
    growth_256_to_8192         time per event with 8,192 rollouts over that with 256, once all have joined
    seconds_10000_replicas     10,000 rollouts, 10 steps, from the first hello to the last goodbye
    bytes_per_replica          resident memory of a member, by tracemalloc
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from controller_cluster import Cluster, Prompts, plan_for
from figure import machine, print_figure, progress

from starling.common.observe.process import collect_seldom
from starling.controller.core.events import Command, Prune, Write
from starling.controller.core.machine import Controller
from starling.controller.shell.journal.journal import Journal

TOGETHER = 64
"""Events per transaction of the journal."""


def measure_run(
    num_rollouts: int,
    num_steps: int,
    journal: Journal | None = None,
    *,
    from_version: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Run to the end; return the number of events and the seconds that the core (and the journal) took by `clock`.

    Events before the completion of version `from_version` are not counted; 0 counts all.
    """
    plan = plan_for(num_rollouts, num_steps)
    prompts = Prompts()
    controller = Controller(plan, prompts, prompts, [])
    cluster = Cluster(plan, controller)
    cluster.join()
    step, num, spent = controller.step, 0, 0.0
    for event in cluster.events():
        begin = clock()
        commands = step(event)
        if journal is not None:
            write_to_journal(journal, commands)
            if num % TOGETHER == 0:
                journal.commit()
        if controller.state.version >= from_version:
            spent += clock() - begin
            num += 1
        cluster.take(commands)
    assert cluster.finished is not None, f"the run did not end; it waits for {controller.waiting_for}"
    assert cluster.finished.ok, cluster.finished.reason
    assert controller.state.version == num_steps
    return num, spent


def write_to_journal(journal: Journal, commands: Sequence[Command]) -> None:
    """Append the records among `commands` to the journal."""
    for command in commands:
        if isinstance(command, Write):
            journal.append(command.record, command.payload)
        elif isinstance(command, Prune):
            journal.prune(command.step)


def rate(num_rollouts: int, num_steps: int, *, from_version: int = 0) -> float:
    """Return events per second of the core alone."""
    gc.collect()
    num, spent = measure_run(num_rollouts, num_steps, from_version=from_version)
    return num / spent


def durable_rate(num_rollouts: int, num_steps: int) -> float:
    """Return events per second with the journal."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-journal-") as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        num, spent = measure_run(num_rollouts, num_steps, journal)
        journal.close()
    return num / spent


def bytes_per_replica(num: int) -> float:
    """Return the memory of one more rollout, all of them members with leased groups."""
    sizes = []
    for size in (num, 2 * num):
        plan = plan_for(size, 1)
        prompts = Prompts()
        gc.collect()
        tracemalloc.start()
        controller = Controller(plan, prompts, prompts, [])
        cluster = Cluster(plan, controller)
        cluster.join()
        before = tracemalloc.get_traced_memory()[0]
        for event in cluster.events():
            cluster.take(controller.step(event))
            if controller.state.buffer.num_live >= 2 * size:
                break
        sizes.append(tracemalloc.get_traced_memory()[0] - before)
        tracemalloc.stop()
    return (sizes[1] - sizes[0]) / num


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the core's time goes, and nothing else")
    arguments = parser.parse_args()
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(measure_run, 1024, 3)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    collect_seldom()  # as the controller's process does
    rounds = 3 if arguments.quick else 5
    detail: dict[str, Any] = {"machine": machine(), "cores": os.cpu_count()}
    rates: dict[str, list[float]] = {"alone": [], "durable": [], "256": [], "8192": []}
    for number in range(rounds):
        rates["alone"].append(rate(1024, 3))
        rates["durable"].append(durable_rate(1024, 3))
        # Excludes joins, whose share of all events depends on the number of replicas.
        rates["256"].append(rate(256, 33, from_version=1))
        rates["8192"].append(rate(8192, 2, from_version=1))
        progress(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in rates.items()))
    shown = {name: [round(value) for value in values] for name, values in rates.items()}

    def show(
        figure: str, value: float, unit: str, goal: float | None, more: dict[str, Any], *, lower: bool = True
    ) -> None:
        better: Literal["higher", "lower"] = "lower" if lower else "higher"
        print_figure("controller", figure, value, unit=unit, goal=goal, better=better, detail={**detail, **more})

    show("events_per_second", median(rates["alone"]), "events/s", 40_000, shown, lower=False)
    show("events_per_second_durable", median(rates["durable"]), "events/s", 5_000, {"together": TOGETHER}, lower=False)
    growth = median(small / large for small, large in zip(rates["256"], rates["8192"], strict=True))
    show("growth_256_to_8192", growth, "ratio", 1.3, {})
    steps = 2 if arguments.quick else 10
    begin = time.perf_counter()
    num, spent = measure_run(10_000, steps)
    more = {"events": num, "core_s": round(spent, 2), "steps": steps}
    show("seconds_10000_replicas", time.perf_counter() - begin, "s", 60, more)
    show("bytes_per_replica", bytes_per_replica(500), "bytes", None, {})


if __name__ == "__main__":
    main()
