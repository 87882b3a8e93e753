"""The journal: committed records survive anything, and its content equals that of a plain list."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_writer import record_of
from msgspec.structs import replace
from property_tests import examples

from starling.common.errors import ConfigError, RestartError
from starling.common.wire.messages import PartialCompletionMeta, Status, TensorMeta, TrajectoryMeta
from starling.controller.core.records import (
    CompletionsStored,
    ControllerStarted,
    EvaluationClosed,
    GroupDiscarded,
    GroupRequeued,
    JournalEntry,
    PartialCompletionsStored,
    RewardsStored,
    RunBegun,
    StepCommitted,
    StepFrozen,
    TeacherLogprobsStored,
    VersionAdopted,
)
from starling.controller.shell.journal import journal as module
from starling.controller.shell.journal.journal import Journal, JournalError, JournalFullError, read_journal


def generated(key: str, content: str) -> JournalEntry:
    """Return a record of one completion with `content` as its text and payload, and the payload."""
    trajectory = TrajectoryMeta(
        status=Status.OK, num_tokens=len(content), text=content, oldest_version=0, newest_version=0, metrics={"a": 1.0}
    )
    payload = (content.encode(), b"", content.encode() * 2)
    tensors = tuple(TensorMeta(dtype="uint8", shape=(len(buffer),), nbytes=len(buffer)) for buffer in payload)
    return JournalEntry(CompletionsStored(key=key, trajectories=(trajectory,), tensors=tensors), payload)


def teacher_scored(key: str, content: str) -> JournalEntry:
    """Return the teacher log-probabilities of that group."""
    payload = (content.encode(), content.encode() * 3)
    tensors = tuple(TensorMeta(dtype="uint8", shape=(len(buffer),), nbytes=len(buffer)) for buffer in payload)
    return JournalEntry(TeacherLogprobsStored(key=key, tensors=tensors), payload)


def scored(key: str, reward: float = 1.0) -> JournalEntry:
    """Return the rewards of that group."""
    return JournalEntry(RewardsStored(key=key, rewards=(reward,)))


def step_frozen(step: int, *ordinals: int) -> JournalEntry:
    """Return the record of a frozen step."""
    return JournalEntry(StepFrozen(step=step, ordinals=ordinals, prompts=tuple(f"p{n}" for n in ordinals)))


def without_contents(kept: JournalEntry) -> JournalEntry:
    """Return a group's record as it is read when its contents are not needed."""
    if isinstance(kept.record, TeacherLogprobsStored):
        return JournalEntry(kept.record)
    assert isinstance(kept.record, CompletionsStored)
    trajectories = tuple(replace(t, text="", metrics={}) for t in kept.record.trajectories)
    return JournalEntry(replace(kept.record, trajectories=trajectories))


