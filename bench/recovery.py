"""Restart of a controller: its seconds and its memory, after few and after very many groups.

    python bench/recovery.py [--quick] [--folder FOLDER]

A run's journal and metrics.jsonl are written as a controller writes them, with compactions: the records of so many
groups of 8 completions go through the journal and through the core's state, a saved state of the policy prunes them,
and metrics.jsonl gets its lines. Then a real controller process is started on that folder. Timed is the whole start,
with the interpreter and its imports, until the core is restored; the memory is the greatest resident size until then.
The run of 10 million groups takes about an hour to write; with `--folder` it is kept, and continued by the next call.

    restart_s_<groups>          seconds from the start of the process to the restored core
    restart_mb_<groups>         greatest resident memory of that process
    growth_s_per_group          CPU seconds of a restart more per group, between the two longest runs: once the records
                                are compacted and the lengths of all prompts are known, it should be 0
    growth_bytes_per_group      resident memory more per group, likewise
    journal_bytes_per_group     growth of journal.sqlite per group, likewise
    compaction_ms               time of one compaction, the greatest: the controller does nothing else meanwhile
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from figure import machine, print_figure, progress

from starling.common.service import SECTIONS
from starling.common.settings import load
from starling.common.wire.messages import Status, TensorMeta, TrajectoryMeta
from starling.controller.core.compaction import compact
from starling.controller.core.records import (
    CheckpointWritten,
    CompletionsStored,
    GroupsOpened,
    JournalEntry,
    RewardsStored,
    StateCompacted,
    StepCommitted,
    StepFrozen,
    VersionPublished,
)
from starling.controller.core.recovery import restore
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.data.load import load_data
from starling.controller.settings import ControllerProcess
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import JOURNAL, start_incarnation
from starling.controller.shell.main import METRICS
from starling.controller.shell.outputs.append_file import AppendFile
from starling.controller.shell.status import MetricsHistory

PROMPTS_PER_STEP: Final = 64
GROUP_SIZE: Final = 8
NUM_ROWS: Final = 20_000
"""Prompts of the data: the journal keeps the measured length of each."""
RECORDS_PER_STEP: Final = 2 * PROMPTS_PER_STEP + 5
SAVE_EVERY: Final = 20
STEPS_PER_COMMIT: Final = 1
"""The journal prunes as many groups with each commit as a step has here, so that it keeps up."""
START_S: Final = 600.0
RECIPE: Final = f"""
[run]
id = "bench-recovery"
[network]
curve = false
host = "127.0.0.1"
[data]
source = "prompts.jsonl"
format = "{{question}}"
reference_column = ""
[rl]
num_steps = 1000000
prompts_per_step = {PROMPTS_PER_STEP}
group_size = {GROUP_SIZE}
max_staleness = 1
[evaluation]
at_end = false
"""
TENSORS: Final = tuple(
    TensorMeta(name=name, dtype="int32", shape=(8,), nbytes=32) for name in ("prompt", "tokens", "logprobs", "versions")
)
PAYLOAD: Final = (bytes(32),) * len(TENSORS)


@dataclass
class Restart:
    """One start of a controller."""

    seconds: float
    cpu_seconds: float
    """Of all its threads: what it takes when no other process wants the cores."""
    peak_mb: float


class RunWriter:
    """Writes the journal and the metrics of a run, step by step; continues those that are in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "recipe.toml").exists():
            (folder / "recipe.toml").write_text(RECIPE)
            rows = (json.dumps({"question": f"How much is {n} and {n + 1}?"}) for n in range(NUM_ROWS))
            (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        os.chdir(folder)  # the recipe names its data relative to the working folder
        settings = load(ControllerProcess, [folder / "recipe.toml"], [], others=SECTIONS)
        data = load_data(settings)
        self._compact_records = settings.controller.compact_records
        self._journal = Journal(folder / JOURNAL)
        self._state = ControllerState(data.plan, RunPrompts(data.prompts, data.examples, data.held_out))
        restore(self._state, self._journal.read())
        compacted = next((one for one in self._journal.records() if isinstance(one, StateCompacted)), None)
        self._metrics, self._history = AppendFile(folder / METRICS), MetricsHistory(0.0)
        self._history.read(folder / METRICS, compacted.metrics if compacted is not None else None)
        start_incarnation(self._journal, settings.run.id, settings.plan())
        self._journal.commit()
        self._opened = self._state.buffer.num_admitted
        self.num_groups = self._state.version * PROMPTS_PER_STEP
        self.num_between = self._compact_records // 2
        """More groups than one compaction covers."""
        self.compactions_s: list[float] = []

    def write(self, num_groups: int) -> None:
        """Write steps until the run has trained so many groups, and its next compaction is due: the slowest restart."""
        begun, first = time.monotonic(), self.num_groups
        while self.num_groups < num_groups or self._journal.num_uncompacted < self._compact_records - RECORDS_PER_STEP:
            step = self._state.version + 1
            self._step(step)
            if step % STEPS_PER_COMMIT == 0:
                self._journal.commit()
                self._compact_if_due()
            if step % 2000 == 0:
                rate = (self.num_groups - first) / (time.monotonic() - begun)
                progress(f"{self.num_groups:,} of {num_groups:,} groups, {rate:,.0f}/s")
        self._journal.commit()

    def close(self) -> int:
        """Close all files. Returns the size of the journal."""
        self._journal.close()
        self._metrics.close()
        return (self._folder / JOURNAL).stat().st_size

    def _step(self, step: int) -> None:
        first = (step - 1) * PROMPTS_PER_STEP
        ordinals = tuple(range(first, first + PROMPTS_PER_STEP))
        metrics = {"phase": "rl", "reward_mean": step % 7 / 7, **{f"metric_{n}": n / step for n in range(40)}}
        prompts = tuple(self._state.data.prompts.prompt(n).id for n in ordinals)
        self._apply([JournalEntry(one) for one in self._opening(step)])
        for ordinal in ordinals:
            self._apply([JournalEntry(self._completions(ordinal), PAYLOAD)])
            self._apply([JournalEntry(RewardsStored(key=f"t{ordinal}", rewards=(0.0, 1.0) * (GROUP_SIZE // 2)))])
        self._apply([JournalEntry(StepFrozen(step=step, ordinals=ordinals, prompts=prompts))])
        self._apply([JournalEntry(StepCommitted(step=step, metrics=metrics))])
        self._apply([JournalEntry(VersionPublished(version=step, root=f"{step:064x}"))])
        if step % SAVE_EVERY == 0:
            self._apply([JournalEntry(CheckpointWritten(step=step, path=f"states/version-{step}", state=True))])
            self._journal.prune(self._state.training.saved.previous)
        for kind, fields in (("step", {"step": step, **metrics}), ("trained", {"step": step, "prompts": prompts})):
            self._history.note(kind, fields)
            self._metrics.write(json.dumps({"time": 1.5, "kind": kind, **fields}))
        self.num_groups = ordinals[-1] + 1

    def _opening(self, step: int) -> Iterator[GroupsOpened]:
        wanted = (step + 1) * PROMPTS_PER_STEP  # those of this step, and of the next one
        if wanted > self._opened:
            yield GroupsOpened(first=self._opened, num=wanted - self._opened)
            self._opened = wanted

    def _completions(self, ordinal: int) -> CompletionsStored:
        version = self._state.version
        trajectory = TrajectoryMeta(
            status=Status.OK,
            num_tokens=40 + ordinal % 90,
            text="A text.",
            oldest_version=version,
            newest_version=version,
        )
        lease = f"generate:t{ordinal}:1.{ordinal}"
        return CompletionsStored(
            key=f"t{ordinal}", trajectories=(trajectory,) * GROUP_SIZE, tensors=TENSORS, lease=lease
        )

    def _apply(self, entries: list[JournalEntry]) -> None:
        restore(self._state, entries)
        for entry in entries:
            self._journal.append(entry.record, entry.payload)

    def _compact_if_due(self) -> None:
        if self._journal.num_uncompacted < self._compact_records:
            return
        begun = time.perf_counter()
        record, size_bytes = compact(self._state), self._metrics.sync()
        assert record is not None, "the run continues"
        assert size_bytes is not None, "there is space on the disk"
        self._journal.compact(msgspec.structs.replace(record, metrics=self._history.summary(size_bytes)))
        self.compactions_s.append(time.perf_counter() - begun)


def restart(folder: Path) -> Restart:
    """Start a controller on the folder of a run, and kill it when its core is restored."""
    log = folder / "controller.log"
    arguments = ["--config", str(folder / "recipe.toml"), "--dir", str(folder), "--network.port", "0"]
    begun = time.perf_counter()
    with (
        log.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-m", "starling.controller.shell.main", *arguments], cwd=folder, stdout=out, stderr=out
        ) as process,
    ):
        try:
            while "taken_up" not in log.read_text():
                if process.poll() is not None or time.perf_counter() - begun > START_S:
                    raise RuntimeError(f"the controller did not start: {log.read_text()[-2000:]}")
                time.sleep(0.005)
            seconds = time.perf_counter() - begun
            status = Path(f"/proc/{process.pid}/status").read_text()
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        finally:
            process.send_signal(signal.SIGKILL)
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None, "Linux tells the greatest resident size"
    cpu_seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return Restart(seconds, cpu_seconds, int(peak[1]) / 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the run; it is kept, and continued when it exists")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-recovery-") as temporary:
        folder = Path(temporary) if arguments.folder is None else arguments.folder
        folder.mkdir(exist_ok=True)
        measure(folder.resolve(), quick=arguments.quick)


def measure(folder: Path, *, quick: bool) -> None:
    """Write one run further and further, and restart its controller at each size."""
    sizes = (10_000, 100_000) if quick else (10_000, 1_000_000, 10_000_000)
    detail: dict[str, Any] = {"machine": machine(), "group_size": GROUP_SIZE, "rows": NUM_ROWS}
    found: dict[int, Restart] = {}
    journals: dict[int, int] = {}
    compactions_s: list[float] = []
    for size in sizes:
        writer = RunWriter(folder)
        is_longer = writer.num_groups > size + writer.num_between
        if not is_longer:
            writer.write(size)
        num_bytes = writer.close()
        compactions_s += writer.compactions_s
        if is_longer:
            progress(f"the run in {folder} has more than {size:,} groups already")
            continue
        restarts = [restart(folder) for _ in range(3 if quick else 5)]
        journals[size] = num_bytes
        found[size] = Restart(
            median(one.seconds for one in restarts),
            median(one.cpu_seconds for one in restarts),
            median(one.peak_mb for one in restarts),
        )
        raw = {
            "seconds": [round(one.seconds, 3) for one in restarts],
            "cpu_seconds": [one.cpu_seconds for one in restarts],
            "journal_bytes": num_bytes,
        }
        show(f"restart_s_{size}", found[size].seconds, "s", 5.0, detail | raw)
        raw = {"mb": [round(one.peak_mb, 1) for one in restarts]}
        show(f"restart_mb_{size}", found[size].peak_mb, "MB", 300.0, detail | raw)
    if len(found) > 1:
        first, last = sorted(found)[-2:]
        more, detail = last - first, {**detail, "from_groups": first, "to_groups": last}
        cpu_seconds, peak_mb = [found[n].cpu_seconds for n in (first, last)], [found[n].peak_mb for n in (first, last)]
        show("growth_s_per_group", (cpu_seconds[1] - cpu_seconds[0]) / more, "s", 1e-7, {**detail, "raw": cpu_seconds})
        grown = (peak_mb[1] - peak_mb[0]) * 2**20
        show("growth_bytes_per_group", grown / more, "bytes", 5.0, {**detail, "raw_mb": peak_mb})
        show("journal_bytes_per_group", (journals[last] - journals[first]) / more, "bytes", 5.0, detail)
    if compactions_s:
        raw = {"num": len(compactions_s), "median_ms": round(median(compactions_s) * 1000, 1)}
        show("compaction_ms", max(compactions_s) * 1000, "ms", 200.0, detail | raw)


def show(figure: str, value: float, unit: str, goal: float, detail: dict[str, Any]) -> None:
    """Print one figure; less is better."""
    print_figure("recovery", figure, value, unit=unit, goal=goal, better="lower", detail=detail)


if __name__ == "__main__":
    main()
