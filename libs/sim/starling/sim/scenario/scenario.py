"""Scenario of a simulated run: plan, fleet, workload and faults. Equal scenarios give equal runs."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from starling.common.kinds import EVALUATE, GENERATE, INFER, RunKind
from starling.common.wire.messages import Sampling
from starling.controller.core.plan import RunPlan
from starling.sim.scenario.faults import ALL, CALM, Faults

WIDTH: Final = 90
"""Longest expression, in characters, that `code_of` writes on one line."""
MAX_SLOTS: Final = 4
"""Maximum number of groups that a replica of a random scenario works on at a time."""

EVALUATION_SCORER: Final = "judge"
"""Label of the evaluation scorer of random scenarios."""
DYNAMIC_SHARE: Final = 0.4
"""Share of the random scenarios with dynamic sampling."""
ANSWERING: Final = (GENERATE, EVALUATE, INFER)
TEACHER_SHARE: Final = 0.4
"""Share of the random scenarios with teachers."""


@dataclass(frozen=True)
class Fleet:
    """The replicas at the beginning of a run."""

    num_policies: int = 1
    num_rollouts: int = 1
    num_rewards: int = 1
    num_teachers: int = 0
    num_followers: int = 0
    """Rollouts without slots, besides the others."""
    num_slots: int = 0
    """Groups that each replica works on at a time; 0 for a random number for each."""
    speeds: tuple[float, ...] = ()
    """Speeds of the rollouts relative to a typical one, in turn; empty for similar speeds."""


@dataclass(frozen=True)
class Workload:
    """Mean lengths of completions and mean durations of work, in seconds."""

    tokens: float = 4.0
    """Mean length of a completion. The lengths have a heavy tail, up to 8 times the mean."""
    token_s: float = 0.05
    score_s: float = 0.05
    """Per completion and scorer."""
    teach_s: float = 0.03
    """Per completion."""
    step_s: float = 0.2
    """Per step of one policy; several policies share it."""
    publish_s: float = 0.2
    pull_s: float = 0.3
    save_s: float = 0.2
    fsync_s: float = 0.005
    """Per commit of the journal."""


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run."""

    seed: int
    plan: RunPlan
    fleet: Fleet = Fleet()
    faults: Faults = CALM
    workload: Workload = Workload()
    stop_at: float | None = None
    """Simulated time of an operator's stop, if there is one."""
    timeout_s: float = 900.0
    """A run that takes longer, in simulated time, hangs."""


