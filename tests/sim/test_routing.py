"""Rollouts of very different speeds: all of them stay busy, and the run takes hardly longer than it must."""

from __future__ import annotations

from dataclasses import replace

from starling.controller.core.plan import draw_seed
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.replicas.rollout import SimulatedRollout, length_of
from starling.sim.scenario.scenario import Durations, Fleet, Scenario, scenario_of

SPEEDS = (1.0, 2.0, 8.0)
SLOTS = 4
WORK = Durations(tokens=32.0, token_s=0.5, score_s=0.01, step_s=0.5, publish_s=0.1, pull_s=0.2)


def scenario_of_speeds(seed: int, *, max_staleness: int, prompts_per_step: int, num_steps: int) -> Scenario:
    """Return a run in which generation takes nearly all of the time."""
    plan = replace(
        scenario_of(seed).plan,
        num_supervised_steps=0,
        num_steps=num_steps,
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        evaluate_at_start=False,
        evaluate_at_end=False,
        evaluate_every=0,
        save_every=0,
        num_policies=1,
        num_rollouts=len(SPEEDS),
        num_rewards=1,
        num_teachers=0,
        dynamic_sampling=False,
    )
    fleet = Fleet(num_policies=1, num_rollouts=len(SPEEDS), num_rewards=4, num_slots=SLOTS, speeds=SPEEDS)
    return Scenario(seed, plan, fleet, work=WORK, patience_s=9000.0)


class Watched(SimulatedCluster):
    """Notes at each step how long each rollout has worked. An earlier pass has shown how long completions are."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.seen: list[tuple[float, list[float]]] = []
        self.clock.after(0.0, self._teach)

    def _teach(self) -> None:
        plan = self.plan
        for number in range(plan.num_steps * plan.prompts_per_step):
            length = length_of(draw_seed(plan.seed, "train", number, 0), WORK.tokens)
            self.host.controller.state.lengths.note(f"train/{number}", "train", float(length))

    def note_step(self, whole) -> None:  # type: ignore[no-untyped-def]
        super().note_step(whole)
        rollouts = [replica for replica in self.replicas.values() if isinstance(replica, SimulatedRollout)]
        self.seen.append((self.now, [replica.busy_s for replica in rollouts]))


def busy_shares(world: Watched) -> list[float]:
    """Return which share of its slots each rollout has used, without the first and the last steps."""
    (begin, before), (end, after) = world.seen[2], world.seen[-3]
    return [(b - a) / (end - begin) / SLOTS for a, b in zip(before, after, strict=True)]


def ideal_s(scenario: Scenario) -> float:
    """Return how long the run takes if no slot is ever idle."""
    plan = scenario.plan
    num = plan.num_steps * plan.prompts_per_step
    tokens = sum(length_of(draw_seed(plan.seed, "train", n, 0), WORK.tokens) for n in range(num))
    return tokens * WORK.token_s / sum(SPEEDS) / SLOTS


def test_all_are_busy_and_the_run_takes_hardly_longer_than_it_must() -> None:
    for seed in range(2):
        scenario = scenario_of_speeds(seed, max_staleness=2, prompts_per_step=120, num_steps=12)
        world = Watched(scenario)
        world.run()
        assert min(busy_shares(world)) > 0.95
        assert world.steps[-1].made_at < 1.1 * ideal_s(scenario)


def test_a_step_hardly_waits_for_the_slow_one() -> None:
    """Synchronous steps of few groups. By free slots alone, they took 1.7 times as long as they must."""
    for seed in range(2):
        scenario = scenario_of_speeds(seed, max_staleness=0, prompts_per_step=60, num_steps=10)
        world = Watched(scenario)
        world.run()
        assert world.steps[-1].made_at < 1.45 * ideal_s(scenario)
