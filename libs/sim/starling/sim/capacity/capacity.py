"""Capacity estimates: staleness and throughput of a run with other numbers of replicas, lengths and durations.

An estimate comes from simulated runs of the real controller, not from a formula.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.controller.core.plan import RunPlan
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.scenario.scenario import Fleet, Scenario, Workload

CHUNKS: Final = 8
"""Simulated tokens of a completion of mean length; each stands for many."""
NUM_WARMUP_STEPS: Final = 2
"""Steps at the beginning that are not measured, because no groups are in flight yet when they begin."""


@dataclass(frozen=True)
class Load:
    """Numbers of a run as its operator knows them. Lengths are in tokens, times in seconds."""

    rollouts: float = 64
    rewards: float = 4
    policies: float = 1
    slots: float = 8
    """Groups that a rollout or a reward replica works on at a time."""
    prompts_per_step: float = 128
    group_size: float = 8
    max_staleness: float = 1
    response_length: float = 1024
    """Mean length of a completion. The lengths have a heavy tail."""
    tokens_per_s: float = 40
    """Per completion, while all slots of its rollout are busy."""
    score_s: float = 0.5
    """Per completion."""
    step_s: float = 20.0
    """Per step of one policy; several policies share it."""
    publish_s: float = 1.0
    pull_s: float = 4.0
    steps: float = 12


@dataclass(frozen=True)
class CapacityEstimate:
    """Result of the simulated runs of one load; means over the seeds."""

    label: str
    samples_per_s: float
    tokens_per_s: float
    step_s: float
    """Time between two steps."""
    staleness_mean: float
    """Of the trained samples, in versions."""
    staleness_max: int
    rollouts_busy: float
    """Share of the rollouts' slots that are generating."""
    policy_busy: float
    """Share of the time that the policy trains."""


def parse_load(text: str, base: Load) -> Load:
    """Return `base` with the changes in `text`, such as ``rollouts=512,response_length=2x``.

    Raises:
        ConfigError: a name is unknown, or a value is neither a positive number nor a multiple such as 2x.
    """
    changes: dict[str, float] = {}
    names = [field.name for field in fields(Load)]
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(f"{name!r} is not a number of a load; choose one of {', '.join(names)}")
        try:
            number = getattr(base, name) * float(value[:-1]) if value.endswith("x") else float(value)
        except ValueError:
            raise ConfigError(
                f"{name}={value} is not a number; write {name}=8, or {name}=2x for twice the value"
            ) from None
        least = 0 if name == "max_staleness" else 1e-3 if name.endswith("_s") else 1
        if not least <= number < 1e9:
            raise ConfigError(f"{name}={value} is {number:g}; it must be at least {least:g} and below 1e9")
        changes[name] = number
    return replace(base, **changes)


def scenario_of_load(load: Load, seed: int) -> Scenario:
    """Return the scenario that simulates `load`."""
    per_token_s = load.response_length / CHUNKS / load.tokens_per_s
    longest_s = 8 * load.response_length / load.tokens_per_s
    steps = round(load.steps)
    plan = RunPlan(
        seed=seed,
        sampling=Sampling(max_tokens=8 * CHUNKS),
        eval_sampling=Sampling(max_tokens=1, temperature=0.0),
        num_steps=steps,
        prompts_per_step=round(load.prompts_per_step),
        group_size=round(load.group_size),
        max_staleness=round(load.max_staleness),
        num_rollouts=round(load.rollouts),
        num_rewards=round(load.rewards),
        heartbeat_s=max(1.0, load.rollouts / 100),
        lease_s=max(10.0, load.rollouts / 10),
    )
    workload = Workload(
        tokens=CHUNKS,
        token_s=per_token_s,
        score_s=load.score_s,
        step_s=load.step_s,
        publish_s=load.publish_s,
        pull_s=load.pull_s,
    )
    fleet = Fleet(round(load.policies), round(load.rollouts), round(load.rewards), num_slots=round(load.slots))
    max_step_s = load.step_s * 4 + longest_s * 4 * max(1.0, load.prompts_per_step / load.rollouts / load.slots)
    timeout_s = 600.0 + (steps + 1) * (max_step_s + load.score_s * load.prompts_per_step * load.group_size)
    return Scenario(seed=seed, plan=plan, fleet=fleet, workload=workload, timeout_s=timeout_s)


def measure(label: str, load: Load, seeds: range) -> CapacityEstimate:
    """Simulate `load` with each seed, and return the means."""
    estimates = [_measure(label, load, seed) for seed in seeds]
    means = {
        name: statistics.fmean(getattr(estimate, name) for estimate in estimates)
        for name in asdict(estimates[0])
        if name not in ("label", "staleness_max")
    }
    return CapacityEstimate(label=label, staleness_max=max(estimate.staleness_max for estimate in estimates), **means)


def _measure(label: str, load: Load, seed: int) -> CapacityEstimate:
    cluster = SimulatedCluster(scenario_of_load(load, seed)).run()
    steps = cluster.steps[min(NUM_WARMUP_STEPS, len(cluster.steps) - 1) :]
    begin, end = steps[0].made_at, steps[-1].made_at
    counted = steps[1:] or steps
    seconds = max(end - begin, 1e-9)
    samples = sum(len(step.staleness) for step in counted)
    staleness = [value for step in counted for value in step.staleness]
    tokens = sum(step.num_tokens for step in counted) * load.response_length / CHUNKS
    slots = round(load.rollouts) * round(load.slots)
    return CapacityEstimate(
        label=label,
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        step_s=seconds / len(counted),
        staleness_mean=statistics.fmean(staleness),
        staleness_max=max(staleness),
        rollouts_busy=cluster.busy_s["rollout"] / cluster.now / slots,
        policy_busy=cluster.busy_s["policy"] / cluster.now / round(load.policies),
    )


HEADINGS: Final[Mapping[str, str]] = {
    "label": "load",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "step_s": "s/step",
    "staleness_mean": "staleness",
    "staleness_max": "max",
    "rollouts_busy": "rollouts busy",
    "policy_busy": "policy busy",
}


def table_of(estimates: list[CapacityEstimate]) -> str:
    """Return the estimates as a text table."""
    rows = [tuple(HEADINGS.values())]
    rows += [
        (
            a.label,
            f"{a.samples_per_s:,.1f}",
            f"{a.tokens_per_s:,.0f}",
            f"{a.step_s:.1f}",
            f"{a.staleness_mean:.2f}",
            f"{a.staleness_max}",
            f"{a.rollouts_busy:.0%}",
            f"{a.policy_busy:.0%}",
        )
        for a in estimates
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
