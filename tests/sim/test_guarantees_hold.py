"""Whole simulated runs under faults: no seed violates an invariant or a guarantee."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Command, Event, Ticked
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.machine import Controller, advance
from starling.sim.campaign.campaign import run_seed
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.replicas.policy import SimulatedPolicy
from starling.sim.scenario.faults import ALL, CALM
from starling.sim.scenario.scenario import answering_scenario_of, scenario_of

SEEDS = range(30)
FEW_SEEDS = range(10)
EACH_SEED = pytest.mark.parametrize(
    "seeds",
    [FEW_SEEDS, pytest.param(range(10, 30), marks=pytest.mark.campaign)],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
"""Parametrises a test by seeds; most of them are in the campaign."""


@EACH_SEED
@pytest.mark.parametrize("mix", ALL)
def test_guarantees_hold_under_every_mix(mix: str, seeds: range) -> None:
    violations = [result for seed in seeds if (result := run_seed((mix, seed, 0))).violation]
    assert violations == []


@pytest.mark.parametrize("mix", [pytest.param("calm", marks=pytest.mark.campaign), "everything"])
def test_guarantees_hold_with_100_replicas(mix: str) -> None:
    assert run_seed((mix, 0, 100)).violation == ""


@EACH_SEED
@pytest.mark.parametrize("mix", ALL)
def test_run_without_policy_answers_each_prompt_once(mix: str, seeds: range) -> None:
    clusters = [SimulatedCluster(answering_scenario_of(seed, mix)).run() for seed in seeds]
    answered = [group for cluster in clusters for groups in cluster.guarantees.files.values() for group in groups]
    assert any(group.trajectories for group in answered)


@EACH_SEED
def test_stop_of_run_without_policy_ends_in_order(seeds: range) -> None:
    for seed in seeds:
        SimulatedCluster(replace(answering_scenario_of(seed, "everything"), stop_at=0.2 * seed)).run()


@EACH_SEED
def test_stop_at_any_time_ends_in_order(seeds: range) -> None:
    for seed in seeds:
        cluster = SimulatedCluster(replace(scenario_of(seed, "everything"), stop_at=0.7 * seed))
        cluster.run()


def test_slow_and_failing_scorers_do_not_block_the_run() -> None:
    for seed in FEW_SEEDS:
        scenario = scenario_of(seed)
        slow = replace(scenario.workload, score_s=2.0)
        SimulatedCluster(replace(scenario, workload=slow, faults=replace(CALM, scorer_failures=0.1))).run()


def test_faults_of_the_mixes_occur() -> None:
    clusters = [SimulatedCluster(scenario_of(seed, "everything")).run() for seed in FEW_SEEDS]
    clusters += [SimulatedCluster(scenario_of(seed, "preemptions")).run() for seed in range(3)]
    kinds = {note.kind for cluster in clusters for note in cluster.host.notes}
    assert {"waiting", "failed", "left", "joined", "adopted", "evaluation", "state"} <= kinds
    assert max(cluster.host.incarnation for cluster in clusters) > 2
    assert max(stale for cluster in clusters for step in cluster.steps for stale in step.staleness) == 2
    replayed = [cluster.guarantees.num_repeated for cluster in clusters]
    num_returned = [note.fields["num_tokens"] for cluster in clusters for note in cluster.host.notes
                  if note.kind == "interrupted"]  # fmt: skip
    assert sum(num_returned) > 0, "rollouts that leave gracefully return their tokens"
    assert sum(replayed) > 0, "a restarted policy replays the steps since its saved state"


def test_power_cuts_stop_everything_at_once() -> None:
    clusters = [SimulatedCluster(scenario_of(seed, "power_cuts")).run() for seed in SEEDS]
    for cluster in clusters:
        num_cuts = cluster.host.incarnation - 1
        starts = [replica.incarnation for replica in cluster.replicas.values()]
        assert num_cuts == 0 or max(starts) > 1, "replicas stop with the controller"
    assert sum(cluster.host.incarnation > 2 for cluster in clusters) >= 5
    assert sum(cluster.guarantees.num_repeated for cluster in clusters) > 0, "steps since the saved state are replayed"


def test_rollouts_that_send_other_weights_are_found() -> None:
    clusters = [SimulatedCluster(scenario_of(seed, "lies")).run() for seed in SEEDS]
    assert sum(cluster.num_false_pulls for cluster in clusters) > 0
    evicted = [
        note.fields["replica"] == cluster.forger
        for cluster in clusters
        for note in cluster.host.notes
        if note.kind == "refused" and "than were published" in note.fields["reason"]
    ]
    assert any(evicted)


def test_publication_overlaps_training_only_in_asynchronous_runs() -> None:
    overlaps = {True: 0, False: 0}
    for seed in SEEDS:
        cluster = SimulatedCluster(scenario_of(seed, "reorder")).run()
        policies = [replica for replica in cluster.replicas.values() if isinstance(replica, SimulatedPolicy)]
        overlaps[cluster.plan.max_staleness == 0] += sum(policy.num_overlaps for policy in policies)
    assert overlaps[True] == 0
    assert overlaps[False] > 0


# --- determinism ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from starling.sim.scenario.scenario import scenario_of
from starling.sim.cluster.cluster import SimulatedCluster
cluster = SimulatedCluster(scenario_of(3, "everything")).run()
print(cluster.now, cluster.clock.num_done, [(note.kind, note.fields) for note in cluster.host.notes])
"""


def test_seed_determines_the_whole_run() -> None:
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


@EACH_SEED
def test_dirty_flags_of_an_event_are_complete(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy equals eager: running all derivations after an event finds nothing that its handler had not flagged.

    Derivations that depend on time alone are run by ticks, so there is one before each event.
    """
    step = Controller.step

    def eager(self: Controller, event: Event) -> list[Command]:
        commands = step(self, Ticked(event.now)) + step(self, event)
        if self.state.lifecycle.stage is not RunStage.OVER:
            self.state.outbox.clear()
            self.state.dirty = Dirty.ALL
            advance(self.state)
            assert self.state.outbox.commands() == [], f"{event} should have flagged this"
        return commands

    monkeypatch.setattr(Controller, "step", eager)
    for mix in ("reorder", "crashes", "controller", "everything"):
        for seed in seeds:
            SimulatedCluster(scenario_of(seed, mix)).run()


def test_derivations_are_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Controller.step

    def twice(self: Controller, event: Event) -> list[Command]:
        commands = list(step(self, event))
        for _ in range(2):
            self.state.outbox.clear()
            self.state.dirty = Dirty.ALL
            advance(self.state)
            commands += self.state.outbox.commands()
        assert self.state.outbox.commands() == []
        return commands

    monkeypatch.setattr(Controller, "step", twice)
    for seed in FEW_SEEDS:
        SimulatedCluster(scenario_of(seed)).run()


def test_other_seed_gives_another_run() -> None:
    ends = {SimulatedCluster(replace(scenario_of(1), seed=seed)).run().now for seed in FEW_SEEDS}
    assert len(ends) == len(FEW_SEEDS)
