"""A thousand faults during weight transfers: the state of the destinations after each, and leaked resources.

    OMP_NUM_THREADS=1 python bench/weightsync_faults.py [--num 1000] [--seed 0]

Publishers and relays run in child processes, over every transport that is available. A fault is survived when the
destination then holds a complete and attested version, the new one or every bit of the old one, or reports that it is
torn, and when the next pull heals it (`tests/unit/weightsync/fault_kinds.py`). A fault of a relay, in a chain of a
publisher, two relays and a destination, is survived when all others hold the new version, and only the reader behind
the relay has read from the publisher: the buckets that had not arrived (`tests/unit/weightsync/relay_faults.py`). Ends
with 1 unless every fault was survived and nothing was leaked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch
from figure import machine, print_figure, progress, rounded, versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "weightsync"))
from fault_loop import run_faults

REPORT_EVERY = 100
PRELOADED = (
    "starling.weightsync.publisher.publisher",
    "starling.weightsync.puller.puller",
    "starling.weightsync.layouts.checkpoint",
    "starling.weightsync.tensors.modules",
)
"""Modules that the fork server of the publishers imports once."""


def show_progress(done: int) -> None:
    """Print the progress now and then."""
    if done % REPORT_EVERY == 0:
        progress(f"{done} faults")


def main() -> int:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    report = run_faults(arguments.num, arguments.seed, show_progress)
    kinds = {
        kind: {"injected": num, "survived": report.survived[kind], **report.outcomes.get(kind, {})}
        for kind, num in sorted(report.injected.items())
    }
    print_figure(
        "weightsync_faults",
        "faults_survived",
        report.survived.total(),
        unit="faults",
        goal=arguments.num,
        better="higher",
        detail={
            "injected": arguments.num,
            "seed": arguments.seed,
            "by_kind": kinds,
            "by_transport": dict(report.transports),
            "seconds": rounded(report.seconds),
            "leaks": {"total": report.leaks.total(), **report.leaks},
            "failures": report.failures[:10],
            "versions": versions("numpy", "torch", "msgspec"),
            "machine": machine(),
        },
    )
    return 0 if report.survived.total() == arguments.num and not report.leaks else 1


if __name__ == "__main__":
    sys.exit(main())
