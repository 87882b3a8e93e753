"""Simulation campaigns: many seeds under many fault mixes, in parallel processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.errors import Violation
from starling.sim.scenario.scenario import scenario_of


@dataclass(frozen=True)
class SeedResult:
    """Result of one seed under one fault mix."""

    mix: str
    seed: int
    num_events: int
    """Events that the controller handled."""
    simulated_s: float
    cpu_s: float
    violation: str = ""
    """The violated invariant or guarantee; empty when there is none."""


def run_seed(job: tuple[str, int, int]) -> SeedResult:
    """Run one job: a fault mix, a seed, and a number of replicas (0 for a small cluster that the seed chooses)."""
    mix, seed, num_replicas = job
    begin, violation = time.process_time(), ""
    cluster = SimulatedCluster(scenario_of(seed, mix, num_replicas))
    try:
        cluster.run()
    except Violation as error:
        violation = str(error)
    return SeedResult(mix, seed, cluster.host.num_events, cluster.now, time.process_time() - begin, violation)


def run_campaign(mixes: Sequence[str], seeds: Sequence[int], num_replicas: int, num_jobs: int) -> Iterator[SeedResult]:
    """Run every seed under every mix in `num_jobs` processes, and yield the results in the order of the arguments."""
    jobs = [(mix, seed, num_replicas) for mix, seed in product(mixes, seeds)]
    if num_jobs == 1:
        yield from map(run_seed, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(run_seed, jobs)
