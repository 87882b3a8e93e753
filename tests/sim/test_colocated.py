"""Policies and rollouts that share their devices: never two sides awake at once, and the run ends all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from starling.common.membership import MembershipLease
from starling.controller.core.replicas.time_sharing import TimeSharing
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.errors import Violation
from starling.sim.scenario.faults import ALL
from starling.sim.scenario.scenario import Scenario, scenario_of, slowed

SEEDS = range(10)
PACE = 8.0
CUT_EVERY_S = 20.0
CUT_LEASES = 12.0
"""So long are lines cut at most: six times as long as it takes until others may have the devices of a rollout."""


def colocated(seed: int, mix: str) -> Scenario:
    """Return a random scenario with shared devices, in which faults are rarer than two leases are long."""
    scenario = scenario_of(seed, mix)
    plan = replace(scenario.plan, colocate=True)
    return replace(scenario, plan=plan, faults=slowed(scenario.faults, PACE), patience_s=1800.0)


def cut_off(seed: int, mix: str) -> Scenario:
    """Return one in which lines are cut for long, and may give in the end what was said meanwhile."""
    scenario = colocated(seed, mix)
    plan = replace(scenario.plan, num_steps=10, start_s=1800.0)
    faults = replace(scenario.faults, partition_every_s=CUT_EVERY_S, cut_leases=CUT_LEASES, late=0.7)
    return replace(scenario, plan=plan, faults=faults, patience_s=3600.0)


@pytest.mark.parametrize("mix", ALL)
def test_the_promises_hold(mix: str) -> None:
    for seed in SEEDS:
        SimulatedCluster(colocated(seed, mix)).run()


@pytest.mark.parametrize("mix", ["partitions", "everything"])
def test_the_promises_hold_when_lines_are_cut_for_longer_than_the_devices_are_waited_for(mix: str) -> None:
    for seed in SEEDS:
        SimulatedCluster(cut_off(seed, mix)).run()


def test_a_stop_at_any_moment_ends_in_good_order() -> None:
    for seed in SEEDS:
        SimulatedCluster(replace(colocated(seed, "everything"), stop_at=2.0 * seed)).run()


def test_they_take_turns_and_give_back_what_they_have() -> None:
    worlds = [SimulatedCluster(colocated(seed, "calm")).run() for seed in SEEDS]
    for world in worlds:
        turns = [note.fields["role"] for note in world.host.notes if note.kind == "turn"]
        least = 2 * world.plan.num_steps if world.plan.max_staleness == 0 else 2
        assert len(turns) >= least, "one for the groups of each step, and one for the step"
        assert all(a != b for a, b in pairwise(turns))
    given_back = {world.plan.max_staleness: 0 for world in worlds}
    for world in worlds:
        given_back[world.plan.max_staleness] += sum(note.kind == "interrupted" for note in world.host.notes)
    assert given_back[0] == 0, "a synchronous step is full when nothing is generated any more"
    assert sum(given_back.values()) > 0


def run_one_of(scenario: Scenario) -> str:
    try:
        SimulatedCluster(scenario).run()
    except Violation as violation:
        return str(violation)
    return ""


def nobody_is_asked_to_sleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimeSharing, "obstacle", lambda self, others, now: "")


def who_is_lost_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimeSharing, "left", lambda self, member, now, *, gone: self.told(member))


def nobody_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MembershipLease, "holds", lambda self, now: True)
    patch.setattr(MembershipLease, "is_over", lambda self, role, now: False)


def test_replicas_that_keep_their_devices_when_they_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_gives_way(monkeypatch)
    violations = [run_one_of(cut_off(seed, "partitions")) for seed in SEEDS]
    assert any("which is awake" in violation for violation in violations)


@pytest.mark.parametrize(("bug", "mix"), [(nobody_is_asked_to_sleep, "calm"), (who_is_lost_is_forgotten, "partitions")])
def test_a_controller_that_wakes_too_early_is_found_out(
    bug: Callable[[pytest.MonkeyPatch], None], mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    violations = [run_one_of(colocated(seed, mix)) for seed in SEEDS]
    assert any("which is awake" in violation or "in its sleep" in violation for violation in violations)
