"""Whole runs under faults: the promises hold under every seed, and a broken controller is found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated import CALM, Faults, World
from simulated_checks import Violation
from simulated_replicas import Policy

from starling.controller.core import derive
from starling.controller.core.derive import advance
from starling.controller.core.leases import Leases
from starling.controller.core.ledger import Group, Groups, GroupState, Ledger
from starling.controller.core.membership import Membership
from starling.policy.core.progress import Progress

SEEDS = range(30)
FEW_SEEDS = range(10)

SCENARIOS = {
    "calm": CALM,
    "loss": Faults(loss=0.02, pull_failures=0.05),
    "duplicates": Faults(duplicates=0.2),
    "reorder": Faults(reorder=True),
    "crashes": Faults(crash_every_s=2.0, silent_deaths=0.2, torn=0.05, pull_failures=0.05),
    "slow reward": Faults(score_s=2.0, scorer_failures=0.1),
    "everything": Faults(
        loss=0.02,
        duplicates=0.1,
        reorder=True,
        crash_every_s=5.0,
        silent_deaths=0.3,
        torn=0.05,
        pull_failures=0.1,
        score_s=0.5,
        scorer_failures=0.05,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_promises_hold(scenario: str) -> None:
    for seed in SEEDS:
        World(seed, SCENARIOS[scenario]).run()


def test_a_stop_at_any_moment_ends_in_good_order() -> None:
    for seed in SEEDS:
        world = World(seed, SCENARIOS["everything"])
        world.run(stop_at=world.rng.uniform(0.0, 20.0))


def test_a_seed_decides_everything() -> None:
    first, second = (World(3, SCENARIOS["everything"]).run() for _ in range(2))
    assert first.notes == second.notes
    assert first.now == second.now


def test_the_faults_happen() -> None:
    worlds = [World(seed, SCENARIOS["everything"]).run() for seed in FEW_SEEDS]
    kinds = {note.kind for world in worlds for note in world.notes}
    assert {"waiting", "failed", "left", "joined", "adopted", "evaluation"} <= kinds
    stale = [note.fields.get("staleness_max", 0) for world in worlds for note in world.notes if note.kind == "step"]
    assert max(stale) == 2, "asynchronous runs do train tokens of older versions"


def test_only_asynchronous_runs_train_beside_a_publication() -> None:
    overlaps: dict[bool, int] = {True: 0, False: 0}
    for seed in SEEDS:
        world = World(seed, SCENARIOS["reorder"])
        world.run()
        policy = world.replicas["policy-0"]
        assert isinstance(policy, Policy)
        overlaps[world.plan.max_staleness == 0] += policy.num_overlaps
    assert overlaps[True] == 0
    assert overlaps[False] > 0


# --- the simulation finds what is wrong ----------------------------------------------------------------------------


def first_complaint(faults: Faults) -> str:
    """Return the first violation under any seed; the test fails when there is none."""
    for seed in SEEDS:
        try:
            World(seed, faults).run()
        except Violation as violation:
            return str(violation)
    pytest.fail("the simulation did not notice")


Patch = Callable[[pytest.MonkeyPatch], None]


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    free_slots = Ledger.free_slots
    patch.setattr(Ledger, "free_slots", lambda self: free_slots(self) + 1)


def no_version_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(derive, "_required_version", lambda state, rank: 0)


def no_healing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "compare", lambda self, peer, held, now, grace_s: ([], []))


def doubled_answers_count(patch: pytest.MonkeyPatch) -> None:
    settle = Leases.settle
    patch.setattr(Leases, "settle", lambda self, lease, peer: settle(self, lease, peer) or True)


def lost_work_stays_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "requeue", lambda self, group: None)


def publication_during_evaluation(patch: pytest.MonkeyPatch) -> None:
    def publish(state: derive.State, now: float) -> None:
        evaluation, state.evaluation = state.evaluation, None
        original(state, now)
        state.evaluation = evaluation

    original = derive.publish
    patch.setattr(derive, "publish", publish)


def unproven_versions_count(patch: pytest.MonkeyPatch) -> None:
    join = Membership.join

    def trusting(self: Membership, name, epoch, hello, layout, now):  # type: ignore[no-untyped-def]
        member = join(self, name, epoch, hello, layout, now)
        member.version = max(member.version, 0)
        return member

    patch.setattr(Membership, "join", trusting)


def groups_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def seal(self: Ledger, step: int) -> list[Group]:
        scored = self.within(GroupState.SCORED)[: self.prompts_per_step]
        if len(scored) < self.prompts_per_step:
            return []
        for group in scored:
            group.step = step
            self.move(group, GroupState.SEALED)
        self.num_sealed += 1
        return scored

    patch.setattr(Ledger, "seal", seal)


def steps_overtake_publications(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "must_wait", lambda self, command: False)


@pytest.mark.parametrize(
    ("bug", "scenario", "complaint"),
    [
        (one_slot_too_many, "calm", "groups live"),
        (no_version_check, "calm", "versions stale"),
        (no_healing, "loss", "the run hangs"),
        (doubled_answers_count, "duplicates", "versions stale"),
        (lost_work_stays_lost, "crashes", "otherwise"),
        (publication_during_evaluation, "slow reward", "the run hangs"),
        (unproven_versions_count, "calm", "was not published"),
        (groups_in_any_order, "slow reward", "out of order"),
        (steps_overtake_publications, "reorder", "has no snapshot"),
    ],
)
def test_a_broken_controller_is_found_out(
    bug: Patch, scenario: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert complaint in first_complaint(SCENARIOS[scenario])


def test_what_follows_is_derived_once() -> None:
    for seed in FEW_SEEDS:
        world = World(seed, CALM)
        step = world.controller.step

        def twice(event, step=step, world=world):  # type: ignore[no-untyped-def]
            commands = list(step(event))
            world.controller.state.out = []
            advance(world.controller.state, event.now)
            assert world.controller.state.out == []
            return commands

        world.controller.step = twice  # type: ignore[method-assign]
        world.run()
