"""Compaction of the journal: it restores the same state, keeps what may be needed, and survives a kill at any time."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from test_journal import generated, num_contents, scored, step_frozen, teacher_scored, write
from transcript import SMALL, Stream

from starling.common.errors import ConfigError
from starling.common.wire.messages import PartialCompletionMeta, Prompt, Status, TensorMeta
from starling.controller.core.compaction import compact
from starling.controller.core.events import Ticked
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    CheckpointWritten,
    CompletionsStored,
    ControllerStarted,
    EvaluationClosed,
    EvaluationOpened,
    GroupRequeued,
    GroupsOpened,
    JournalEntry,
    PartialCompletionsStored,
    RunBegun,
    StateCompacted,
    StepCommitted,
    VersionPublished,
)
from starling.controller.core.recovery import restore
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.shell.journal import journal as journal_module
from starling.controller.shell.journal.journal import Journal, StateTooLargeError, read_journal
from starling.controller.shell.journal.resume import compact_long, missing_lines, start_incarnation
from starling.controller.shell.recording.format import read_recording
from starling.controller.shell.recording.recorder import Recorder, RecordingPrompts
from starling.controller.shell.recording.replay import replay
from starling.controller.shell.status import NUM_EVALUATIONS, MetricsHistory
from starling.sim.checks.recovery import difference

HELD_OUT = [Prompt(id=f"eval/{i}", text=f"e{i}") for i in range(2)]
OLDER_RUNS = Path(__file__).parents[2] / "system" / "older_runs"
BEGUN = JournalEntry(RunBegun(run="r", plan={}))


def fresh(plan: RunPlan = SMALL) -> ControllerState:
    """Return the state of a run that begins."""
    return ControllerState(plan, RunPrompts(Stream("train"), Stream("sft"), HELD_OUT))


def restored(journal: Journal) -> ControllerState:
    """Return the state that a journal restores."""
    state = fresh()
    restore(state, journal.read())
    return state


def compacted(journal: Journal) -> StateCompacted:
    """Compact a journal."""
    record = compact(restored(journal))
    assert record is not None
    journal.compact(record)
    return record


def evaluated(key: str, text: str) -> JournalEntry:
    """Return a group of an evaluation: of its completions the journal gets the texts only."""
    record = generated(key, text).record
    assert isinstance(record, CompletionsStored)
    return JournalEntry(replace(record, tensors=()))


def a_step(step: int, *, num: int = 2) -> list[JournalEntry]:
    """Return the records of a whole step, from the opening of its groups to its publication."""
    ordinals = range((step - 1) * num, step * num)
    entries = [JournalEntry(GroupsOpened(first=ordinals[0], num=num))]
    entries += [entry for n in ordinals for entry in (generated(f"t{n}", f"text {n}"), scored(f"t{n}"))]
    entries += [
        step_frozen(step, *ordinals),
        JournalEntry(StepCommitted(step=step, metrics={"phase": "rl", "loss": 1.0})),
    ]
    return [*entries, JournalEntry(VersionPublished(version=step, root=f"root {step}"))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "journal.db"


def test_compaction_restores_the_same_state(path: Path) -> None:
    """Groups in every state, a running evaluation, and steps that are frozen, committed and published."""
    opened = EvaluationOpened(number=1, version=1, cause="request", num_completions=1, first=0, request="q1")
    later = [
        JournalEntry(GroupsOpened(first=2, num=6)),
        *(entry for n in (2, 3) for entry in (generated(f"t{n}", "abc"), scored(f"t{n}", 0.5))),
        step_frozen(2, 2, 3),
        JournalEntry(StepCommitted(step=2, metrics={"phase": "rl", "loss": 0.5})),
        JournalEntry(opened),
        generated("t4", "def"),
        scored("t4"),
        generated("t5", "ghi"),
        generated("t6", "thrown away"),
        JournalEntry(GroupRequeued(key="t6", tries=1)),
        evaluated("e0", "held out"),
        scored("e0", 0.25),
        evaluated("e1", "held out, too"),
    ]
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, *a_step(1), *later)
        whole = restored(journal)
        record = compacted(journal)
        entries = list(journal.read())
        assert [entry.record for entry in entries[:2]] == [BEGUN.record, record]
        assert [entry.record for entry in entries[2:]] == [
            generated("t4", "def").record,
            generated("t5", "ghi").record,
            evaluated("e1", "held out, too").record,
        ]
        assert all(entry.kept for entry in entries[2:])
        again = restored(journal)
        assert difference(whole, again) == ""
        found = again.find_group("t4"), again.find_group("t7")
        assert found[0] is not None
        assert found[0][1].buffers == generated("t4", "def").payload
        assert found[1] is not None
        assert compacted(journal) == record, "a compaction of a compacted journal changes nothing"


def test_compaction_keeps_whose_partial_completions_there_were(path: Path) -> None:
    """Of a group that waits with them, of one that was resumed from them, and of one that began anew."""
    tensors = tuple(TensorMeta(dtype=kind, shape=(1,), nbytes=4) for kind in ("int32", "float32", "int32"))
    partials = [
        JournalEntry(
            PartialCompletionsStored(
                key=f"t{n}",
                partial=(PartialCompletionMeta(num_tokens=1, status=Status.OK),),
                tensors=tensors,
                oldest_version=0,
                newest_version=0,
                temperature=1.0,
                giver=f"rollout-{n}",
            ),
            (bytes(4),) * 3,
        )
        for n in range(3)
    ]
    resumed = generated("t1", "abc")
    assert isinstance(resumed.record, CompletionsStored)
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, JournalEntry(GroupsOpened(first=0, num=3)), *partials)
        write(journal, JournalEntry(replace(resumed.record, generator="rollout-0", giver="rollout-1"), resumed.payload))
        write(journal, JournalEntry(GroupRequeued(key="t2", tries=0, anew=True)))
        whole = restored(journal)
        compacted(journal)
        again = restored(journal)
    assert difference(whole, again) == ""
    waiting, answered, anew = sorted(again.buffer.live(), key=lambda group: group.ordinal)
    assert waiting.partial is not None
    assert waiting.partial.giver == "rollout-0"
    assert (answered.generator, answered.giver) == ("rollout-0", "rollout-1")
    assert (anew.partial, anew.is_anew) == (None, True)


def test_compacted_journal_takes_further_records(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal, contextlib.closing(Journal(path.with_name("whole"))) as whole:
        for step in range(1, 12):
            for one in (journal, whole):
                write(one, *([BEGUN] if step == 1 else []), *a_step(step))
            if step % 3 == 0:
                compacted(journal)
        assert difference(restored(whole), restored(journal)) == ""
        assert sum(1 for _ in journal.read()) < sum(1 for _ in whole.read()) / 3
        assert journal.num_uncompacted == whole.num_uncompacted - 9 * 8 - 1
    with contextlib.closing(Journal(path)) as journal:
        assert journal.num_uncompacted == 2 * 8


def test_state_that_is_too_large_for_a_row_leaves_the_journal_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with 100,000 groups at a time, each with many scores, goes on with a journal that grows."""
    monkeypatch.setattr(journal_module, "MAX_ROW_BYTES", 100)
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, *a_step(1))
        with pytest.raises(StateTooLargeError, match=r"the state takes [0-9]+ bytes, and a row of SQLite 100"):
            compacted(journal)
        write(journal, *a_step(2))
    entries = [BEGUN, *a_step(1), *a_step(2)]
    assert [type(one.record) for one in read_journal(path)] == [type(one.record) for one in entries]