def write(journal: Journal, *kept: JournalEntry) -> None:
    """Append and commit."""
    for one in kept:
        journal.append(one.record, one.payload)
    journal.commit()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the journal."""
    return tmp_path / "journal.db"


def test_journal_reads_records_in_order_after_reopening(path: Path) -> None:
    kept = [
        JournalEntry(RunBegun(run="r", plan={"seed": 3})),
        JournalEntry(ControllerStarted(incarnation=1)),
        generated("t0", "a"),
        scored("t0"),
    ]
    with contextlib.closing(Journal(path)) as journal:
        write(journal, *kept)
        assert list(journal.read()) == kept
    with contextlib.closing(Journal(path)) as journal:
        write(journal, scored("t1"))
        assert list(journal.read()) == [*kept, scored("t1")]


def test_journal_drops_uncommitted_records(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, scored("t0"))
        journal.append(scored("t1").record)
        assert journal.num_pending == 1
    with contextlib.closing(Journal(path)) as journal:
        assert list(journal.read()) == [scored("t0")]


def test_journal_reads_committed_groups_without_payload_and_fetches_them_whole(path: Path) -> None:
    first, second = generated("t0", "first"), generated("t1", "second")
    with contextlib.closing(Journal(path)) as journal:
        write(journal, first, second, scored("t0"), scored("t1"), step_frozen(1, 0), step_frozen(2, 1))
        assert list(journal.read())[:2] == [first, second]
        write(journal, JournalEntry(StepCommitted(step=1)))
        assert list(journal.read())[:2] == [without_contents(first), second]
        assert journal.fetch(1) == (first, scored("t0"))


def test_fetch_keeps_the_order_of_the_step_and_takes_the_last_generation(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("t4", "thrown away"), scored("t4", 0.0), generated("t2", "b"), scored("t2"))
        write(journal, JournalEntry(GroupRequeued(key="t4", tries=1)), generated("t4", "again"), scored("t4", 0.5))
        write(journal, step_frozen(7, 4, 2), JournalEntry(StepCommitted(step=7)))
        assert journal.fetch(7) == (generated("t4", "again"), scored("t4", 0.5), generated("t2", "b"), scored("t2"))
        assert journal.fetch(8) == ()


def test_journal_keeps_teacher_logprobs_as_long_as_the_group(path: Path) -> None:
    whole = (generated("t0", "a"), teacher_scored("t0", "of a"), scored("t0"))
    with contextlib.closing(Journal(path)) as journal:
        write(journal, *whole)
        assert tuple(journal.read()) == whole
        write(journal, step_frozen(1, 0), JournalEntry(StepCommitted(step=1)))
        assert list(journal.read())[:2] == [without_contents(whole[0]), without_contents(whole[1])]
        assert journal.fetch(1) == whole
        journal.prune(1)
        journal.commit()
        assert journal.fetch(1) == ()
    assert num_contents(path) == 0


def test_journal_keeps_the_newest_partial_completions(path: Path) -> None:
    def interrupted(key: str, tokens: str) -> JournalEntry:
        partial = (PartialCompletionMeta(num_tokens=1),)
        record = PartialCompletionsStored(
            key=key, partial=partial, tensors=(), oldest_version=0, newest_version=0, temperature=1.0
        )
        return JournalEntry(record, (tokens.encode(),))

    first, second, other, held = (interrupted(*p) for p in (("t1", "a"), ("t1", "ab"), ("t10", "c"), ("e1", "d")))
    with contextlib.closing(Journal(path)) as journal:
        write(journal, first, second, other, held)
        assert list(journal.read()) == [JournalEntry(first.record), second, other, held]
        write(journal, generated("t1", "abc"), JournalEntry(EvaluationClosed(number=1, summary={})))
        assert list(journal.read())[:4] == [
            JournalEntry(first.record),
            JournalEntry(second.record),
            other,
            JournalEntry(held.record),
        ]
        write(journal, JournalEntry(GroupRequeued(key="t10", tries=1)))
        assert list(journal.read())[2] == JournalEntry(other.record)


@pytest.mark.parametrize(
    "end", [GroupRequeued(key="t0", tries=1), GroupDiscarded(key="t0", prompt="p", reason="r")], ids=["back", "gone"]
)
def test_journal_deletes_contents_of_a_discarded_group(path: Path, end: GroupRequeued | GroupDiscarded) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("t0", "a"), teacher_scored("t0", "b"), JournalEntry(end))
        assert list(journal.read()) == [
            without_contents(generated("t0", "a")),
            without_contents(teacher_scored("t0", "b")),
            JournalEntry(end),
        ]
    assert num_contents(path) == 0


def test_journal_keeps_the_second_generation_of_a_group(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("t0", "a"), generated("t0", "b"))
        assert list(journal.read()) == [without_contents(generated("t0", "a")), generated("t0", "b")]
    assert num_contents(path) == 4


def test_reopened_journal_replaces_the_contents_of_a_group(path: Path) -> None:
    partial = PartialCompletionsStored(
        key="t1", partial=(), tensors=(), oldest_version=0, newest_version=0, temperature=1.0
    )
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("t0", "a"), JournalEntry(partial, (b"b",)))
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("t0", "c"), generated("t1", "d"))
        assert list(journal.read())[2:] == [generated("t0", "c"), generated("t1", "d")]
    assert num_contents(path) == 2 * 4


def test_journal_deletes_evaluation_texts_after_scoring(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, generated("e0", "a"), generated("e1", "b"), scored("e0"))
        assert list(journal.read()) == [without_contents(generated("e0", "a")), generated("e1", "b"), scored("e0")]


@pytest.mark.campaign
def test_journal_reuses_pages_of_pruned_steps(path: Path) -> None:
    sizes = []
    with contextlib.closing(Journal(path)) as journal:
        for step in range(1, 30):
            keys = range(step * 100, step * 100 + 100)
            for n in keys:
                write(journal, generated(f"t{n}", "x" * 4000), scored(f"t{n}"))
            write(journal, step_frozen(step, *keys), JournalEntry(StepCommitted(step=step)))
            assert len(journal.fetch(step)) == 200
            journal.prune(step)
            while journal._pruning:  # 100 groups take two commits
                journal.commit()
            assert journal.fetch(step) == ()
            sizes.append(path.stat().st_size)
    growth = sizes[-1] - sizes[4]
    assert growth < 24 * 100 * 600, "only the records remain"
    assert num_contents(path) == 0


def test_journal_resumes_pruning_after_a_crash(path: Path) -> None:
    num = module.PRUNED_PER_COMMIT + 5
    with contextlib.closing(Journal(path)) as journal:
        write(journal, *(kept for n in range(num) for kept in (generated(f"t{n}", "a"), scored(f"t{n}"))))
        write(journal, step_frozen(1, *range(num)), JournalEntry(StepCommitted(step=1)))
        journal.prune(1)
        journal.commit()
    assert num_contents(path) == 5 * 4
    with contextlib.closing(Journal(path)) as journal:
        journal.prune(0)  # pruned contents are not restored
        journal.commit()
        assert journal.fetch(1) == ()
    assert num_contents(path) == 0


def num_contents(path: Path) -> int:
    """Return how many rows of contents the file has."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT count(*) FROM contents").fetchone()[0]


