"""Shrinking of a scenario that fails: a smaller scenario with the same violation, printed as a test."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final

from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.errors import Violation
from starling.sim.scenario.faults import Faults
from starling.sim.scenario.scenario import Scenario, code_of

SEEDS_PER_CANDIDATE: Final = 16
"""A smaller run draws other random numbers and may fail under another seed, so this many seeds are tried."""
MAX_RUNS: Final = 600
MIN_TIMEOUT_S: Final = 200.0
"""Simulated time that even the smallest scenario gets before it counts as hanging."""

Runner = Callable[[Scenario], str | None]
"""Runs a scenario and returns its violation, or None."""


def violation_of(scenario: Scenario) -> str | None:
    """Run `scenario`, and return its violation, or None."""
    try:
        SimulatedCluster(scenario).run()
    except Violation as violation:
        return str(violation)
    return None


def kind_of(violation: str) -> str:
    """Return a violation without the names and numbers that differ between runs."""
    return re.sub(r"[\d.]+|[{(\[].*", "#", violation.partition(" (after ")[0])


def shrink(scenario: Scenario, violation: str, runner: Runner = violation_of) -> tuple[Scenario, str]:
    """Return the smallest scenario found that fails in the same way, and its violation.

    The search is greedy: the first simplification that still fails is kept, until none does.

    Args:
        scenario: scenario that fails.
        violation: its violation.
        runner: runs a scenario.
    """
    kind, runs_left = kind_of(violation), MAX_RUNS
    found = True
    while found and runs_left > 0:
        found = False
        for simpler in simplifications(scenario):
            for seed in range(scenario.seed, scenario.seed + SEEDS_PER_CANDIDATE):
                runs_left -= 1
                candidate = replace(simpler, seed=seed)
                problem = runner(candidate)
                if problem is not None and kind_of(problem) == kind:
                    scenario, violation, found = candidate, problem, True
                    break
            if found or runs_left <= 0:
                break
    return scenario, violation


def simplifications(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one simplification each: a fault less, a smaller fleet, or a smaller plan."""
    faults, fleet, plan = scenario.faults, scenario.fleet, scenario.plan
    for field in fields(Faults):
        if getattr(faults, field.name) != field.default:
            without: dict[str, Any] = {field.name: field.default}
            yield replace(scenario, faults=replace(faults, **without))
    for name in ("num_rollouts", "num_rewards", "num_policies", "num_teachers"):
        for num in _smaller(getattr(fleet, name), 1):
            required = {name: min(num, getattr(plan, name))} if hasattr(plan, name) else {}
            fewer: dict[str, Any] = {name: num}
            yield replace(scenario, fleet=replace(fleet, **fewer), plan=replace(plan, **required))
    if fleet.num_slots != 1:
        yield replace(scenario, fleet=replace(fleet, num_slots=1))
    leasts = {
        "num_steps": 1, "num_supervised_steps": 0, "prompts_per_step": 1, "examples_per_step": 1, "group_size": 1,
        "max_staleness": 0, "evaluate_at_start": 0, "evaluate_at_end": 0, "evaluate_every": 0, "save_every": 0,
        "dynamic_sampling": 0,
    }  # fmt: skip
    for name, least in leasts.items():
        value = getattr(plan, name, least)
        for num in _smaller(value, least):
            smaller: dict[str, Any] = {name: bool(num) if isinstance(value, bool) else num}
            yield replace(scenario, plan=replace(plan, **smaller))
    if scenario.timeout_s > MIN_TIMEOUT_S:
        yield replace(scenario, timeout_s=MIN_TIMEOUT_S)


def _smaller(value: int, least: int) -> Iterator[int]:
    """Yield `least`, the midpoint, and one less, as far as they are smaller than `value`."""
    yield from sorted({num for num in (least, (value + least) // 2, value - 1) if least <= num < value})


IMPORTS: Final = {
    "Sampling": "starling.common.wire.messages",
    "KINDS": "starling.common.kinds",
    "RunPlan": "starling.controller.core.plan",
    "Faults": "starling.sim.scenario.faults",
    "Fleet": "starling.sim.scenario.scenario",
    "Scenario": "starling.sim.scenario.scenario",
    "Workload": "starling.sim.scenario.scenario",
    "SimulatedCluster": "starling.sim.cluster.cluster",
}


def as_test(scenario: Scenario, violation: str, name: str) -> str:
    """Return a scenario as the source of a test, ready for a file of its own."""
    body = textwrap.indent(textwrap.fill(violation, 100), "    # ")
    body += f"\n    scenario = {code_of(scenario, '    ')}\n    SimulatedCluster(scenario).run()\n"
    used: dict[str, list[str]] = {}
    for word, module in IMPORTS.items():
        if f"{word}(" in body or f"{word}[" in body:
            used.setdefault(module, []).append(word)
    imports = [f"from {module} import {', '.join(words)}" for module, words in used.items()]
    return "\n".join(imports) + f"\n\n\ndef test_{name}() -> None:\n{body}"
