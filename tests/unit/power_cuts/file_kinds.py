"""Every kind of file that a run writes and reads again, with its real writer and its real reader."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from journal_writer import record_of
from recorded_run import record_run
from test_cli_warm_start import recipe
from test_trajectory_files import group
from transcript import SMALL, Stream

from starling.cli.operate import command as operate
from starling.cli.report import replay as reports
from starling.cli.run.attempt import Attempt, read_metrics
from starling.common.files import parse_line, write_whole
from starling.common.net.curve import ALLOWED, load_allowed, load_key
from starling.common.settings import read_toml
from starling.controller.core.compaction import compact
from starling.controller.core.machine import Controller
from starling.controller.core.records import (
    CompletionsStored,
    ControllerStarted,
    JournalEntry,
    StateCompacted,
    StepCommitted,
    StepFrozen,
)
from starling.controller.data.trajectories import FOLDER, INDEX, read_file, read_index
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.loggers.logger_thread import LogEntry, LoggerThread
from starling.controller.shell.outputs.append_file import AppendFile
from starling.controller.shell.outputs.samples import SAMPLES, Samples
from starling.controller.shell.outputs.trajectory_writer import TrajectoryFiles
from starling.controller.shell.recording.format import read_recording
from starling.controller.shell.status import MetricsHistory
from starling.policy.train.checkpoint.header import STATES, find_state, newest_state
from starling.policy.train.checkpoint.state import HostBuffers, StateMetadata, StateStore, take_state
from starling.policy.train.checkpoint.storage import Storage


@dataclass(frozen=True)
class FileKind:
    """One kind of file."""

    name: str
    write: Callable[[Path], object]
    """Writes the files of a run into an empty folder."""
    file: str
    """The one that is cut, in that folder."""
    read: Callable[[Path], Any]
    """Reads it as a resumed run, or a command, does."""
    accepts: Callable[[Any, Any], bool]
    """Given what is read from the whole file and from the cut one: whether the latter is right."""
    num: int = 60
    """Places where it is cut in a test that does not cut everywhere."""
    survives: bool = False
    """Reading never fails, however the file is cut."""
    writes: bool = True
    """Reading changes files."""
    large: bool = False
    """A campaign cuts it at so many places that they are divided among several tests."""


def same(whole: Any, found: Any) -> bool:
    """Accept what was written, and nothing else."""
    return bool(found == whole)


def begins(whole: list[Any], found: list[Any]) -> bool:
    """Accept the beginning of what was written."""
    return found == whole[: len(found)]


# --- journal ----------------------------------------------------------------------------------------------------------

JOURNAL = "journal.sqlite"


def write_journal(folder: Path) -> None:
    """Write groups of two steps, the first one committed, in a file without a log."""
    with contextlib.closing(Journal(folder / JOURNAL)) as journal:
        _fill(journal)


def write_journal_log(folder: Path, then: Callable[[Journal], None] = lambda _: None) -> None:
    """Write the same into the log only, as a machine that fails leaves it, `then` something more."""
    with contextlib.closing(Journal(folder / "open.sqlite")) as journal:
        journal._db.execute("PRAGMA wal_autocheckpoint = 0")
        _fill(journal)
        then(journal)
        for end in ("", "-wal", "-shm"):
            (folder / f"{JOURNAL}{end}").write_bytes((folder / f"open.sqlite{end}").read_bytes())
    for path in folder.glob("open.sqlite*"):
        path.unlink()


def write_compacted_log(folder: Path) -> None:
    """Write it, compact it, and write on."""
    write_journal_log(folder, _compact)


def _compact(journal: Journal) -> None:
    state = Controller(SMALL, Stream("train"), Stream("sft"), (), journal=[], incarnation=1).state
    record = compact(state)
    assert record is not None
    journal.compact(record)
    journal.append(ControllerStarted(incarnation=2))
    journal.commit()


def _fill(journal: Journal) -> None:
    journal.append(ControllerStarted(incarnation=1))
    for number in range(16):
        record, payload = record_of(number)
        journal.append(record, tuple(buffer * 20 for buffer in payload))
        journal.commit()
        if number % 8 == 7:
            ordinals = tuple(range(number // 2 - 3, number // 2 + 1))
            journal.append(StepFrozen(step=number // 8 + 1, ordinals=ordinals, prompts=tuple(map(str, ordinals))))
            journal.commit()
    journal.append(StepCommitted(step=1))
    journal.commit()


def read_journal(folder: Path) -> list[JournalEntry]:
    """Read all entries, and those of the committed step, as a restart does; then write on."""
    with contextlib.closing(Journal(folder / JOURNAL)) as journal:
        num_records = sum(1 for _ in journal.records())
        entries = list(journal.read())
        assert num_records == sum(not entry.kept for entry in entries)
        if any(isinstance(entry.record, StepCommitted) for entry in entries):
            entries += journal.fetch(1)
        journal.append(ControllerStarted(incarnation=2))
        journal.commit()
    return entries


def is_earlier_journal(whole: list[JournalEntry], found: list[JournalEntry]) -> bool:
    """Accept the records of the first transactions: those of groups are complete until their step is committed."""
    complete = {entry.record.key: entry for entry in whole if isinstance(entry.record, CompletionsStored)}
    return len(found) <= len(whole) and all(
        entry == known or (isinstance(known.record, CompletionsStored) and entry == complete[known.record.key])
        for known, entry in zip(whole, found, strict=False)
    )


def is_earlier_compacted_journal(whole: list[JournalEntry], found: list[JournalEntry]) -> bool:
    """Accept the journal before and after its compaction."""
    if any(isinstance(entry.record, StateCompacted) for entry in found):
        return begins(whole, found)
    return is_earlier_journal(uncompacted(), found)


@cache
def uncompacted() -> list[JournalEntry]:
    """Return what is read of the journal without its compaction."""
    with tempfile.TemporaryDirectory() as folder:
        write_journal(Path(folder))
        return read_journal(Path(folder))


# --- lines ------------------------------------------------------------------------------------------------------------

LINES = [
    {"kind": "joined", "replica": "rollout-0", "text": "naïve ✓"},
    *({"kind": "step", "step": step, "reward_mean": step / 4} for step in range(1, 5)),
    {"kind": "trained", "step": 4, "prompts": ["a", "b"]},
    {"kind": "evaluation", "version": 4, "reward_mean": 0.5},
]


def write_metrics(folder: Path) -> None:
    """Write metrics.jsonl."""
    lines = AppendFile(folder / "metrics.jsonl")
    for line in LINES:
        lines.write(json.dumps(line, ensure_ascii=False))
    lines.close()


def resume_metrics(folder: Path) -> tuple[set[tuple[str, int]], list[dict[str, Any]]]:
    """Read the lines as a restart does, and write another one; return what both readers find."""
    written = MetricsHistory(0.0).read(folder / "metrics.jsonl")
    lines = AppendFile(folder / "metrics.jsonl")
    lines.write('{"kind": "step", "step": 5}')
    lines.close()
    return written, read_metrics(folder / "metrics.jsonl")


def is_earlier_metrics(whole: Any, found: Any) -> bool:
    """Accept the first lines, and the one that was written afterwards."""
    return found[0] <= whole[0] and begins(whole[1], found[1][:-1]) and found[1][-1:] == whole[1][-1:]


def write_samples(folder: Path) -> None:
    """Write samples.jsonl."""
    samples = Samples(folder, 1 << 20)
    samples.write(1, [{"text": "x" * 50}, {"text": "ü"}])
    samples.close()


def resume_samples(folder: Path) -> list[Any]:
    """Write on, and return every line that can be read."""
    samples = Samples(folder, 1 << 20)
    samples.write(2, [{"text": "new"}])
    samples.close()
    lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True)
    return [line for line in map(parse_line, lines) if line is not None]


def ends_alike(whole: list[Any], found: list[Any]) -> bool:
    """Accept the first lines and the last one."""
    return begins(whole[:-1], found[:-1]) and found[-1] == whole[-1]


# --- recordings and trajectories --------------------------------------------------------------------------------------

RECORDING = "events-1.rec"


def write_recording(folder: Path) -> None:
    """Record the first events of a run."""
    record_run(folder / RECORDING, max_events=6)


def read_events(folder: Path) -> list[Any]:
    """Return header, journal and entries; the last entry says how it ended."""
    header, past, entries = read_recording(folder / RECORDING)
    return [header, past, *entries]


def is_earlier_recording(whole: list[Any], found: list[Any]) -> bool:
    """Accept the first events, if the end says that the recording was cut off."""
    return found == whole or (begins(whole, found[:-1]) and found[-1].cut_off)


def write_report(folder: Path) -> None:
    """Write a crash report."""
    write_recording(folder)
    reports.record_run(folder, None)
    (folder / RECORDING).unlink()


def read_report(folder: Path) -> Any:
    """Return the state at the end of the recording in a crash report."""
    return reports.state_view(reports.replay(reports._find(folder / reports.REPORT, None), None))


def write_trajectories(folder: Path) -> None:
    """Write the files of two steps."""
    files = TrajectoryFiles(folder, "run/1")
    for step in (1, 2):
        files.write(step, [group(step)])


def resume_trajectories(folder: Path) -> list[Any]:
    """Write a third file, and read all of them."""
    files = TrajectoryFiles(folder, "run/1")
    files.recover()
    files.write(3, [group(3)])
    return [(line, read_file(folder / FOLDER, line)) for line in read_index(folder / FOLDER)]


# --- states -----------------------------------------------------------------------------------------------------------


def write_states(folder: Path) -> None:
    """Write two states."""
    store = StateStore(Storage(str(folder / STATES)))
    for version in (1, 2):
        tensors = {"weights/w": torch.full((8,), float(version)), "trainer/w": torch.ones(8)}
        metadata = StateMetadata(run="run/1", version=version, next_prompt=version * 4)
        store.write(take_state(metadata, tensors, torch.device("cpu"), HostBuffers()))


def newest_version(folder: Path) -> int:
    """Return the version that a policy resumes from."""
    found = newest_state(Storage(str(folder / STATES)))
    return -1 if found is None else found.state.version


def version_of_state(folder: Path) -> int:
    """Return the version of the newer state, given by its folder."""
    return find_state(str(folder / STATES / "version-2")).state.version


def is_older_state(whole: int, found: int) -> bool:
    """Accept this state, or the one before."""
    return found in (whole, whole - 1)


# --- files of an attempt ----------------------------------------------------------------------------------------------

NAMES = ["policy-0", "rollout-0", "reward-0"]


def prepare(folder: Path) -> None:
    """Write recipe, configuration and keys, and the controller's addresses."""
    Attempt(folder).prepare(recipe("rl"), NAMES)
    write_whole(folder / "controller.json", json.dumps({"address": "tcp://127.0.0.1:1", "telemetry": "tcp://[::1]:2"}))


