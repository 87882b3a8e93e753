"""History of figures: every figure that a bench printed, with its commit and machine, one JSON line each.

    python bench/history.py run [SCRIPT ...]               the quick benches; prints their figures (`make bench`)
    python bench/history.py record [--full] [SCRIPT ...]   and appends them to bench/history.jsonl (`make bench-record`)

A line has the commit, the date, the script with its arguments, what the script printed (bench, figure, value, unit,
goal, better, rounds), and the machine: its cores and processor, its load before the bench began, and how many cores
other work took meanwhile. A line without machine was taken from the page of figures as it was before the history.
`figures.py` makes the tables of docs/performance.md from it. A figure without a value is not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from figure import progress

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HISTORY = HERE / "history.jsonl"
SAMPLES = tuple(("check_samples.py", bench, "--rounds", "5") for bench in ("start", "core", "wire", "loop"))
QUICK: tuple[tuple[str, ...], ...] = (
    *SAMPLES,
    ("wire.py", "--quick"),
    ("fuzz.py", "--quick"),
    ("fuzz_controller.py", "--quick"),
    ("loop.py", "--quick"),
    ("controller.py", "--quick"),
    ("recovery.py", "--quick"),
    ("idle.py", "--quick"),
    ("controller_side_by_side.py", "--quick"),
    ("weightsync.py", "--quick"),
    ("weightsync_delta.py", "--quick"),
    ("weightsync_plan.py", "--quick"),
    ("weightsync_memory.py", "--quick"),
    ("weightsync_quantise.py", "--quick"),
    ("weightsync_vllm.py", "--quick"),
    ("memory.py", "--quick"),
    ("parallel.py", "--quick"),
    ("attention.py", "--quick"),
    ("train_step.py", "--quick"),
    ("learning.py", "--quick"),
    ("async.py", "--quick"),
    ("engine.py", "--quick"),
    ("rollout.py", "--quick"),
    ("sandbox.py", "--quick"),
    ("reward.py", "--quick"),
    ("reward_isolation.py", "--quick"),
    ("chaos.py", "--quick"),
)
"""The benches of `make bench` with their arguments."""
FULL: tuple[tuple[str, ...], ...] = (
    *SAMPLES,
    *((script,) for script, option in QUICK[len(SAMPLES) :] if option == "--quick"),
    ("weightsync_fanout.py",),
    ("weightsync_run.py",),
    ("weightsync_run.py", "--engine", "vllm"),
    ("weightsync_cold_start.py",),
    ("weightsync_faults.py",),
)
"""The same at full size, and those that have no quick form."""
CODE = ("libs", "services", "bench/*.py", "constraints.txt")
"""What figures depend on: it must be committed before they are recorded."""


@dataclass(frozen=True)
class Entry:
    """One figure of one commit."""

    commit: str
    date: str
    """When the bench ended, UTC, to the minute."""
    script: str
    """File in bench/, with its arguments."""
    bench: str
    figure: str
    value: float
    unit: str
    goal: float | None
    better: Literal["higher", "lower"]
    rounds: int | None
    machine: dict[str, Any] | None
    """`num_cores`, `cpu`, `load_1m` before the bench began, and `other_cores` while it ran."""

    @property
    def file(self) -> str:
        """Return the script without its arguments."""
        return self.script.split()[0]


def read_history(path: Path = HISTORY) -> list[Entry]:
    """Return all entries, oldest first."""
    return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]


def append_history(entries: Iterable[Entry], path: Path = HISTORY) -> None:
    """Append entries, one line each."""
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(entry), allow_nan=False) + "\n" for entry in entries)


def entries_of(lines: Iterable[str], script: str, commit: str, date: str, machine: dict[str, Any]) -> list[Entry]:
    """Return the entries for the lines that a bench printed."""
    found = []
    for line in lines:
        printed = json.loads(line)
        detail = printed.pop("detail")
        if printed["value"] is None:
            progress(f"not recorded: {printed['figure']}: {detail.get('reason', 'no value')}")
            continue
        rounds = detail.get("rounds")
        rounds = rounds if isinstance(rounds, int) else None
        found.append(Entry(commit=commit, date=date, script=script, rounds=rounds, machine=machine, **printed))
    return found


def machine() -> dict[str, Any]:
    """Return cores, processor and load."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "num_cores": len(os.sched_getaffinity(0)),
        "cpu": models[0].partition(":")[2].strip() if models else "unknown",
        "load_1m": round(os.getloadavg()[0], 2),
    }


def machine_cpu_s() -> float:
    """Return the processor seconds of all processes since the machine started, those of other guests included."""
    ticks = (
        Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )  # user nice system idle iowait irq softirq steal
    return sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """Return the processor seconds of the ended children of this process, and of the children that they awaited."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def committed(root: Path = ROOT) -> str:
    """Return the commit of the code; refuse if the code differs from it."""
    command = ["git", "status", "--porcelain", "--", *CODE]
    changed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    if changed:
        raise SystemExit(f"figures are recorded for a commit; commit these first:\n{changed}")
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def run(bench: tuple[str, ...], commit: str | None, folder: Path = HERE, history: Path = HISTORY) -> bool:
    """Run a bench and print its figures; record them for `commit` if there is one. Say whether it succeeded."""
    progress(f"\n=== {' '.join(bench)}")
    about = machine()
    started, all_before, ours_before = time.monotonic(), machine_cpu_s(), children_cpu_s()
    command = [sys.executable, str(folder / bench[0]), *bench[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(done.stdout, end="", flush=True)
    if done.returncode == 0 and commit is not None:
        others = machine_cpu_s() - all_before - (children_cpu_s() - ours_before)
        about["other_cores"] = round(max(0.0, others / (time.monotonic() - started)), 2)
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
        append_history(entries_of(done.stdout.splitlines(), " ".join(bench), commit, date, about), history)
    return done.returncode == 0


def main() -> int:
    """Run or record; return 1 if a bench failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "record"))
    parser.add_argument("scripts", nargs="*", help="only these")
    parser.add_argument("--full", action="store_true", help="at full size: hours")
    options = parser.parse_args()
    benches = FULL if options.full else QUICK
    names = {bench[0] for bench in benches}
    unknown = sorted(set(options.scripts) - names)
    if unknown:
        parser.error(f"no bench {unknown[0]!r}; there are {', '.join(sorted(names))}")
    commit = None if options.command == "run" else committed()
    wanted = [bench for bench in benches if not options.scripts or bench[0] in options.scripts]
    failed = [" ".join(bench) for bench in wanted if not run(bench, commit)]
    if failed:
        progress("\nFAILED: " + "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
