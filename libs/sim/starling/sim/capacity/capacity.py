"""Capacity questions: what becomes of staleness and throughput with other numbers than these?

A question is answered by simulating runs of the real controller, not by a formula: with as many replicas, as long
completions and as slow steps as it says.
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
from starling.sim.scenario.scenario import Durations, Fleet, Scenario

CHUNKS: Final = 8
"""A completion of mean length is simulated as so many tokens, each of which stands for many."""
WARM_UP: Final = 2
"""The first steps are not counted: nothing is under way yet when they begin."""


@dataclass(frozen=True)
class Load:
    """A run as its operator sees it. Lengths are in tokens, times in seconds."""

    rollouts: float = 64
    rewards: float = 4
    policies: float = 1
    slots: float = 8
    """Groups that a rollout or a reward works on at a time."""
    prompts_per_step: float = 128
    group_size: float = 8
    max_staleness: float = 1
    response_length: float = 1024
    """Mean length of a completion; the lengths have a heavy tail."""
    tokens_per_s: float = 40
    """Of one completion, while its rollout works on all its slots."""
    score_s: float = 0.5
    """For one completion."""
    step_s: float = 20.0
    """For one step, by one policy; several share it."""
    publish_s: float = 1.0
    pull_s: float = 4.0
    steps: float = 12


@dataclass(frozen=True)
class CapacityEstimate:
    """What the simulated runs of one load came to; means over the seeds."""

    label: str
    samples_per_s: float
    tokens_per_s: float
    step_s: float
    """From one step to the next."""
    staleness_mean: float
    """Of the samples trained, in versions."""
    staleness_max: int
    rollouts_busy: float
    """Share of the rollouts' slots that generate."""
    policy_busy: float
    """Share of the time in which the policy trains."""


def parse_load(text: str, base: Load) -> Load:
    """Return `base` with the changes that `text` names: ``rollouts=512,response_length=2x``.

    Raises:
        ConfigError: an unknown name, or a value that is no positive number and no multiple such as 2x.
    """
    changes: dict[str, float] = {}
    known = [field.name for field in fields(Load)]
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in known:
            raise ConfigError(f"{name!r} is no number of a load; it has {', '.join(known)}")
        try:
            number = getattr(base, name) * float(value[:-1]) if value.endswith("x") else float(value)
        except ValueError:
            raise ConfigError(f"{name}={value} is no number; write {name}=8, or {name}=2x for twice as much") from None
        least = 0 if name == "max_staleness" else 1e-3 if name.endswith("_s") else 1
        if not least <= number < 1e9:
            raise ConfigError(f"{name}={value} makes {number:g}; it must be at least {least:g} and below 1e9")
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
    work = Durations(
        tokens=CHUNKS,
        token_s=per_token_s,
        score_s=load.score_s,
        step_s=load.step_s,
        publish_s=load.publish_s,
        pull_s=load.pull_s,
    )
    fleet = Fleet(round(load.policies), round(load.rollouts), round(load.rewards), num_slots=round(load.slots))
    a_step_s = load.step_s * 4 + longest_s * 4 * max(1.0, load.prompts_per_step / load.rollouts / load.slots)
    patience_s = 600.0 + (steps + 1) * (a_step_s + load.score_s * load.prompts_per_step * load.group_size)
    return Scenario(seed=seed, plan=plan, fleet=fleet, work=work, patience_s=patience_s)


def measure(label: str, load: Load, seeds: range) -> CapacityEstimate:
    """Simulate `load` under each seed."""
    answers = [_measure(label, load, seed) for seed in seeds]
    means = {
        name: statistics.fmean(getattr(answer, name) for answer in answers)
        for name in asdict(answers[0])
        if name not in ("label", "staleness_max")
    }
    return CapacityEstimate(label=label, staleness_max=max(answer.staleness_max for answer in answers), **means)


def _measure(label: str, load: Load, seed: int) -> CapacityEstimate:
    world = SimulatedCluster(scenario_of_load(load, seed)).run()
    steps = world.steps[min(WARM_UP, len(world.steps) - 1) :]
    begin, end = steps[0].made_at, steps[-1].made_at
    counted = steps[1:] or steps
    seconds = max(end - begin, 1e-9)
    samples = sum(len(step.staleness) for step in counted)
    stale = [value for step in counted for value in step.staleness]
    tokens = sum(step.num_tokens for step in counted) * load.response_length / CHUNKS
    slots = round(load.rollouts) * round(load.slots)
    return CapacityEstimate(
        label=label,
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        step_s=seconds / len(counted),
        staleness_mean=statistics.fmean(stale),
        staleness_max=max(stale),
        rollouts_busy=world.busy_s["rollout"] / world.now / slots,
        policy_busy=world.busy_s["policy"] / world.now / round(load.policies),
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


def table_of(answers: list[CapacityEstimate]) -> str:
    """Return the answers as a table of text."""
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
        for a in answers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