def read_keys(folder: Path) -> Any:
    """Read the keys as a controller and a replica do."""
    Attempt(folder).prepare(recipe("rl"), NAMES)
    return load_allowed(folder / "keys"), load_key(folder / "keys" / "rollout-0.json")


def read_recipe(folder: Path) -> Any:
    return read_toml(folder / "recipe.toml")


def read_config(folder: Path) -> Any:
    return read_toml(folder / "config.toml"), operate._identity(Attempt(folder))


def read_address(folder: Path) -> str:
    """Return where operators find the controller."""
    return operate._address(Attempt(folder))


def acquire(folder: Path) -> bool:
    """Lock the attempt, whatever its lock file says."""
    descriptor = Attempt(folder).acquire()
    os.close(descriptor)
    return (folder / "lock").read_text() == str(os.getpid())


class Ignored:
    """A logger that takes everything."""

    def log(self, step: int, metrics: Any) -> None:
        """Take the metrics of a step."""

    def table(self, step: int, rows: Any) -> None:
        """Take samples."""

    def close(self) -> None:
        """End."""


def write_mark(folder: Path) -> None:
    """Let a logger take 1234 steps."""
    thread = LoggerThread("mine", folder / "mark", max_waiting=10, deadline_s=60.0)
    thread.begin(lambda _: Ignored(), [LogEntry(1234, {"loss": 1.0})])
    thread.close(time.monotonic() + 60.0)


