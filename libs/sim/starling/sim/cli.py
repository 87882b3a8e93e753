"""`starling sim`: a simulated cluster under faults, or a capacity question."""

from __future__ import annotations

import json as json_text
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Group, Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError
from starling.sim.campaign.campaign import SeedResult, run_campaign
from starling.sim.campaign.shrink import as_test, shrink
from starling.sim.capacity.capacity import Load, measure, parse_load, table_of
from starling.sim.capacity.chart import check_path, draw
from starling.sim.scenario.faults import ALL
from starling.sim.scenario.scenario import scenario_of

MAX_SEED: Final = (1 << 32) - 1
FAULTS: Final = Group("Runs under faults", sort_key=1)
CAPACITY: Final = Group("Capacity questions", sort_key=2)


def sim(
    *,
    faults: Annotated[
        str, Parameter(metavar="MIX[,MIX]", help=f"Mixes of faults: {', '.join(ALL)}; or all.", group=FAULTS)
    ] = "all",
    replicas: Annotated[
        int | None, Parameter(help="Size of the fleet; by default small, by the seed.", group=FAULTS)
    ] = None,
    no_shrink: Annotated[bool, Parameter(help="Do not reduce a failure to a test.", group=FAULTS)] = False,
    jobs: Annotated[int | None, Parameter(help="Processes; by default one per core.", group=FAULTS)] = None,
    seeds: Annotated[int | None, Parameter(help="How many; by default 10, and 3 for a question.")] = None,
    first_seed: Annotated[int, Parameter(help="The first of them.")] = 0,
    what_if: Annotated[
        tuple[str, ...],
        Parameter(metavar="CHANGES", help="Such as rollouts=512,response_length=2x; repeatable.", group=CAPACITY),
    ] = (),
    base: Annotated[str, Parameter(metavar="CHANGES", help="The load to compare with.", group=CAPACITY)] = "",
    picture: Annotated[
        Path | None, Parameter(metavar="FILE", help="Draw the answers: an .svg or a .png.", group=CAPACITY)
    ] = None,
    json: Annotated[bool, Parameter(help="Print the answers as one JSON list.", group=CAPACITY)] = False,
) -> int:
    """Simulate runs under faults, or estimate the effect of a change. Returns 1 when a guarantee was violated."""
    _check_faults(faults)
    _check_numbers(replicas=replicas, seeds=seeds, first_seed=first_seed, jobs=jobs)
    if what_if or base:
        return _answer(what_if, base, range(first_seed, first_seed + (seeds or 3)), picture, as_json=json)
    mixes = list(ALL) if faults == "all" else faults.split(",")
    num_jobs = jobs or os.cpu_count() or 1
    return _simulate(
        mixes, range(first_seed, first_seed + (seeds or 10)), replicas or 0, num_jobs, shrinks=not no_shrink
    )


def _simulate(mixes: list[str], seeds: range, num_replicas: int, num_jobs: int, *, shrinks: bool) -> int:
    """Run all seeds under each mix, and reduce the first failure of each to a test."""
    outcomes: list[SeedResult] = []
    num_failed = 0
    for outcome in run_campaign(mixes, seeds, num_replicas, num_jobs):
        outcomes.append(outcome)
        if outcome.violation:
            print(f"{outcome.mix}, seed {outcome.seed}: {outcome.violation}")
        if len(outcomes) == len(seeds):
            print(_line(outcomes), flush=True)
            failed = next((o for o in outcomes if o.violation), None)
            num_failed += sum(bool(o.violation) for o in outcomes)
            if failed is not None and shrinks:
                _print_test(failed, num_replicas)
            outcomes = []
    return 1 if num_failed else 0


def _answer(what_if: tuple[str, ...], base: str, seeds: range, picture: Path | None, *, as_json: bool) -> int:
    """Answer capacity questions with a table, and a picture if one is requested."""
    if picture is not None:
        check_path(picture)
    base_load = parse_load(base, Load()) if base else Load()
    loads = {base or "base": base_load, **{text: parse_load(text, base_load) for text in what_if}}
    answers = [measure(label, load, seeds) for label, load in loads.items()]
    if as_json:
        rows = [{**asdict(answer), "load": asdict(load)} for answer, load in zip(answers, loads.values(), strict=True)]
        print(json_text.dumps(rows))
    else:
        print(table_of(answers))
    if picture is not None:
        draw(answers, picture)
    return 0


def _line(outcomes: list[SeedResult]) -> str:
    """Return the outcome of a mix of faults in one line."""
    finished = sum(not o.violation for o in outcomes)
    events, cpu_s = sum(o.num_events for o in outcomes), sum(o.cpu_s for o in outcomes)
    simulated_s = sum(o.simulated_s for o in outcomes)
    return (
        f"{outcomes[0].mix}: {finished} of {len(outcomes)} seeds finish; {events:,} events in {simulated_s:,.0f} "
        f"simulated and {cpu_s:,.1f} real seconds, {events / max(cpu_s, 1e-9):,.0f} events/s"
    )


def _print_test(failed: SeedResult, num_replicas: int) -> None:
    scenario, violation = shrink(scenario_of(failed.seed, failed.mix, num_replicas), failed.violation)
    print(f"\n{as_test(scenario, violation, f'seed_{failed.seed}_of_{failed.mix}')}", flush=True)


def _check_faults(faults: str) -> None:
    """Raise ConfigError when a mix of faults has an unknown name."""
    unknown = sorted(set(faults.split(",")) - {*ALL, "all"})
    if unknown:
        raise ConfigError(f"--faults {unknown[0]} is not a mix of faults; choose from {', '.join(ALL)}, or all")


def _check_numbers(*, replicas: int | None, first_seed: int, **numbers: int | None) -> None:
    """Raise ConfigError when a number makes no run."""
    if replicas is not None and replicas < 3:
        raise ConfigError(f"--replicas is {replicas}; a run needs 3, a policy, a rollout and a reward")
    if not 0 <= first_seed <= MAX_SEED:
        raise ConfigError(f"--first-seed is {first_seed}; it must be at least 0, and at most {MAX_SEED}")
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; it must be at least 1")


command = define(
    "sim",
    sim,
    "[OPTIONS]",
    """Examples:
  starling sim --faults all --seeds 100
  starling sim --faults crashes --seeds 1 --first-seed 19
  starling sim --what-if rollouts=512,response_length=2x --picture answer.svg""",
)
