"""`starling sim`: a simulated cluster under faults, or a capacity question."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from starling.common.errors import ConfigError, StarlingError
from starling.sim.campaign.campaign import SeedResult, run_campaign
from starling.sim.campaign.shrink import as_test, shrink
from starling.sim.capacity.capacity import Load, measure, parse_load, table_of
from starling.sim.capacity.chart import check_path, draw
from starling.sim.scenario.faults import ALL
from starling.sim.scenario.scenario import scenario_of


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; returns 1 when a promise was broken."""
    arguments = _parser().parse_args(argv)
    try:
        return what_if(arguments) if arguments.what_if or arguments.base else simulate(arguments)
    except StarlingError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def simulate(arguments: argparse.Namespace) -> int:
    """Run all seeds under the mixes asked for, and make a test of every mix's first failure."""
    _check(arguments)
    mixes = list(ALL) if arguments.faults == "all" else arguments.faults.split(",")
    seeds = range(arguments.first_seed, arguments.first_seed + (arguments.seeds or 10))
    outcomes: list[SeedResult] = []
    num_failed = 0
    for outcome in run_campaign(mixes, seeds, arguments.replicas, arguments.jobs):
        outcomes.append(outcome)
        if outcome.violation:
            print(f"{outcome.mix}, seed {outcome.seed}: {outcome.violation}")
        if len(outcomes) == len(seeds):
            print(_line(outcomes), flush=True)
            failed = next((o for o in outcomes if o.violation), None)
            num_failed += sum(bool(o.violation) for o in outcomes)
            if failed is not None and arguments.shrink:
                _print_test(failed, arguments.replicas)
            outcomes = []
    return 1 if num_failed else 0


def what_if(arguments: argparse.Namespace) -> int:
    """Answer a capacity question with a table, and a picture if one is asked for."""
    _check(arguments)
    if arguments.picture is not None:
        check_path(arguments.picture)
    base = parse_load(arguments.base, Load()) if arguments.base else Load()
    loads = {arguments.base or "base": base}
    for text in arguments.what_if:
        loads[text] = parse_load(text, base)
    seeds = range(arguments.first_seed, arguments.first_seed + (arguments.seeds or 3))
    answers = [measure(label, load, seeds) for label, load in loads.items()]
    if arguments.json:
        print(
            json.dumps([{**asdict(a), "load": asdict(load)} for a, load in zip(answers, loads.values(), strict=True)])
        )
    else:
        print(table_of(answers))
    if arguments.picture is not None:
        draw(answers, arguments.picture)
    return 0


def _line(outcomes: list[SeedResult]) -> str:
    """Say in one line what became of a mix."""
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


def _check(arguments: argparse.Namespace) -> None:
    """Refuse numbers and mixes that make no run.

    Raises:
        ConfigError: naming the value and what it may be.
    """
    unknown = sorted(set(arguments.faults.split(",")) - {*ALL, "all"})
    if unknown:
        raise ConfigError(
            f"--faults {unknown[0]} is no mix of faults; there are {', '.join(ALL)}, and all of them: all"
        )
    if arguments.replicas and arguments.replicas < 3:
        raise ConfigError(f"--replicas is {arguments.replicas}; a run needs 3, a policy, a rollout and a reward")
    for name, least in (("replicas", 0), ("seeds", 0), ("first_seed", 0), ("jobs", 1)):
        if getattr(arguments, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {getattr(arguments, name)}; it must be at least {least}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="starling sim", description=__doc__, allow_abbrev=False)
    parser.add_argument("--replicas", type=int, default=0, help="size of the fleet (default: small, by the seed)")
    parser.add_argument("--faults", default="all", help=f"{', '.join(ALL)}, several with commas, or all (default)")
    parser.add_argument("--seeds", type=int, default=0, help="how many (default: 10, and 3 for a question)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="make no test of a failure")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGES",
        help="a capacity question, such as rollouts=512,response_length=2x; may be given several times",
    )
    parser.add_argument("--base", default="", metavar="CHANGES", help="what the questions are compared with")
    parser.add_argument("--picture", type=Path, help="draw the answers: an .svg or a .png")
    parser.add_argument("--json", action="store_true", help="print the answers as one JSON list")
    return parser


if __name__ == "__main__":
    sys.exit(main())