def read_mark(folder: Path) -> int:
    """Return the last step that the logger took."""
    return LoggerThread("mine", folder / "mark", max_waiting=10, deadline_s=60.0).last_step


LINES_OF_FILES, STATE, PARTS = f"{FOLDER}/{INDEX}", f"{STATES}/version-2/state.json", f"{STATES}/version-2/parts"

KINDS = (
    FileKind("journal", write_journal, JOURNAL, read_journal, is_earlier_journal, num=80, large=True),
    FileKind(
        "journal log",
        write_journal_log,
        f"{JOURNAL}-wal",
        read_journal,
        is_earlier_journal,
        num=80,
        survives=True,
        large=True,
    ),
    FileKind(
        "compacted log",
        write_compacted_log,
        f"{JOURNAL}-wal",
        read_journal,
        is_earlier_compacted_journal,
        num=80,
        survives=True,
        large=True,
    ),
    FileKind(
        "journal log index",
        write_journal_log,
        f"{JOURNAL}-shm",
        read_journal,
        same,
        num=40,
        survives=True,
        large=True,
    ),
    FileKind("journal lock", write_journal, f"{JOURNAL}.lock", read_journal, same, survives=True),
    FileKind("metrics", write_metrics, "metrics.jsonl", resume_metrics, is_earlier_metrics, survives=True),
    FileKind("samples", write_samples, SAMPLES, resume_samples, ends_alike, survives=True),
    FileKind("recording", write_recording, RECORDING, read_events, is_earlier_recording, writes=False),
    FileKind("crash report", write_report, reports.REPORT, read_report, same, writes=False),
    FileKind("index of trajectories", write_trajectories, LINES_OF_FILES, resume_trajectories, same, survives=True),
    FileKind("trajectories", write_trajectories, f"{FOLDER}/step-000002.msgpack", resume_trajectories, same),
    FileKind("newest state", write_states, STATE, newest_version, is_older_state, survives=True, writes=False),
    FileKind("state", write_states, STATE, version_of_state, same, writes=False),
    FileKind("tensors", write_states, f"{PARTS}/__0_0.distcp", version_of_state, same, writes=False),
    FileKind("index of tensors", write_states, f"{PARTS}/.metadata", version_of_state, same, writes=False),
    FileKind("allowed keys", prepare, f"keys/{ALLOWED}", read_keys, same),
    FileKind("key", prepare, "keys/rollout-0.json", read_keys, same),
    FileKind("recipe", prepare, "recipe.toml", read_recipe, same, writes=False),
    FileKind("configuration", prepare, "config.toml", read_config, same, writes=False),
    FileKind("addresses", prepare, "controller.json", read_address, same, writes=False),
    FileKind("lock", prepare, "lock", acquire, same, survives=True),
    FileKind(
        "mark of a logger",
        write_mark,
        "mark",
        read_mark,
        lambda whole, found: found <= whole,
        survives=True,
        writes=False,
    ),
)
LARGE = {kind.name: kind for kind in KINDS if kind.large}