def test_compaction_keeps_the_groups_of_steps_that_may_be_repeated(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, *a_step(1), *a_step(2))
        wanted = journal.fetch(2)
        assert [type(entry.record).__name__ for entry in wanted] == ["CompletionsStored", "RewardsStored"] * 2
        compacted(journal)
        assert journal.fetch(2) == wanted
        journal.prune(2)
        journal.commit()
        assert journal.fetch(2) == ()
    assert num_contents(path) == 0


def test_journal_of_any_length_has_the_size_of_its_content(path: Path) -> None:
    """Growth per group is zero, in the file and in what a restart reads."""
    sizes, lengths = [], []
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN)
        state = fresh()
        for step in range(1, 241):
            entries = [*a_step(step, num=2), JournalEntry(CheckpointWritten(step=step, path="p", state=True))]
            write(journal, *entries)
            restore(state, entries)
            journal.prune(state.training.saved.previous)
            if step % 20 == 0:
                record = compact(state)
                assert record is not None
                journal.compact(record)
                journal.commit()
                sizes.append(path.stat().st_size)
                lengths.append(sum(1 for _ in journal.read()))
    assert max(sizes[6:]) < 1.25 * max(sizes[:6])
    assert set(lengths) == {2}


def test_compaction_deletes_the_texts_of_an_evaluation_that_was_given_up(path: Path) -> None:
    opened = EvaluationOpened(number=1, version=1, cause="step", num_completions=1, first=0)
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, *a_step(1), JournalEntry(opened), evaluated("e0", "late"), teacher_scored("t9", "x"))
        journal.prune(1)
        write(journal, JournalEntry(EvaluationClosed(number=1, summary={"version": 1})))
    with contextlib.closing(sqlite3.connect(path)) as db:
        bodies = [body for (body,) in db.execute("SELECT body FROM contents")]
    assert not any(b"late" in body for body in bodies)


