"""Routing among rollouts of very different speeds: all stay busy, and the run takes close to the ideal time."""

from __future__ import annotations

from dataclasses import replace

from starling.common.wire.messages import Sampling
from starling.controller.core.plan import draw_seed
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.replicas.rollout import MAX_OVER_MEAN, SimulatedRollout, length_of
from starling.sim.scenario.scenario import Fleet, Scenario, Workload, scenario_of

SPEEDS = (1.0, 2.0, 8.0)
SLOTS = 4
WORKLOAD = Workload(tokens=32.0, token_s=0.5, score_s=0.01, step_s=0.5, publish_s=0.1, pull_s=0.2)


def scenario_of_speeds(seed: int, *, max_staleness: int, prompts_per_step: int, num_steps: int) -> Scenario:
    """Return a scenario that spends nearly all of its time in generation."""
    plan = replace(
        scenario_of(seed).plan,
        sampling=Sampling(max_tokens=round(WORKLOAD.tokens * MAX_OVER_MEAN)),
        num_supervised_steps=0,
        num_steps=num_steps,
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        sync_every=1,
        sync_every_s=0.0,
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
    return Scenario(seed, plan, fleet, workload=WORKLOAD, timeout_s=9000.0)


class WatchedCluster(SimulatedCluster):
    """Records at each step how long each rollout has worked. Expected lengths are known from an earlier epoch."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.seen: list[tuple[float, list[float]]] = []
        self.clock.after(0.0, self._set_expected_lengths)

    def _set_expected_lengths(self) -> None:
        plan = self.plan
        for number in range(plan.num_steps * plan.prompts_per_step):
            length = length_of(draw_seed(plan.seed, "train", number, 0), WORKLOAD.tokens)
            self.host.controller.state.replicas.lengths.note(f"train/{number}", "train", float(length))

    def record_step(self, whole) -> None:  # type: ignore[no-untyped-def]
        super().record_step(whole)
        rollouts = [replica for replica in self.replicas.values() if isinstance(replica, SimulatedRollout)]
        self.seen.append((self.now, [replica.busy_s for replica in rollouts]))


def busy_shares(cluster: WatchedCluster) -> list[float]:
    """Return the share of its slots that each rollout has used, without the first and the last steps."""
    (begin, before), (end, after) = cluster.seen[2], cluster.seen[-3]
    return [(b - a) / (end - begin) / SLOTS for a, b in zip(before, after, strict=True)]


def ideal_s(scenario: Scenario) -> float:
    """Return the duration of the run if no slot were ever idle."""
    plan = scenario.plan
    num = plan.num_steps * plan.prompts_per_step
    tokens = sum(length_of(draw_seed(plan.seed, "train", n, 0), WORKLOAD.tokens) for n in range(num))
    return tokens * WORKLOAD.token_s / sum(SPEEDS) / SLOTS


def test_routing_keeps_all_rollouts_busy() -> None:
    for seed in range(2):
        scenario = scenario_of_speeds(seed, max_staleness=2, prompts_per_step=120, num_steps=12)
        cluster = WatchedCluster(scenario)
        cluster.run()
        assert min(busy_shares(cluster)) > 0.95
        assert cluster.steps[-1].made_at < 1.1 * ideal_s(scenario)


def test_routing_avoids_waiting_for_the_slowest_rollout() -> None:
    """Synchronous steps with few groups. Routing by free slots alone takes 1.7 times the ideal time."""
    for seed in range(2):
        scenario = scenario_of_speeds(seed, max_staleness=0, prompts_per_step=60, num_steps=10)
        cluster = WatchedCluster(scenario)
        cluster.run()
        assert cluster.steps[-1].made_at < 1.45 * ideal_s(scenario)
