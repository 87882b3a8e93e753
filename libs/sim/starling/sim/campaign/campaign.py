"""Many seeds under many mixes, by several processes: which promises hold, and how fast the simulation goes."""

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
    """What became of one seed under one mix."""

    mix: str
    seed: int
    num_events: int
    """Events that the controller was given."""
    simulated_s: float
    cpu_s: float
    violation: str = ""
    """Which promise was broken; empty when none was."""


def run_seed(job: tuple[str, int, int]) -> SeedResult:
    """Run a mix, a seed, and a number of replicas (0 for a small world of the seed's own)."""
    mix, seed, num_replicas = job
    begin, violation = time.process_time(), ""
    world = SimulatedCluster(scenario_of(seed, mix, num_replicas))
    try:
        world.run()
    except Violation as broken:
        violation = str(broken)
    return SeedResult(mix, seed, world.host.num_events, world.now, time.process_time() - begin, violation)


def run_campaign(mixes: Sequence[str], seeds: Sequence[int], num_replicas: int, num_jobs: int) -> Iterator[SeedResult]:
    """Run every seed under every mix, in this order."""
    jobs = [(mix, seed, num_replicas) for mix, seed in product(mixes, seeds)]
    if num_jobs == 1:
        yield from map(run_seed, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(run_seed, jobs)