def test_recording_begins_with_the_compacted_state(path: Path) -> None:
    """Not with the whole past, which filled it after some ten thousand groups."""
    recording = path.with_name("events-2.rec")
    with contextlib.closing(Journal(path)) as journal:
        write(journal, BEGUN, *(entry for step in range(1, 301) for entry in a_step(step)))
        live = [JournalEntry(GroupsOpened(first=600, num=2)), generated("t600", "abc"), scored("t600")]
        write(journal, *live, generated("t601", "de"))
        compacted(journal)
        write(journal, scored("t601"))
        past, state = list(journal.read()), restored(journal)
    recorder = Recorder(recording, run="r", incarnation=2, plan=SMALL, past=past, held_out=HELD_OUT, cap_bytes=64 << 10)
    RecordingPrompts(Stream("train"), "prompts", recorder).prompt(600)
    RecordingPrompts(Stream("train"), "prompts", recorder).prompt(601)
    recorder.event(Ticked(1.0))
    recorder.close()
    _, read, _ = read_recording(recording)
    assert [(entry.record, entry.kept) for entry in read] == [(entry.record, entry.kept) for entry in past]
    replayed = replay(recording, until=0).controller.state
    for group in state.buffer.live():  # a recording has zeros in the place of their payload
        group.buffers = tuple(bytes(len(buffer)) for buffer in group.buffers)
    state.incarnation = 2
    assert difference(state, replayed) == ""


# --- the start of an incarnation --------------------------------------------------------------------------------------


def test_incarnations_are_counted_through_a_compaction(path: Path) -> None:
    for number in (1, 2, 3, 4):
        with contextlib.closing(Journal(path)) as journal:
            assert start_incarnation(journal, "r", SMALL) == number
            journal.commit()
            record = compact(ControllerState(SMALL, fresh().data, number))
            assert record is not None
            if number % 2 == 0:
                journal.compact(record)


def test_missing_lines_after_a_compaction() -> None:
    """Its steps are in metrics.jsonl; a step that was frozen before and committed after it has its prompts."""
    state = fresh()
    unmade = [JournalEntry(GroupsOpened(first=0, num=2)), generated("t0", "a"), scored("t0"), generated("t1", "b")]
    restore(state, [*unmade, scored("t1"), step_frozen(1, 0, 1)])
    record, history = compact(state), MetricsHistory(0.0)
    assert record is not None
    for version in range(NUM_EVALUATIONS + 2):
        history.note("evaluation", {"version": version})
    committed = StepCommitted(step=1, metrics={"phase": "rl"})
    closed = EvaluationClosed(number=9, summary={"version": 9})
    begun = StateCompacted(
        **{name: getattr(record, name) for name in record.__struct_fields__ if name != "metrics"},
        metrics=history.summary(0),
    )
    lines = list(missing_lines([begun, committed, closed], {("evaluation", NUM_EVALUATIONS + 1)}))
    assert [kind for kind, _ in lines] == ["step", "trained", "evaluation"]
    assert lines[1][1] == {"step": 1, "prompts": ("train0", "train1")}
    assert list(missing_lines([begun, closed], {("evaluation", NUM_EVALUATIONS + 2)})) == []


def test_metrics_history_continues_from_its_summary(tmp_path: Path) -> None:
    """What is summed up is not read again, and the history is bounded however long the run was."""
    path, whole = tmp_path / "metrics.jsonl", MetricsHistory(0.0)
    lines: list[tuple[str, dict[str, Any]]] = []
    for step in range(1, 1001):
        lines.append(("step", {"step": step, "reward_mean": step / 7}))
        lines.append(("evaluation", {"version": step}))
    for kind, fields in lines:
        whole.note(kind, fields)
    assert len(whole.evaluations) == NUM_EVALUATIONS
    assert whole.num_evaluations == 1000
    first, rest = MetricsHistory(0.0), MetricsHistory(0.0)
    for kind, fields in lines[:1501]:
        first.note(kind, fields)
    unread = b"x" * 4096 + b"\n"
    path.write_bytes(unread + b"".join(_line(kind, fields) for kind, fields in lines[1501:]))
    written = rest.read(path, first.summary(len(unread)))
    assert rest.summary(0) == whole.summary(0)
    assert min(step for kind, step in written if kind == "step") == 752
    assert ("evaluation", 750) in written


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