def test_read_journal_while_a_controller_writes(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, scored("t0"))
        reading = read_journal(path)
        assert next(reading) == scored("t0")
        write(journal, scored("t1"))
        assert list(read_journal(path)) == [scored("t0"), scored("t1")]
        reading.close()
    assert list(read_journal(path)) == [scored("t0"), scored("t1")], "also after the last writer has closed"


# --- comparison with a list ----------------------------------------------------------------------------------------


class Model:
    """Model of the journal: a list of records, of which a prefix is durable."""

    def __init__(self) -> None:
        self.kept: list[JournalEntry] = []
        self.num_durable = 0
        self.pruned = self.durable_pruned = -1

    def read(self) -> list[JournalEntry]:
        """Return the durable records, without contents that are not needed."""
        durable = self.kept[: self.num_durable]
        committed = max((k.record.step for k in durable if isinstance(k.record, StepCommitted)), default=-1)
        steps = {f"t{n}": k.record.step for k in durable if isinstance(k.record, StepFrozen) for n in k.record.ordinals}
        current: dict[str, list[int]] = {}
        for i, k in enumerate(durable):
            match k.record:
                case CompletionsStored(key=key):
                    current[key] = [i]
                case TeacherLogprobsStored(key=key):
                    current[key].append(i)
                case GroupRequeued(key=key) | GroupDiscarded(key=key):
                    current.pop(key, None)
        last = max(committed, self.durable_pruned)
        whole = {i for key, both in current.items() if steps.get(key, committed + 1) > last for i in both}
        heavy = CompletionsStored | TeacherLogprobsStored
        return [
            without_contents(k) if isinstance(k.record, heavy) and i not in whole else k for i, k in enumerate(durable)
        ]

    def fetch(self, step: int) -> tuple[JournalEntry, ...]:
        """Return the groups of a step."""
        durable = self.kept[: self.num_durable]
        found = [k.record for k in durable if isinstance(k.record, StepFrozen) and k.record.step == step]
        if not found or step <= self.durable_pruned:
            return ()
        out = []
        for n in found[0].ordinals:
            mine = [(i, k) for i, k in enumerate(durable) if getattr(k.record, "key", "") == f"t{n}"]
            first = max(i for i, k in mine if isinstance(k.record, CompletionsStored))
            for type_ in (CompletionsStored, TeacherLogprobsStored, RewardsStored):
                out += [k for i, k in mine if isinstance(k.record, type_) and i >= first]
        return tuple(out)


