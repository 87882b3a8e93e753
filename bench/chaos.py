"""Chaos benchmark: faults drawn from a seed, injected into a run of the smoke recipe; losses and recovery times.

    python bench/chaos.py [--quick] [--seed N] [--faults N] [--only controller]

SIGKILL and SIGSTOP of every process, the controller included also while it compacts the journal, a full disk, and a
jumping wall clock. The journal is compacted every few steps. What the policy reports to have trained is compared with
the journal. Needs root (to
mount a small disk) and a C compiler (for a clock that only the run reads).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from figure import machine, print_figure, progress, quantile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "system"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "system" / "chaos"))
from chaos_run import chaos_run, finish
from faults import Fault, Kill, KillCompacting, Recovery, SetClock

QUICK_FAULTS = 12
FAULTS = 50


def main(argv: Sequence[str]) -> int:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FAULTS} faults instead of {FAULTS}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults and their order")
    parser.add_argument("--faults", type=int, default=0, help="number of faults")
    parser.add_argument("--only", metavar="NAME", help="only kill this process, to measure its recovery")
    options = parser.parse_args(argv)
    num = options.faults or (QUICK_FAULTS if options.quick else FAULTS)
    try:
        return measure(options.seed, num, options.only)
    except pytest.skip.Exception as skipped:
        detail = {"reason": str(skipped), **machine()}
        print_figure("chaos", "broken_guarantees", None, unit="count", goal=0, better="lower", detail=detail)
        return 0


def measure(seed: int, num: int, only: str | None) -> int:
    """Inject `num` faults into one run. Returns 1 when a guarantee was violated."""
    with tempfile.TemporaryDirectory() as folder:
        with chaos_run(Path(folder)) as run:
            faults = [Kill(only)] * num if only else run.faults(random.Random(seed), num)
            for number, fault in enumerate(faults, start=1):
                recovery = run.inject(fault)
                progress(f"{number:3} of {num}: {fault}: recovered after {recovery.seconds:.2f} s")
            history, found = finish(run)
        num_left = len(run.command.processes())
    for sentence in found:
        progress(f"violated: {sentence}")
    detail = {
        "seed": seed,
        "num_faults": len(run.recoveries),
        "num_steps": len(history.committed),
        "num_prompts": len(history.trained),
        "num_incarnations": len(history.incarnations),
        "num_compactions": history.num_compactions,
        "broken": found,
        **machine(),
    }
    last = max(history.trained, default=-1)
    counts = {
        "broken_guarantees": len(found),
        "prompts_lost": sum(position < last for position in history.lost),
        "prompts_trained_twice": len(history.trained_twice),
        "processes_left": num_left,
    }
    for figure, value in counts.items():
        print_figure("chaos", figure, value, unit="count", goal=0, better="lower", detail=detail)
    report_times(run.recoveries)
    return int(bool(found or num_left))


def report_times(recoveries: Sequence[Recovery]) -> None:
    """Print the time from the SIGKILL of each kind of process until the run is complete and has made another step."""
    for role, goal in (("controller", 5.0), ("policy", None), ("rollout", None), ("reward", None)):
        kills = [r for r in recoveries if killed_by(r.fault).startswith(role)]
        seconds = [recovery.seconds for recovery in kills]
        detail = {"p50": statistics.median(seconds), "worst": max(seconds)} if seconds else {"reason": "none was drawn"}
        print_figure(
            "chaos",
            f"{role}_recovery_p95",
            quantile(seconds, 0.95) if seconds else None,
            unit="s",
            goal=goal,
            better="lower",
            detail={**detail, "num": len(seconds), **machine()},
        )


def killed_by(fault: Fault) -> str:
    """Return the name of the process that a fault kills; empty for none."""
    if isinstance(fault, KillCompacting):
        return "controller"
    return fault.name if isinstance(fault, Kill | SetClock) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