def scenario_of(seed: int, faults: str = "calm", num_replicas: int = 0) -> Scenario:
    """Return the scenario of `seed` under a fault mix: a small one, or one of `num_replicas` replicas.

    A large one has one reward replica per 15 rollouts, and a quarter as many prompts per step as slots. Its heartbeats
    are five times less frequent, as they should be in a large fleet, and so are its faults.
    """
    rng = random.Random(f"scenario {seed}")
    num_policies = rng.choice((1, 1, 2, 3))
    if num_replicas:
        others = max(2, num_replicas - num_policies)
        num_rewards = max(1, others // 16)
        fleet = Fleet(num_policies, others - num_rewards, num_rewards)
        workload, pace = Workload(token_s=0.5, score_s=0.2, step_s=2.0), 5.0
    else:
        fleet = Fleet(num_policies, rng.randint(1, 4), rng.randint(1, 3))
        workload, pace = Workload(), 1.0
    plan = RunPlan(
        seed=seed,
        sampling=Sampling(max_tokens=64),
        eval_sampling=Sampling(max_tokens=64, temperature=0.0),
        num_supervised_steps=rng.choice((0, 0, 2)),
        examples_per_step=rng.randint(2, 4),
        num_steps=rng.randint(3, 6),
        prompts_per_step=max(fleet.num_rollouts * MAX_SLOTS // 16, rng.randint(1, 4)),
        group_size=2,
        max_staleness=rng.choice((0, 1, 1, 2)),
        max_tries=8,
        evaluate_at_start=rng.random() < 0.5,
        evaluate_at_end=rng.random() < 0.5,
        evaluate_every=rng.choice((0, 0, 2)),
        eval_completions=rng.randint(1, 2),
        save_every=rng.choice((0, 1, 2, 3)),
        num_policies=rng.randint(1, fleet.num_policies),
        num_rollouts=rng.randint(1, fleet.num_rollouts),
        num_rewards=rng.randint(1, fleet.num_rewards),
        heartbeat_s=pace,
        lease_s=6.0 * pace,
        dynamic_sampling=rng.random() < DYNAMIC_SHARE,
        filter_limit=1000,
        relay_from_bytes=0 if seed % 2 else 1 << 20,
    )
    sync_every_s = (0.0, 1.0, 5.0)[seed % 3] * pace
    plan = replace(plan, sync_every=seed // 2 % (plan.max_staleness + 2), sync_every_s=sync_every_s)
    plan = replace(plan, evaluation_scorers=(EVALUATION_SCORER,), evaluated_share=seed // 3 % 3 / 2, alarm_steps=4)
    if rng.random() < TEACHER_SHARE:
        fleet, plan = _with_teachers(rng, fleet, plan)
    fleet = replace(fleet, num_followers=int(seed % 5 == 1))
    return Scenario(seed, plan, fleet, slowed(ALL[faults], pace), workload, timeout_s=900.0 * pace)


def answering_scenario_of(seed: int, faults: str = "calm") -> Scenario:
    """Return a small scenario of `seed` without a policy, which writes the answers of prompts to files."""
    scenario, rng = scenario_of(seed, faults), random.Random(f"answering {seed}")
    plan, kind = scenario.plan, rng.choice(ANSWERING)
    num_prompts = rng.randint(1, 6 * plan.prompts_per_step)
    fans_out = seed % 3 == 2
    fleet = replace(scenario.fleet, num_policies=int(fans_out))
    if not kind.is_scored:
        fleet = replace(fleet, num_rewards=0)
    if not kind.keeps_tokens:
        fleet = replace(fleet, num_teachers=0)
    plan = replace(
        plan,
        kind=kind,
        num_prompts=num_prompts,
        num_steps=-(-num_prompts // plan.prompts_per_step),
        num_supervised_steps=0,
        num_rewards=plan.num_rewards if fleet.num_rewards else 0,
        num_teachers=plan.num_teachers if fleet.num_teachers else 0,
        max_tries=rng.choice((0, 8)),
        fans_out=fans_out,
        num_policies=1,
        dynamic_sampling=False,
        evaluate_at_start=False,
        evaluate_at_end=False,
        evaluate_every=0,
    )
    return replace(scenario, plan=plan, fleet=fleet)


def _with_teachers(rng: random.Random, fleet: Fleet, plan: RunPlan) -> tuple[Fleet, RunPlan]:
    """Add teachers; half of the scenarios that need no rewards lose their reward replicas."""
    num = rng.randint(1, max(2, fleet.num_rewards))
    fleet, plan = replace(fleet, num_teachers=num), replace(plan, num_teachers=rng.randint(1, num))
    evaluates = plan.evaluate_at_start or plan.evaluate_at_end or plan.evaluate_every
    if evaluates or plan.dynamic_sampling or rng.random() < 0.5:
        return fleet, plan
    return replace(fleet, num_rewards=0), replace(plan, num_rewards=0)


def slowed(faults: Faults, pace: float) -> Faults:
    """Return faults that are `pace` times less frequent, for a fleet whose heartbeats are `pace` times slower."""
    rates = {f.name: getattr(faults, f.name) * pace for f in dataclasses.fields(Faults) if f.name.endswith("every_s")}
    return dataclasses.replace(faults, **rates)


def code_of(value: Any, indent: str = "") -> str:
    """Return the Python expression for a scenario, or a part of one, without values that equal their defaults."""
    if isinstance(value, RunKind):
        return repr(value)
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        fields = [(f.name, getattr(value, f.name), f.default) for f in msgspec.structs.fields(value)]
    else:
        return repr(value)
    inner = indent + "    "
    written = [f"{name}={code_of(given, inner)}" for name, given, default in fields if given != default]
    name, line = type(value).__name__, ", ".join(written)
    if len(line) < WIDTH and "\n" not in line:
        return f"{name}({line})"
    return f"{name}(\n" + "".join(f"{inner}{part},\n" for part in written) + f"{indent})"
