"""One simulated run as a value: plan, fleet, work and faults. The same value is the same run, to the last message."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from starling.common.ids import Activity
from starling.common.wire.messages import Sampling
from starling.controller.core.plan import RunPlan
from starling.sim.scenario.faults import ALL, CALM, Faults

WIDTH: Final = 90
"""Characters of an expression that is written on one line."""
SLOTS: Final = 4
"""Most groups that a replica of a random scenario works on at a time."""

DYNAMIC: Final = 0.4
"""Share of the random scenarios that set groups aside from which nothing can be learnt."""
ANSWERING: Final[tuple[Activity, ...]] = ("generate", "evaluate", "infer")
TAUGHT: Final = 0.4
"""Share of the random scenarios that have teachers."""


@dataclass(frozen=True)
class Fleet:
    """The replicas that are there from the beginning."""

    num_policies: int = 1
    num_rollouts: int = 1
    num_rewards: int = 1
    num_teachers: int = 0
    num_slots: int = 0
    """Groups that each works on at a time; 0 to draw it for each."""
    speeds: tuple[float, ...] = ()
    """How many times as fast as usual each rollout is, in turn; empty where they are about alike."""


@dataclass(frozen=True)
class Durations:
    """How long work takes, in seconds; what varies varies around these."""

    tokens: float = 4.0
    """Mean length of a completion. The lengths have a heavy tail, up to 8 times as much."""
    token_s: float = 0.05
    score_s: float = 0.05
    """For one completion."""
    teach_s: float = 0.03
    """For one completion."""
    step_s: float = 0.2
    """For one step, by one policy; several share it."""
    publish_s: float = 0.2
    pull_s: float = 0.3
    save_s: float = 0.2
    fsync_s: float = 0.005
    """For one commit of the journal."""


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run."""

    seed: int
    plan: RunPlan
    fleet: Fleet = Fleet()
    faults: Faults = CALM
    work: Durations = Durations()
    stop_at: float | None = None
    """When somebody asks for the end of the run, in seconds."""
    patience_s: float = 900.0
    """A run that takes longer, on simulated time, hangs."""


def scenario_of(seed: int, faults: str = "calm", num_replicas: int = 0) -> Scenario:
    """Return the scenario of `seed` under one of the mixes, small, or of `num_replicas` replicas.

    A large one has a reward replica for every 15 rollouts, and prompts for a quarter of its rollouts in a step. Its
    heart beats five times more slowly, as that of a large fleet should, and its faults are as much rarer.
    """
    rng = random.Random(f"scenario {seed}")
    num_policies = rng.choice((1, 1, 2, 3))
    if num_replicas:
        others = max(2, num_replicas - num_policies)
        num_rewards = max(1, others // 16)
        fleet = Fleet(num_policies, others - num_rewards, num_rewards)
        work, pace = Durations(token_s=0.5, score_s=0.2, step_s=2.0), 5.0
    else:
        fleet = Fleet(num_policies, rng.randint(1, 4), rng.randint(1, 3))
        work, pace = Durations(), 1.0
    plan = RunPlan(
        seed=seed,
        sampling=Sampling(max_tokens=64),
        eval_sampling=Sampling(max_tokens=64, temperature=0.0),
        num_supervised_steps=rng.choice((0, 0, 2)),
        examples_per_step=rng.randint(2, 4),
        num_steps=rng.randint(3, 6),
        prompts_per_step=max(fleet.num_rollouts * SLOTS // 16, rng.randint(1, 4)),
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
        dynamic_sampling=rng.random() < DYNAMIC,
        filter_limit=1000,
    )
    if rng.random() < TAUGHT:
        fleet, plan = _taught(rng, fleet, plan)
    patience_s = 900.0 * pace
    return Scenario(seed, plan, fleet, slowed(ALL[faults], pace), work, patience_s=patience_s)


def answering_of(seed: int, faults: str = "calm") -> Scenario:
    """Return a small scenario of `seed` without a policy, which answers prompts and writes them to files."""
    scenario, rng = scenario_of(seed, faults), random.Random(f"answering {seed}")
    plan, activity = scenario.plan, rng.choice(ANSWERING)
    num_prompts = rng.randint(1, 6 * plan.prompts_per_step)
    fleet = replace(scenario.fleet, num_policies=0)
    if activity == "infer":
        fleet = replace(fleet, num_rewards=0)
    if activity != "generate":
        fleet = replace(fleet, num_teachers=0)
    plan = replace(
        plan,
        activity=activity,
        num_prompts=num_prompts,
        num_steps=-(-num_prompts // plan.prompts_per_step),
        num_supervised_steps=0,
        num_rewards=plan.num_rewards if fleet.num_rewards else 0,
        num_teachers=plan.num_teachers if fleet.num_teachers else 0,
        max_tries=rng.choice((0, 8)),
        dynamic_sampling=False,
        evaluate_at_start=False,
        evaluate_at_end=False,
        evaluate_every=0,
    )
    return replace(scenario, plan=plan, fleet=fleet)


def _taught(rng: random.Random, fleet: Fleet, plan: RunPlan) -> tuple[Fleet, RunPlan]:
    """Return the same with teachers; where nothing needs rewards, perhaps with nobody who gives them."""
    num = rng.randint(1, max(2, fleet.num_rewards))
    fleet, plan = replace(fleet, num_teachers=num), replace(plan, num_teachers=rng.randint(1, num))
    evaluates = plan.evaluate_at_start or plan.evaluate_at_end or plan.evaluate_every
    if evaluates or plan.dynamic_sampling or rng.random() < 0.5:
        return fleet, plan
    return replace(fleet, num_rewards=0), replace(plan, num_rewards=0)


def slowed(faults: Faults, pace: float) -> Faults:
    """Return faults that happen `pace` times less often, as suits a fleet whose heart beats so much more slowly."""
    rates = {f.name: getattr(faults, f.name) * pace for f in dataclasses.fields(Faults) if f.name.endswith("every_s")}
    return dataclasses.replace(faults, **rates)


def code_of(value: Any, indent: str = "") -> str:
    """Write a scenario, or a part of one, as the expression that makes it: only what differs from the defaults."""
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        fields = [(f.name, getattr(value, f.name), f.default) for f in msgspec.structs.fields(value)]
    else:
        return repr(value)
    inner = indent + "    "
    written = [f"{name}={code_of(found, inner)}" for name, found, default in fields if found != default]
    name, line = type(value).__name__, ", ".join(written)
    if len(line) < WIDTH and "\n" not in line:
        return f"{name}({line})"
    return f"{name}(\n" + "".join(f"{inner}{part},\n" for part in written) + f"{indent})"