@pytest.mark.parametrize("name", ["stopped", "killed"])
def test_journal_of_an_older_version_is_compacted(name: str, tmp_path: Path) -> None:
    """Its rewards are only in records, which a compaction deletes."""
    with tarfile.open(OLDER_RUNS / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    [path] = tmp_path.rglob("journal.sqlite")
    begun = next(entry.record for entry in read_journal(path))
    assert isinstance(begun, RunBegun)
    numbers = ("num_supervised_steps", "examples_per_step", "prompts_per_step", "group_size")
    plan = RunPlan(
        seed=begun.plan["seed"],
        sampling=SMALL.sampling,
        eval_sampling=SMALL.sampling,
        num_steps=40,
        **{number: begun.plan[number] for number in numbers},
    )
    with contextlib.closing(Journal(path)) as journal:
        whole, again = fresh(plan), fresh(plan)
        restore(whole, journal.read())
        fetched = {step: journal.fetch(step) for step in range(whole.version + 1)}
        assert any(fetched.values())
        compact_long(journal, fresh(plan), None, MetricsHistory(0.0).summary(0))
        assert journal.num_uncompacted == 0
        restore(again, journal.read())
        assert difference(whole, again) == ""
        assert {step: journal.fetch(step) for step in fetched} == fetched
    controller = Controller(plan, Stream("train"), Stream("sft"), HELD_OUT, journal=list(read_journal(path)))
    assert controller.state.version == whole.version


def test_summary_of_the_metrics_is_bounded(tmp_path: Path) -> None:
    """However many steps the run has made, and wherever the last point of the curve is."""
    history, largest = MetricsHistory(0.0), 0
    for step in range(1, 300_001):
        history.note("step", {"step": step, "reward_mean": step % 7 / 7})
        if step % 997 == 0:
            largest = max(largest, len(msgspec.msgpack.encode(history.summary(step))))
    assert largest < 4096
    again = MetricsHistory(0.0)
    (tmp_path / "metrics.jsonl").touch()
    again.read(tmp_path / "metrics.jsonl", history.summary(0))
    for one in (history, again):
        for _ in range(5000):
            one.note("step", {"step": 1, "reward_mean": 0.5})
    assert again.curve == history.curve


def test_summary_of_an_older_journal_is_restored(tmp_path: Path) -> None:
    """It has the rewards one by one that are not in the curve yet."""
    older = msgspec.structs.replace(MetricsHistory(0.0).summary(0), pending=(0.25, 0.5), steps_per_point=4)
    history = MetricsHistory(0.0)
    (tmp_path / "metrics.jsonl").touch()
    history.read(tmp_path / "metrics.jsonl", older)
    for _ in range(2):
        history.note("step", {"step": 1, "reward_mean": 1.0})
    assert history.curve == [0.6875]


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_compaction_survives_sigkill(path: Path, seed: int) -> None:
    """The writer compacts after every third commit, and says how many records are durable."""
    rng, said = random.Random(f"compact {seed}"), 0
    program = str(Path(__file__).with_name("journal_writer.py"))
    for life in range(2):
        arguments = [sys.executable, program, str(path), f"{seed} {life}", "compact"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randint(20, 120)):
                said = int(writer.stdout.readline())
            writer.kill()
            said = max([said, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
        with contextlib.closing(Journal(path)) as journal:
            first, *rest = [entry.record for entry in journal.read()]
            assert start_incarnation(journal, "r", SMALL) > said
        assert isinstance(first, RunBegun)
        numbers = [record.incarnation for record in rest if isinstance(record, StateCompacted | ControllerStarted)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] >= said


@pytest.mark.parametrize("order", [(1, 0), (1,), (0, 0)], ids=["exchanged", "lost", "doubled"])
def test_rows_that_do_not_follow_from_each_other_are_damage(order: tuple[int, ...]) -> None:
    opened = [JournalEntry(GroupsOpened(first=0, num=2)), JournalEntry(GroupsOpened(first=2, num=2))]
    restore(fresh(), opened)
    with pytest.raises(
        ConfigError, match=r"record . of the journal \(GroupsOpened\) does not follow from those before"
    ):
        restore(fresh(), [opened[at] for at in order])