@given(st.randoms(use_true_random=False), st.integers(5, 60))
@examples(40)
def test_journal_equals_a_list_model(rng: random.Random, length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        journal, model = Journal(path), Model()
        try:
            for kept in random_records(rng, length):
                if isinstance(kept, int):
                    journal.prune(kept)
                    model.pruned = max(model.pruned, kept)
                else:
                    journal.append(kept.record, kept.payload)
                    model.kept.append(kept)
                if rng.random() < 0.4:
                    journal.commit()
                    model.num_durable, model.durable_pruned = len(model.kept), model.pruned
                if rng.random() < 0.1:
                    journal.close()
                    journal = Journal(path)
                    if model.num_durable < len(model.kept) or model.pruned != model.durable_pruned:
                        break  # the later records would depend on the lost ones
            assert list(journal.read()) == model.read()
            for step in range(8):
                assert journal.fetch(step) == model.fetch(step)
        finally:
            journal.close()


KINDS = ("generate", "generate", "teach", "score", "score", "return", "seal", "commit", "prune", "other")


def random_records(rng: random.Random, length: int) -> Iterator[JournalEntry | int]:
    """Yield records as a controller would write them, and step numbers up to which to prune."""
    waiting, scoring, ready = list(range(40)), [], []
    sealed_step = committed = 0
    without_teacher: list[int] = []
    tries = dict.fromkeys(waiting, 0)
    for i in range(length):
        match rng.choice(KINDS):
            case "generate" if waiting:
                scoring.append(waiting.pop(rng.randrange(len(waiting))))
                without_teacher.append(scoring[-1])
                yield generated(f"t{scoring[-1]}", f"text {i}" * rng.choice((0, 1, 1000)))
            case "teach" if without_teacher:
                yield teacher_scored(f"t{without_teacher.pop()}", f"lesson {i}" * rng.choice((0, 1, 500)))
            case "score" if scoring:
                ready.append(scoring.pop(rng.randrange(len(scoring))))
                yield scored(f"t{ready[-1]}", rng.random())
            case "return" if scoring or ready:
                pool = scoring if scoring and (not ready or rng.random() < 0.5) else ready
                waiting.append(pool.pop())
                tries[waiting[-1]] += 1
                without_teacher = [ordinal for ordinal in without_teacher if ordinal != waiting[-1]]
                yield JournalEntry(GroupRequeued(key=f"t{waiting[-1]}", tries=tries[waiting[-1]]))
            case "seal" if ready and sealed_step == committed:
                sealed_step += 1
                taken, ready = ready[:3], ready[3:]
                without_teacher = [ordinal for ordinal in without_teacher if ordinal not in taken]
                yield step_frozen(sealed_step, *rng.sample(taken, len(taken)))
            case "commit" if committed < sealed_step:
                committed += 1
                yield JournalEntry(StepCommitted(step=committed))
            case "prune" if committed:
                yield rng.randint(1, committed)
            case "other":
                yield JournalEntry(ControllerStarted(incarnation=i))


# --- kills ---------------------------------------------------------------------------------------------------------


def start_writer(path: Path, seed: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start a process that writes the journal at `path` until it is killed."""
    program = str(Path(__file__).with_name("journal_writer.py"))
    writer = subprocess.Popen([sys.executable, program, str(path), seed], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    return writer, writer.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
def test_journal_commits_survive_sigkill(path: Path, seed: int) -> None:
    rng, output = random.Random(f"kill {seed}"), 0
    for life in range(2):
        writer, stdout = start_writer(path, f"{seed} {life}")
        for _ in range(rng.randint(1, 120)):  # killed at some moment after that commit
            output = int(stdout.readline())
        writer.kill()
        output = max([output, *(int(line) for line in stdout.read().split("\n")[:-1])])
        writer.wait()
        stdout.close()
        with contextlib.closing(Journal(path)) as journal:
            kept = list(journal.read())
        assert len(kept) >= output
        assert kept == [JournalEntry(*record_of(number)) for number in range(len(kept))]


# --- a full disk ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2, 12], ids=["in the log", "in the file"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mount a file system of a few MiB, half full: the disk fills in the journal's log or during a checkpoint of it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    (folder / "ballast").write_bytes(bytes(request.param << 19))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(journal: Journal, written: list[JournalEntry]) -> None:
    """Write 6 MB; append the records to `written`."""
    for n in range(100):
        written.append(generated(f"t{n}", "x" * 20_000))
        write(journal, written[-1])


def test_journal_full_disk_loses_nothing(small_disk: Path) -> None:
    written = []
    with contextlib.closing(Journal(small_disk / "journal.db")) as journal:
        with pytest.raises(JournalFullError, match=r"is full; free some space to write 1 record$"):
            fill(journal, written)
        assert list(journal.read()) == written[:-1]
        written.append(scored("t0"))
        journal.append(written[-1].record)
        with pytest.raises(JournalFullError, match="2 records"):
            journal.commit()
        (small_disk / "ballast").unlink()
        journal.commit()
        assert list(journal.read()) == written
    with contextlib.closing(Journal(small_disk / "journal.db")) as journal:
        assert list(journal.read()) == written


# --- files that are no journals ------------------------------------------------------------------------------------


def test_journal_truncates_no_file_that_its_lock_links_to(path: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("of another user")
    path.with_name(f"{path.name}.lock").symlink_to(tmp_path / "foreign")
    with pytest.raises(ConfigError, match=r"cannot open .*\.lock"):
        Journal(path)
    assert (tmp_path / "foreign").read_text() == "of another user"


def test_journal_is_locked_by_its_writer(path: Path) -> None:
    writer, stdout = start_writer(path, "0")
    stdout.readline()
    with pytest.raises(ConfigError, match=f"is in use by the controller with pid {writer.pid}; stop it"):
        Journal(path)
    writer.kill()
    writer.wait()
    stdout.close()
    Journal(path).close()


def test_journal_rejects_another_kind_of_file(path: Path) -> None:
    path.write_bytes(b"seq,kind\n" * 1000)
    with pytest.raises(ConfigError, match="is not a journal; move the file away"):
        Journal(path)


def test_journal_rejects_a_database_of_another_application(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE a (b)")
    with pytest.raises(ConfigError, match="a database of another application"):
        Journal(path)


def test_journal_rejects_another_version(path: Path) -> None:
    Journal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="version 9 and this Starling has version 5; resume the run"):
        Journal(path)


def test_journal_rejects_a_damaged_file(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        for n in range(200):
            write(journal, generated(f"t{n}", "x" * 500))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(random.Random(0).randbytes(size - 8192))
    with (
        pytest.raises(ConfigError, match=r"journal\.db (cannot be read|is damaged)"),
        contextlib.closing(Journal(path)) as journal,
    ):
        list(journal.read())


def test_journal_rejects_an_undecodable_record(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        write(journal, scored("t0"))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE records SET body = x'c1'")
        db.commit()
    with contextlib.closing(Journal(path)) as journal, pytest.raises(ConfigError, match="is damaged"):
        list(journal.read())


def test_journal_rejects_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*needs a writable folder"):
        Journal(tmp_path / "nowhere" / "journal.db")
    with pytest.raises(ConfigError, match="does not exist; give the path of the journal of a run"):
        next(read_journal(tmp_path / "journal.db"))


def test_journal_commit_reports_a_broken_file(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE contents")
        journal.append(generated("t0", "a").record, (b"",))
        with pytest.raises(JournalError, match="cannot be written") as raised:
            journal.commit()
    assert isinstance(raised.value, RestartError), "another controller may write it"


def test_journal_keeps_the_newest_adoption_of_each_replica(path: Path) -> None:
    journal = Journal(path)
    for version in range(5):
        for name in ("rollout-0", "rollout-1"):
            journal.append(VersionAdopted(name=name, epoch=7, version=version))
        if version % 2:
            journal.commit()
    journal.commit()
    expected = [VersionAdopted(name=name, epoch=7, version=4) for name in ("rollout-0", "rollout-1")]
    assert [kept.record for kept in journal.read()] == expected
    journal.close()
