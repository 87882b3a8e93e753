"""Policies and rollouts that share their devices: never two sides awake at once, and the run ends all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from starling.controller.core.turns import Turns
from starling.sim.errors import Violation
from starling.sim.faults import ALL
from starling.sim.scenario import Scenario, scenario_of, slowed
from starling.sim.world import World

SEEDS = range(10)
PACE = 8.0


def colocated(seed: int, mix: str) -> Scenario:
    """Return a random scenario with shared devices, in which faults are rarer than two leases are long."""
    scenario = scenario_of(seed, mix)
    plan = replace(scenario.plan, colocate=True)
    return replace(scenario, plan=plan, faults=slowed(scenario.faults, PACE), patience_s=1800.0)


@pytest.mark.parametrize("mix", ALL)
def test_the_promises_hold(mix: str) -> None:
    for seed in SEEDS:
        World(colocated(seed, mix)).run()


def test_a_stop_at_any_moment_ends_in_good_order() -> None:
    for seed in SEEDS:
        World(replace(colocated(seed, "everything"), stop_at=2.0 * seed)).run()


def test_they_take_turns_and_give_back_what_they_have() -> None:
    worlds = [World(colocated(seed, "calm")).run() for seed in SEEDS]
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


def run_one_of(seed: int, mix: str) -> str:
    try:
        World(colocated(seed, mix)).run()
    except Violation as violation:
        return str(violation)
    return ""


def nobody_is_asked_to_sleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "obstacle", lambda self, others, now: "")


def who_is_lost_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "left", lambda self, member, now, *, gone: self.told(member))


@pytest.mark.parametrize(("bug", "mix"), [(nobody_is_asked_to_sleep, "calm"), (who_is_lost_is_forgotten, "partitions")])
def test_a_controller_that_wakes_too_early_is_found_out(
    bug: Callable[[pytest.MonkeyPatch], None], mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    violations = [run_one_of(seed, mix) for seed in SEEDS]
    assert any("which is awake" in violation or "in its sleep" in violation for violation in violations)
