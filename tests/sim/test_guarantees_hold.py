"""Whole runs under faults: every promise holds under every seed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Command, Event, Ticked
from starling.controller.core.groups.dispatch import advance
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.machine import Controller
from starling.sim.campaign.campaign import run_seed
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.replicas.policy import SimulatedPolicy
from starling.sim.scenario.faults import ALL, CALM
from starling.sim.scenario.scenario import answering_of, scenario_of

SEEDS = range(30)
FEW_SEEDS = range(10)


@pytest.mark.parametrize("mix", ALL)
def test_the_promises_hold(mix: str) -> None:
    violations = [outcome for seed in SEEDS if (outcome := run_seed((mix, seed, 0))).violation]
    assert violations == []


@pytest.mark.parametrize("mix", ["calm", "everything"])
def test_they_hold_in_a_larger_fleet(mix: str) -> None:
    assert run_seed((mix, 0, 100)).violation == ""


@pytest.mark.parametrize("mix", ALL)
def test_every_prompt_is_answered_once_without_a_policy(mix: str) -> None:
    worlds = [SimulatedCluster(answering_of(seed, mix)).run() for seed in SEEDS]
    answered = [group for world in worlds for groups in world.promises.files.values() for group in groups]
    assert any(group.trajectories for group in answered)


def test_a_stop_without_a_policy_ends_in_good_order() -> None:
    for seed in SEEDS:
        SimulatedCluster(replace(answering_of(seed, "everything"), stop_at=0.2 * seed)).run()


def test_a_stop_at_any_moment_ends_in_good_order() -> None:
    for seed in SEEDS:
        world = SimulatedCluster(replace(scenario_of(seed, "everything"), stop_at=0.7 * seed))
        world.run()


def test_scorers_that_are_slow_and_fail_hold_nothing_up() -> None:
    for seed in FEW_SEEDS:
        scenario = scenario_of(seed)
        slow = replace(scenario.work, score_s=2.0)
        SimulatedCluster(replace(scenario, work=slow, faults=replace(CALM, scorer_failures=0.1))).run()


def test_the_faults_happen() -> None:
    worlds = [SimulatedCluster(scenario_of(seed, "everything")).run() for seed in FEW_SEEDS]
    worlds += [SimulatedCluster(scenario_of(seed, "preemptions")).run() for seed in range(3)]
    kinds = {note.kind for world in worlds for note in world.host.notes}
    assert {"waiting", "failed", "left", "joined", "adopted", "evaluation", "state"} <= kinds
    assert max(world.host.incarnation for world in worlds) > 2
    assert max(stale for world in worlds for step in world.steps for stale in step.staleness) == 2
    replayed = [world.promises.num_repeated for world in worlds]
    given_back = [note.fields["num_tokens"] for world in worlds for note in world.host.notes
                  if note.kind == "interrupted"]  # fmt: skip
    assert sum(given_back) > 0, "who leaves in order gives back what it has"
    assert sum(replayed) > 0, "a policy that died makes the steps again that it had not saved"


def test_only_asynchronous_runs_train_beside_a_publication() -> None:
    overlaps = {True: 0, False: 0}
    for seed in SEEDS:
        world = SimulatedCluster(scenario_of(seed, "reorder")).run()
        policies = [replica for replica in world.replicas.values() if isinstance(replica, SimulatedPolicy)]
        overlaps[world.plan.max_staleness == 0] += sum(policy.num_overlaps for policy in policies)
    assert overlaps[True] == 0
    assert overlaps[False] > 0


# --- one seed, one run ---------------------------------------------------------------------------------------------

TELL = """
import sys
from starling.sim.scenario.scenario import scenario_of
from starling.sim.cluster.cluster import World
world = World(scenario_of(3, "everything")).run()
print(world.now, world.clock.num_done, [(note.kind, note.fields) for note in world.host.notes])
"""


def test_a_seed_decides_everything() -> None:
    told = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        told.add(done.stdout)
    assert len(told) == 1


def test_what_an_event_makes_due_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy equals eager: to derive everything after an event finds nothing that its handler had not made due.

    What time alone makes due is done by ticks, so there is one before each event.
    """
    step = Controller.step

    def eager(self: Controller, event: Event) -> list[Command]:
        commands = step(self, Ticked(event.now)) + step(self, event)
        if self.state.ending.stage is not RunStage.OVER:
            self.state.written, self.state.out, self.state.due = [], [], Dirty.ALL
            advance(self.state)
            assert [*self.state.written, *self.state.out] == [], f"{event} should have made this due"
        return commands

    monkeypatch.setattr(Controller, "step", eager)
    for mix in ("reorder", "crashes", "controller", "everything"):
        for seed in SEEDS:
            SimulatedCluster(scenario_of(seed, mix)).run()


def test_what_follows_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Controller.step

    def twice(self: Controller, event: Event) -> list[Command]:
        commands = list(step(self, event))
        for _ in range(2):
            self.state.out, self.state.due = [], Dirty.ALL
            advance(self.state)
            commands += self.state.out
        assert self.state.out == []
        return commands

    monkeypatch.setattr(Controller, "step", twice)
    for seed in FEW_SEEDS:
        SimulatedCluster(scenario_of(seed)).run()


def test_another_seed_is_another_run() -> None:
    ends = {SimulatedCluster(replace(scenario_of(1), seed=seed)).run().now for seed in FEW_SEEDS}
    assert len(ends) == len(FEW_SEEDS)
