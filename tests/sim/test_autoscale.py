"""Simulated runs in which the number of rollouts follows the work: it settles where the rule says, under all faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from starling.controller.core.replicas.scaling import autoscale
from starling.controller.core.replicas.scaling.autoscale import AutoscaleRule, AutoscaleWindow
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.cluster.launcher import MAX_RESTARTS
from starling.sim.errors import Violation
from starling.sim.scenario.faults import CALM, Faults
from starling.sim.scenario.scenario import Fleet, Scenario, Workload, scenario_of

SEEDS = [pytest.param(range(1), id="0"), pytest.param(range(1, 10), id="1-9", marks=pytest.mark.campaign)]
RULE = AutoscaleRule(min=1, max=12, window_s=20.0, cooldown_s=10.0)
WORKLOAD = Workload(tokens=8.0, token_s=0.1, step_s=2.0)
"""A step takes as long as three or four rollouts take for its groups."""
LEAST, MOST = 3, 9
"""With fewer the policy starves for more than a fifth of the time; of more, half of the slots are idle."""
MIXES = {
    "calm": CALM,
    "late": Faults(launch_s=20.0),
    "refusals": Faults(launch_s=4.0, refusals=0.4),
    "deaths": Faults(rollout_crash_every_s=60.0, reward_crash_every_s=60.0, silent_deaths=0.2, launch_s=2.0),
    "controller": Faults(controller_crash_every_s=60.0, launch_s=4.0),
    "everything": Faults(
        loss=0.01,
        duplicates=0.05,
        rollout_crash_every_s=90.0,
        reward_crash_every_s=90.0,
        controller_crash_every_s=120.0,
        preempt_every_s=120.0,
        pull_failures=0.05,
        silent_deaths=0.2,
        launch_s=6.0,
        refusals=0.2,
    ),
}
WAITING = ("deaths", "controller", "everything")
"""Mixes in which the policy may wait for more than a tenth of the time, for other reasons than a lack of rollouts."""


def scenario(
    seed: int,
    faults: Faults = CALM,
    num_rollouts: int = 1,
    rule: AutoscaleRule = RULE,
    step_s: float = WORKLOAD.step_s,
    num_steps: int = 150,
) -> Scenario:
    """Return a long run that begins with `num_rollouts`; `step_s`: of the policy."""
    drawn = scenario_of(seed)
    plan = replace(
        drawn.plan,
        num_supervised_steps=0,
        num_steps=num_steps,
        prompts_per_step=16,
        max_staleness=1,
        sync_every=1,
        sync_every_s=0.0,
        evaluate_at_start=False,
        evaluate_at_end=False,
        evaluate_every=0,
        save_every=0,
        dynamic_sampling=False,
        num_policies=1,
        num_rollouts=num_rollouts,
        num_rewards=1,
        num_teachers=0,
        autoscale=rule,
    )
    fleet = Fleet(1, num_rollouts, 1, num_slots=2, speeds=(1.0,))
    return replace(
        drawn, plan=plan, fleet=fleet, faults=faults, workload=replace(WORKLOAD, step_s=step_s), timeout_s=3600.0
    )


def numbers(cluster: SimulatedCluster) -> list[int]:
    """Return the desired numbers of rollouts, from the first one on."""
    return [cluster.plan.num_rollouts, *(change.num for change in cluster.autoscaling.changes)]


def num_turns(numbers: list[int]) -> int:
    """Return how often a number that grew falls, and the other way round."""
    steps = [after - before for before, after in pairwise(numbers)]
    return sum(one * other < 0 for one, other in pairwise(steps))


def run(scenario: Scenario) -> SimulatedCluster:
    return SimulatedCluster(scenario).run()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("mix", MIXES)
def test_number_settles_under_every_mix(mix: str, seeds: range) -> None:
    for seed in seeds:
        seen = numbers(run(scenario(seed, MIXES[mix])))
        assert LEAST <= seen[-1] <= MOST, f"seed {seed}: {seen}"
        assert num_turns(seen) <= 1, f"seed {seed}: {seen}"


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("mix", MIXES)
def test_idle_rollouts_are_taken_away_under_every_mix(mix: str, seeds: range) -> None:
    """Faults after which the policy waits, such as the death of the only reward, keep them for longer."""
    for seed in seeds:
        seen = numbers(run(scenario(seed, MIXES[mix], 12)))
        assert num_turns(seen) == 0, f"seed {seed}: {seen}"
        assert mix in WAITING or LEAST <= seen[-1] < 12, f"seed {seed}: {seen}"


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("rule", "first", "settled"),
    [
        (replace(RULE, max=2), 1, 2),  # more would be needed
        (replace(RULE, min=11), 12, 11),  # fewer would do
    ],
)
def test_number_stays_within_its_bounds(rule: AutoscaleRule, first: int, settled: int, seeds: range) -> None:
    for seed in seeds:
        seen = numbers(run(scenario(seed, MIXES["deaths"], first, rule, num_steps=120)))
        assert seen[-1] == settled, f"seed {seed}: {seen}"


def test_slow_policy_needs_one_rollout() -> None:
    seen = numbers(run(scenario(0, num_rollouts=4, step_s=15.0, num_steps=30)))
    assert seen == [4, 3, 2, 1]


def test_launcher_without_room_ends_the_growth() -> None:
    """Nothing beyond what is missing already is asked for, and the run goes on with what is there."""
    cluster = run(scenario(0, Faults(refusals=1.0), num_steps=60))
    assert numbers(cluster) == [1, 2]
    assert 0 < cluster.launcher.num_refused <= 1 + MAX_RESTARTS


def no_cooldown_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AutoscaleWindow, "restart", lambda self, now: None)


def no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(autoscale, "next_count", lambda rule, load: load.present + 1)


@pytest.mark.parametrize(
    ("bug", "rule", "found"),
    [
        (no_cooldown_after_a_restart, RULE, "changed again after"),
        (no_limit, replace(RULE, max=2), "3 rollouts are desired"),
    ],
)
def test_controller_that_breaks_the_rule_is_detected(
    bug: Callable[[pytest.MonkeyPatch], None], rule: AutoscaleRule, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    scenarios = [scenario(seed, Faults(controller_crash_every_s=40.0), rule=rule) for seed in range(10)]
    with pytest.raises(Violation, match=found):
        list(map(run, scenarios))
