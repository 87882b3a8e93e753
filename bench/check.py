"""Regressions of speed: the quick benches before and after a change, alternating on one machine.

    python bench/check.py [--base COMMIT] [--rounds N] [--only BENCH ...]

`make bench-check` runs it. Before the change is the last commit in common with the main branch (or `BASE=commit`);
after it is the working tree. Each side has its own checkout and environment (`check_checkouts.py`), and the same
scripts measure both (`check_samples.py`, those of the change). In each round both sides run, one directly after the
other, in turns first; a round before them is not counted.

A figure has regressed where the whole confidence interval of its ratio (`check_intervals.py`) lies beyond the
tolerance, twice: after the first rounds, and again in as many new ones, of which alone the second verdict is made. So
neither a single disturbed round nor a busy machine raises an alarm, and a cost that grew by 15 % does. A figure whose
interval includes a growth of 15 % is `unclear`, which is no failure: the machine is too busy to tell. The exit status
is 1 if a figure has regressed, and 0 if there is nothing to compare. A regression that is worth it is no failure where
a commit of the change says so in its last lines: `Slower: step_s the journal is durable`.

    bench   figure                   what it costs
    start   help_cpu_s               processor time of `starling --help`
    core    event_cpu_us             processor time of an event in the controller's core
    wire    link_round_trip_cpu_us   processor time of a round trip, both ends
            link_round_trip_us       wall clock of the same, 16 in flight
    loop    first_step_cpu_s         processor time of a run until its first step has ended, all processes
            first_step_s             wall clock of the same
            step_cpu_s               processor time of a step, all processes
            step_s                   wall clock of a step, without the time that its services waited for a core
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from check_checkouts import Side, base_commit, changed_files, check_out, git, is_measured
from check_intervals import MIN_ROUNDS, Ratio, is_regression, paired_ratio
from check_samples import GOALS, end
from figure import progress, rounded

ROUNDS = {"start": 8, "core": 8, "wire": 8, "loop": 6}
"""Even numbers, so that each side is as often the first of a round as the second."""
TOLERANCE = 0.07
"""Growth of a cost that is no regression. A growth of 15 % has to lie beyond it with its whole interval."""
TOLERANCES = {"link_round_trip_us": 0.10, "first_step_s": 0.10}
"""Figures in wall clock that other load disturbs most; the processor time of the same work has the narrower one."""
SOUGHT = 1.15
"""The growth to be found: a figure whose interval includes it is `unclear`."""
SAMPLE_TIMEOUT_S = 300


@dataclass
class Compared:
    """The samples of one figure, round by round."""

    bench: str
    figure: str
    unit: str
    before: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        """Return the growth that is no regression."""
        return TOLERANCES.get(self.figure, TOLERANCE)

    @property
    def ratio(self) -> Ratio:
        """Return now over before."""
        return paired_ratio(self.before, self.now)

    @property
    def regressed(self) -> bool:
        """Say whether the whole interval lies beyond the tolerance."""
        return is_regression(self.ratio, self.tolerance)

    @property
    def verdict(self) -> str:
        """Return the verdict; `faster` is as certain as `REGRESSED`, and `unclear` does not exclude a regression."""
        if self.regressed:
            return "REGRESSED"
        if self.ratio.high < 1 / (1 + self.tolerance):
            return "faster"
        return "ok" if self.ratio.high < SOUGHT else "unclear"


Sample = Callable[[Side, str], dict[str, tuple[float, str]]]
"""Takes a side and a bench, and returns value and unit of each of its figures."""


class NotMeasured(Exception):
    """A bench that failed on one side."""

    def __init__(self, side: Side, bench: str, output: str) -> None:
        super().__init__(f"{bench} failed {side.name} the change:\n{output[-3000:]}")
        self.side = side


def run_sample(scripts: Path, side: Side, bench: str) -> dict[str, tuple[float, str]]:
    """Run a quick bench of folder `scripts` once with the code of one side."""
    command = [str(side.python), str(scripts / "check_samples.py"), bench]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # Nothing is compiled meanwhile, and dictionaries and sets have the same order in every process.
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=side.folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=SAMPLE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(side, bench, f"it did not end within {SAMPLE_TIMEOUT_S} s") from None
        finally:
            process.terminate()  # not killed: it ends the run that it has started; of no effect on one that has ended
    if process.returncode:
        raise NotMeasured(side, bench, errors)
    lines = [json.loads(line) for line in printed.splitlines()]
    return {line["figure"]: (line["value"], line["unit"]) for line in lines}


def compare(
    bench: str, before: Side, now: Side, rounds: int, sample: Sample, is_late: Callable[[], bool] = lambda: False
) -> list[Compared]:
    """Measure a bench on both sides in turns; the first round, which fills caches, is not counted.

    When it is late, the rounds end as soon as they give an interval.
    """
    found: dict[str, Compared] = {}
    for number in range(-1, rounds):
        sides = (before, now) if number % 2 else (now, before)
        samples = {side.name: sample(side, bench) for side in sides}
        if number < 0:
            continue
        for figure in samples["before"].keys() & samples["after"].keys():
            (old, unit), (new, _) = samples["before"][figure], samples["after"][figure]
            one = found.setdefault(figure, Compared(bench, figure, unit))
            one.before.append(old)
            one.now.append(new)
        progress(f"{bench}, round {number + 1} of {rounds}: " + ", ".join(shown(found[name]) for name in sorted(found)))
        if number + 1 >= MIN_ROUNDS and is_late():
            break
    return [found[name] for name in sorted(found)]


def shown(one: Compared) -> str:
    """Return the last round of a figure, as text."""
    return f"{one.figure} {rounded(one.before[-1], 3):g} -> {rounded(one.now[-1], 3):g} {one.unit}"


def check(
    benches: Sequence[str],
    before: Side,
    now: Side,
    rounds: dict[str, int],
    sample: Sample,
    is_late: Callable[[], bool] = lambda: False,
) -> list[Compared]:
    """Return every figure; for a bench with a figure that seems to have regressed, those of the second rounds."""
    found: list[Compared] = []
    for bench in benches:
        try:
            figures = compare(bench, before, now, rounds[bench], sample, is_late)
        except NotMeasured as failure:
            if failure.side is now:
                raise
            sample(now, bench)  # what fails on both sides is an error
            progress(f"{bench} is not compared, because it cannot be measured before the change: {failure}")
            continue
        suspects = {one.figure for one in figures if one.regressed}
        if suspects:
            progress(f"{bench}: {', '.join(sorted(suspects))} beyond the tolerance; measuring again")
            again = compare(bench, before, now, rounds[bench], sample, is_late)
            figures = [one if one.figure in suspects else first for first, one in zip(figures, again, strict=True)]
        found += figures
    return found


def table(found: Iterable[Compared]) -> str:
    """Return the figures as a table."""
    head = ("bench", "figure", "goal", "before", "now", "now/before", "95 % interval", "tolerated", "verdict")
    rows = [head]
    for one in found:
        before, now = (f"{rounded(median(values), 3):g} {one.unit}" for values in (one.before, one.now))
        goal = f"{GOALS[one.figure]:g} {one.unit}" if one.figure in GOALS else ""
        ratio, interval = f"{one.ratio.value:.3f}", f"{one.ratio.low:.3f} to {one.ratio.high:.3f}"
        tolerated = f"{1 + one.tolerance:.2f}"
        rows.append((one.bench, one.figure, goal, before, now, ratio, interval, tolerated, one.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def stated_reasons(trailers: str) -> dict[str, str]:
    """Return why figures may have regressed, by figure, from lines of a figure and its reason."""
    lines = (line.partition(" ") for line in trailers.splitlines())
    return {figure: reason.strip() for figure, _, reason in lines if reason.strip()}


def explanation(one: Compared, reasons: Mapping[str, str]) -> str:
    """Return what is said of a figure that has regressed."""
    times = f"{one.ratio.value:.2f} times ({one.ratio.low:.2f} to {one.ratio.high:.2f})"
    said = f"REGRESSED: {one.figure} of {one.bench} is {times} what it was; tolerated are {1 + one.tolerance:.2f}."
    if one.figure in reasons:
        return f"{said}\nA commit of the change says why: {reasons[one.figure]}"
    return f"{said}\nFind the cause with a profile, or end a commit's message with `Slower: {one.figure} <why>`."


def samples_of(before: Side, now: Side) -> Sample:
    """Return the sampler: scripts of the change for both sides, and the older ones where those fail on older code."""
    scripts: dict[tuple[str, str], Path] = {}

    def sample(side: Side, bench: str) -> dict[str, tuple[float, str]]:
        folder = scripts.get((side.name, bench), now.folder / "bench")
        try:
            return run_sample(folder, side, bench)
        except NotMeasured:
            own = side.folder / "bench"
            if folder == own or not (own / "check_samples.py").exists():
                raise
            progress(f"{bench}: the code before the change is measured by its own script")
            scripts[side.name, bench] = own
            return run_sample(own, side, bench)

    return sample


def main() -> int:
    """Compare, print the table, and return 1 if a figure has regressed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=os.environ.get("BASE"), help="commit before the change")
    parser.add_argument("--rounds", type=int, help=f"of each bench, at least {MIN_ROUNDS}")
    parser.add_argument("--minutes", type=float, default=5.0, help="after them no more rounds than an interval needs")
    parser.add_argument("--only", nargs="+", choices=tuple(ROUNDS), default=tuple(ROUNDS), metavar="BENCH")
    parser.add_argument("--all", action="store_true", help="measure even if no measured file has changed")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {options.rounds} gives no interval; take at least {MIN_ROUNDS}")
    base = base_commit(options.base)
    if base is None:
        if options.base:
            parser.error(f"there is no commit {options.base!r} in this checkout")
        print("bench-check: this checkout has no parent commit to compare with (a shallow clone?); nothing is checked")
        return 0
    if not options.all and not any(map(is_measured, changed_files(base))):
        print(f"bench-check: no file that the quick benches run differs from {base[:12]}; nothing is checked")
        return 0
    signal.signal(signal.SIGTERM, end)
    rounds = {bench: options.rounds or ROUNDS[bench] for bench in ROUNDS}
    started = time.monotonic()
    ends, subject = started + 60 * options.minutes, git("log", "-1", "--format=%h %s", base)
    folder = Path(tempfile.mkdtemp(prefix="starling-bench-"))
    try:
        before, now = check_out(base, folder / "before", "before"), check_out(None, folder / "after", "after")
        found = check(options.only, before, now, rounds, samples_of(before, now), lambda: time.monotonic() > ends)
    except NotMeasured as failure:
        print(f"bench-check: {failure}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\nbefore: {subject}; now: the working tree; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(table(found))
    reasons = stated_reasons(git("log", "--format=%(trailers:key=Slower,valueonly)", f"{base}..HEAD") or "")
    for one in found:
        if one.regressed:
            print(f"\n{explanation(one, reasons)}")
    regressed = [one for one in found if one.regressed and one.figure not in reasons]
    print(f"\n{'FAILED' if regressed else 'passed'} after {time.monotonic() - started:.0f} s")
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main())
