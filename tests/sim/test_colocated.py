"""Simulated runs with shared devices: policies and rollouts are never awake together, and every run ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from starling.common.leases.membership import MembershipLease
from starling.controller.core.replicas.time_sharing import TimeSharing
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.errors import Violation
from starling.sim.scenario.faults import ALL
from starling.sim.scenario.scenario import Scenario, scenario_of, slowed

SEEDS = range(10)
PACE = 8.0
PARTITION_EVERY_S = 20.0
PARTITION_LEASES = 12.0
"""Longest partition: six times the time after which the devices of an unreachable rollout may be reassigned."""


def colocated(seed: int, mix: str) -> Scenario:
    """Return a random scenario with shared devices, whose faults are further apart than two leases."""
    scenario = scenario_of(seed, mix)
    sync_every = 1 + seed // 2 % (scenario.plan.max_staleness + 1)
    plan = replace(scenario.plan, colocate=True, sync_every=sync_every, sync_every_s=0.0)
    fleet = replace(scenario.fleet, num_followers=0)  # they are refused
    return replace(scenario, plan=plan, fleet=fleet, faults=slowed(scenario.faults, PACE), timeout_s=1800.0)


def partitioned(seed: int, mix: str) -> Scenario:
    """Return a scenario with long partitions, most of which deliver their messages afterwards."""
    scenario = colocated(seed, mix)
    plan = replace(scenario.plan, num_steps=10, start_s=1800.0)
    faults = replace(scenario.faults, partition_every_s=PARTITION_EVERY_S, cut_leases=PARTITION_LEASES, late=0.7)
    return replace(scenario, plan=plan, faults=faults, timeout_s=3600.0)


@pytest.mark.parametrize("mix", ALL)
def test_guarantees_hold_with_shared_devices(mix: str) -> None:
    for seed in SEEDS:
        SimulatedCluster(colocated(seed, mix)).run()


@pytest.mark.parametrize("mix", ["partitions", "everything"])
def test_guarantees_hold_in_partitions_longer_than_the_fencing_time(mix: str) -> None:
    for seed in SEEDS:
        SimulatedCluster(partitioned(seed, mix)).run()


def test_stop_at_any_time_ends_in_order() -> None:
    for seed in SEEDS:
        SimulatedCluster(replace(colocated(seed, "everything"), stop_at=2.0 * seed)).run()


def test_sides_alternate_and_return_partial_completions() -> None:
    clusters = [SimulatedCluster(colocated(seed, "calm")).run() for seed in SEEDS]
    for cluster in clusters:
        changes = [note.fields["role"] for note in cluster.host.notes if note.kind == "devices_switched"]
        least = 2 * cluster.plan.num_steps if cluster.plan.max_staleness == 0 else 2
        assert len(changes) >= least, "one for the groups of each step, and one for the step"
        assert all(a != b for a, b in pairwise(changes))
    num_interrupted = {cluster.plan.max_staleness: 0 for cluster in clusters}
    for cluster in clusters:
        num_interrupted[cluster.plan.max_staleness] += sum(note.kind == "interrupted" for note in cluster.host.notes)
    assert num_interrupted[0] == 0, "a synchronous step has all its groups when the rollouts go to sleep"
    assert sum(num_interrupted.values()) > 0


def run_violation(scenario: Scenario) -> str:
    try:
        SimulatedCluster(scenario).run()
    except Violation as violation:
        return str(violation)
    return ""


def other_side_stays_awake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimeSharing, "obstacle", lambda self, others, now: "")


def lost_replicas_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimeSharing, "remove", lambda self, member, now, *, ended: self.reset(member))


def disable_fencing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MembershipLease, "is_valid", lambda self, now: True)
    patch.setattr(MembershipLease, "must_exit", lambda self, role, now: False)


def test_replicas_without_fencing_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_fencing(monkeypatch)
    violations = [run_violation(partitioned(seed, "partitions")) for seed in SEEDS]
    assert any("wakes while" in violation for violation in violations)


@pytest.mark.parametrize(
    ("bug", "mix"), [(other_side_stays_awake, "calm"), (lost_replicas_are_forgotten, "partitions")]
)
def test_controller_that_wakes_too_early_is_detected(
    bug: Callable[[pytest.MonkeyPatch], None], mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    violations = [run_violation(colocated(seed, mix)) for seed in SEEDS]
    assert any("wakes while" in violation or "while it sleeps" in violation for violation in violations)
