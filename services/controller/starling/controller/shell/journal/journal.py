"""Journal of the controller: the records that must survive a crash, in one SQLite file in the run's folder.

    append, append, ..., commit        one transaction, one fsync: durable when `commit` returns

A `Send` that depends on a record goes out after the commit, so everything that the controller has sent is based on
durable records. docs/decisions/0009-journal.md gives the reasons. Tables:

| table      | holds                                                                                            |
|------------|--------------------------------------------------------------------------------------------------|
| `records`  | every record, in order; generated groups without the texts of their completions                  |
| `contents` | the results of groups, while they may be needed: part 0 is the whole record, then its payload    |
| `partials` | position of the newest partial completions of each interrupted group                             |
| `groups`   | positions of a group's completions and teacher log-probs, the record of its rewards, its step    |
| `adopted`  | position of the newest `VersionAdopted` of each replica; older ones are deleted                  |
| `marks`    | `committed`: the last step; `pruned`: the last step whose contents a saved state makes redundant; |
|            | `compacted`: position of the `StateCompacted` that has replaced all records before it;           |
|            | `owner`: a random number, which the controller that writes has drawn;                            |
|            | `binding`, `bound_since`: what the digests of rows depend on, and from which position (`rows.py`) |

`read` returns the first record (`RunBegun`), the newest `StateCompacted` if there is one, the contents of live groups
from before it, and the records after it. Deleted rows leave pages that later records reuse, so the file has the size of
the largest content so far.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from starling.common.counts import counted
from starling.common.errors import ConfigError, RestartError, StarlingError
from starling.controller.core.events import Buffers
from starling.controller.core.records import (
    CompletionsStored,
    ControllerStarted,
    EvaluationClosed,
    EvaluationOpened,
    GroupDiscarded,
    GroupRequeued,
    JournalEntry,
    PartialCompletionsStored,
    Record,
    RewardsStored,
    RunBegun,
    RunEnded,
    RunStopped,
    StateCompacted,
    StepCommitted,
    StepFrozen,
    StepReopened,
    TeacherLogprobsStored,
    VersionAdopted,
)
from starling.controller.shell.journal.database import (
    FULL,
    as_config_error,
    check_file,
    check_place,
    check_schema,
    distrust,
    lock_file,
    open_file,
    unwritable,
)
from starling.controller.shell.journal.file_system import check_file_system
from starling.controller.shell.journal.rows import Binding, decode, encode

PRUNED_PER_COMMIT: Final = 64
"""Groups whose contents one commit deletes at most, so that pruning hundreds of them does not delay messages."""
RECORDS_PER_READ: Final = 512
RECORDS_TO_END: Final = 16_384
"""Records after the end of a run at most: those of its members that leave."""

_PARTS: Final = 16
"""Bits of `contents.id` for the part; the bits above are the number of the record."""

MAX_RECORDS: Final = 1 << 46
"""Positions of records are below it, so that each `contents.id` is an integer of SQLite."""
MAX_ROW_BYTES: Final = 900_000_000
"""Of a row; SQLite allows a tenth more."""

WITH_CONTENTS: Final = (CompletionsStored, TeacherLogprobsStored, PartialCompletionsStored)
"""Records with contents, as a tuple: `isinstance` takes ten times as long with a union."""

Operation = tuple[str, tuple[Any, ...]]


class JournalError(RestartError):
    """The journal cannot be written, and the outcome of the last transaction is unknown until a restart reads it."""


class JournalTakenError(StarlingError):
    """Another controller has opened the journal, or the file was moved away or deleted."""


class StateTooLargeError(StarlingError):
    """The state of the run is larger than a row of SQLite can be. The journal goes on as it is, and grows."""


class JournalFullError(StarlingError):
    """The disk is full. Nothing was lost: `commit` can be retried when there is space."""


class Journal:
    """The only writer of a journal."""

    def __init__(self, path: Path, *, network_disk: bool = False) -> None:
        """Open or create the journal at `path`. Raises ConfigError when it cannot be used or is in use.

        `network_disk`: allow a file system whose locks may not hold.
        """
        self.path = path
        if not network_disk:
            check_file_system(path.parent)
        check_place(path)
        self._lock = lock_file(path)
        try:
            with as_config_error(path):
                self._db = open_file(path)
                self._seq = self._last_seq()
                marks = _marks(self._db)
                self._compacted, self._owner = marks.get("compacted", 0), marks.get("owner", 0)
                self._binding = Binding.of(marks)
                self._stored = _keys(self._db)
                """Groups that may have contents, those of appended records among them."""
                self._file = _identity(path)
        except BaseException:  # the caller cannot close what was not constructed
            os.close(self._lock)
            raise
        self._opened_at = self._seq
        """Number of the last record when the file was opened."""
        self._token = 0
        """The mark `owner` of this writer; 0 before its first transaction."""
        self._pruning = True
        """There may be contents to delete."""
        self._clear_pending()

    def append(self, record: Record, payload: Buffers = ()) -> None:
        """Add `record`, which is durable once `commit` has returned. Only results of groups have a payload."""
        has_contents = isinstance(record, WITH_CONTENTS)
        assert not payload or has_contents, f"{type(record).__name__} has no payload"
        self._seq += 1
        seed = self._binding.seed_of_record(self._seq)
        if has_contents:
            # One row per buffer avoids the copy that joining the buffers would need.
            first = self._seq << _PARTS
            whole = encode(record, seed, payload)
            self._contents += [(first + part, buffer) for part, buffer in enumerate((whole, *payload))]
        body = encode(_without_texts(record) if isinstance(record, CompletionsStored) else record, seed)
        self._records.append((self._seq, body))
        self._operations += self._operations_of(record)

    def prune(self, step: int) -> None:
        """Delete the contents of the groups of steps up to `step`, a few with each commit from the next one on."""
        self._operations.append(_raise_mark("pruned", step))
        self._pruning = True

    @property
    def num_uncompacted(self) -> int:
        """Number of records since the last compaction, or since the beginning of the run."""
        return self._seq - self._compacted

    @property
    def num_pending(self) -> int:
        """Number of records that were appended since the last successful commit."""
        return len(self._records)

    def commit(self) -> None:
        """Make all appended records durable, in one transaction with one fsync, if there is anything to do.

        Pruning continues with each call, so call it also when nothing was appended.
        Raises JournalFullError when the disk is full; the records are kept, and the next commit retries them.
        Raises JournalError when the outcome on disk is unknown, JournalTakenError when another controller writes it.
        """
        if not (self._records or self._operations or self._pruning):
            return
        with self._transaction():
            pruning = self._write()
        self._pruning = pruning
        self._clear_pending()

    def compact(self, record: StateCompacted) -> None:
        """Replace all records but the first by `record`, the state that they have led to, in one transaction.

        The contents of groups stay. Nothing may be pending. Raises as `commit`, where a full disk changes nothing; and
        StateTooLargeError.
        """
        assert not self.num_pending, "a state that is compacted has all its records in the journal"
        seq = self._seq + 1
        body = encode(record, self._binding.seed_of_record(seq))
        if len(body) > MAX_ROW_BYTES:
            raise StateTooLargeError(f"the state takes {len(body)} bytes, and a row of SQLite {MAX_ROW_BYTES}")
        with self._transaction():
            self._db.execute("BEGIN IMMEDIATE")
            token = self._check_owner()
            self._db.execute("DELETE FROM records WHERE seq > (SELECT min(seq) FROM records)")
            self._db.execute("DELETE FROM adopted")
            self._db.execute("INSERT INTO records VALUES (?, ?)", (seq, body))
            self._db.execute("INSERT OR REPLACE INTO marks VALUES ('compacted', ?)", (seq,))
            self._db.execute("COMMIT")
        self._seq = self._compacted = seq
        self._token = token

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Roll a transaction back that fails, and convert its errors to JournalError and JournalFullError."""
        try:
            yield
        except sqlite3.Error as error:
            self._roll_back()
            if getattr(error, "sqlite_errorcode", None) in FULL:
                raise JournalFullError(
                    f"the disk of the journal {self.path} is full; free some space to write "
                    f"{counted(self.num_pending, 'record')}"
                ) from None
            raise JournalError(unwritable(self.path, error)) from None
        except JournalTakenError:
            self._roll_back()
            raise

    def read(self) -> Iterator[JournalEntry]:
        """Yield the durable records in order, after a compaction those since then.

        A generated group that no committed step has trained is complete, with its payload. Others come without payload
        and without the texts of their completions, so that a long run fits into memory. Raises ConfigError.
        """
        return _read(self.path, self._db, self._binding)

    def records(self) -> Iterator[Record]:
        """Yield the records that `read` yields, without kept entries, payloads and texts. Raises ConfigError."""
        with as_config_error(self.path):
            return (record for _, record in _records(self.path, self._db, self._compacted, self._binding))

    def fetch(self, step: int) -> tuple[JournalEntry, ...]:
        """Return the groups of `step`, in the order of `StepFrozen.ordinals`: of each its records, complete.

        These are the last `CompletionsStored` and `TeacherLogprobsStored`, and the `RewardsStored`. Empty when the step
        has no groups, or is pruned. Raises ConfigError when the file is damaged.
        """
        with as_config_error(self.path):
            if step <= _marks(self._db)["pruned"]:
                return ()
            entries: list[JournalEntry] = []
            query = "SELECT key, generated, taught, rewards FROM groups WHERE step = ? ORDER BY rank"
            for key, generated, taught, body in self._db.execute(query, (step,)).fetchall():
                entries += [_whole(self._db, seq, self._binding) for seq in (generated, taught) if seq is not None]
                entries.append(JournalEntry(decode(body, self._binding.of_group(key, generated))))
            return tuple(entries)

    def close(self) -> None:
        """Close the file. Records that were not committed are dropped."""
        try:
            self._db.close()
        finally:
            os.close(self._lock)

    def _operations_of(self, record: Record) -> list[Operation]:
        """Return the changes of a record to the other tables.

        Nearly all completions are the first of their group. Then there is nothing to delete, which would take five
        statements.
        """
        match record:
            case CompletionsStored(key=key) if key not in self._stored:
                self._stored.add(key)
                return [_insert(key, self._seq)]
            case PartialCompletionsStored(key=key):
                self._stored.add(key)
            case GroupRequeued(key=key) | GroupDiscarded(key=key):
                self._stored.discard(key)
            case EvaluationOpened() | EvaluationClosed():
                self._stored = {key for key in self._stored if not key.startswith("e")}
        return _operations(self._seq, record, self._binding)

    def _write(self) -> bool:
        """Execute the transaction. Returns whether there is more to prune."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        token = self._check_owner()
        db.executemany("INSERT INTO records VALUES (?, ?)", self._records)
        if self._contents:
            db.executemany("INSERT INTO contents VALUES (?, ?)", self._contents)
        for operation, values in self._operations:
            db.execute(operation, values)
        prunable = self._prunable_groups() if self._pruning else []
        for key in prunable:
            for operation, values in _drop(key):
                db.execute(operation, values)
        db.execute("COMMIT")
        self._token = token
        self._stored.difference_update(prunable)
        return len(prunable) == PRUNED_PER_COMMIT

    def _check_owner(self) -> int:
        """Return the token of this writer, which the transaction in progress has checked or written.

        The lock excludes other controllers, unless its file was deleted or the file system does not keep it.
        """
        if _identity(self.path) != self._file:
            raise JournalTakenError(f"the journal {self.path} was moved or deleted; this controller ends")
        is_first = self._token == 0
        row = self._db.execute("SELECT value FROM marks WHERE name = 'owner'").fetchone()
        found = row[0] if row is not None else 0
        if found != (self._owner if is_first else self._token) or (is_first and self._last_seq() != self._opened_at):
            raise JournalTakenError(
                f"another controller writes the journal {self.path}; this one ends, run only one in a folder"
            )
        if is_first:
            token = secrets.randbits(62) + 1
            self._db.execute("INSERT OR REPLACE INTO marks VALUES ('owner', ?)", (token,))
            return token
        return self._token

    def _last_seq(self) -> int:
        return _number(self._db.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0])

    def _prunable_groups(self) -> list[str]:
        step = _marks(self._db)["pruned"]
        rows = self._db.execute("SELECT key FROM groups WHERE step <= ? LIMIT ?", (step, PRUNED_PER_COMMIT))
        return [key for (key,) in rows.fetchall()]

    def _roll_back(self) -> None:
        # After some errors SQLite has rolled back already. The pending records stay in this object.
        if self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.Error:
                pass

    def _clear_pending(self) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._contents: list[tuple[int, bytes]] = []
        self._operations: list[Operation] = []


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and number of the file at `path`, None if there is none."""
    try:
        found = os.stat(path)  # `Path.stat` takes twice as long, and each commit looks
    except OSError:
        return None
    return found.st_dev, found.st_ino


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yield the durable records of the journal at `path`, as `Journal.read`, also while a controller writes it.

    Raises ConfigError.
    """
    with _reading(path) as db:
        with as_config_error(path):
            binding = Binding.of(_marks(db))
        yield from _read(path, db, binding)


def has_ended(path: Path) -> bool:
    """Return whether the run of the journal at `path` is complete: it cannot be resumed. Raises ConfigError."""
    # A journal without a writer is read without the files that its writer would need, also from a read-only disk.
    is_written = path.with_name(f"{path.name}-wal").exists()
    with _reading(path, "" if is_written else "&immutable=1") as db:
        with as_config_error(path):
            marks = _marks(db)
        found = _records(path, db, marks.get("compacted", 0), Binding.of(marks))
        return any(isinstance(record, RunEnded) for _, record in found)


def last_ending(path: Path) -> RunEnded | RunStopped | None:
    """Return how the last controller of the journal at `path` ended the run, None if it did not. Raises ConfigError.

    Only the newest records are read: an end is followed by those of the members that leave, at most.
    """
    is_written = path.with_name(f"{path.name}-wal").exists()
    with _reading(path, "" if is_written else "&immutable=1") as db, as_config_error(path):
        binding = Binding.of(_marks(db))
        newest = "SELECT seq, body FROM records ORDER BY seq DESC LIMIT ?"
        for seq, body in db.execute(newest, (RECORDS_TO_END,)):
            match decode(body, binding.of_record(seq)):
                case RunEnded() | RunStopped() as ending:
                    return ending
                case RunBegun() | ControllerStarted() | StateCompacted():
                    return None
    return None


def check_before_resume(path: Path) -> None:
    """Raise ConfigError for a journal whose schema would run when a controller opens it.

    Any other fault of the file is the controller's to report, which has the records beside it.
    """
    check_place(path)
    options = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    with suppress(sqlite3.Error):
        uri = f"{path.absolute().as_uri()}?mode=ro{options}"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            distrust(db)
            check_schema(path, db)


@contextmanager
def _reading(path: Path, options: str = "") -> Iterator[sqlite3.Connection]:
    """Open the journal at `path` to read one state of it, also when its writer compacts it meanwhile."""
    check_place(path)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the path of the journal of a run")
    with as_config_error(path):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{options}", uri=True, isolation_level=None)
    try:
        with as_config_error(path):
            distrust(db)
            check_file(path, db)
            check_schema(path, db)
            db.execute("BEGIN")
        yield db
    finally:
        db.close()


def _operations(seq: int, record: Record, binding: Binding) -> list[Operation]:
    """Return the changes of a record to the other tables."""
    match record:
        case CompletionsStored(key=key):
            return [*_drop(key), *_drop_partial(key), _insert(key, seq)]
        case RewardsStored(key=key) if key.startswith("e"):
            return _drop(key)  # evaluations are not trained, and the scorers have seen the texts
        case RewardsStored(key=key):
            body = encode(record, binding.of_group(key, seq).seed)
            return [("UPDATE groups SET rewards = ? WHERE key = ?", (body, key))]
        case TeacherLogprobsStored(key=key):
            return [("UPDATE groups SET taught = ? WHERE key = ?", (seq, key))]
        case PartialCompletionsStored(key=key):
            return [*_drop_partial(key), ("INSERT INTO partials VALUES (?, ?)", (key, seq))]
        case GroupRequeued(key=key) | GroupDiscarded(key=key):
            return [*_drop(key), *_drop_partial(key)]
        case EvaluationOpened() | EvaluationClosed():
            # Groups of a finished evaluation are not resumed. Those that it gave up have contents.
            return [*_drop_partial("e", "f"), *_drop_evaluated()]
        case StepFrozen(step=step, ordinals=ordinals):
            update = "UPDATE groups SET step = ?, rank = ? WHERE key = ?"
            return [(update, (step, rank, f"t{ordinal}")) for rank, ordinal in enumerate(ordinals)]
        case StepReopened(step=step):
            return [("UPDATE groups SET step = NULL, rank = NULL WHERE step = ?", (step,))]
        case StepCommitted(step=step):
            return [_raise_mark("committed", step)]
        case VersionAdopted(name=name):
            # Only the newest of each replica is needed, and a thousand rollouts write one each at every step.
            return [
                ("DELETE FROM records WHERE seq = (SELECT seq FROM adopted WHERE name = ?)", (name,)),
                ("INSERT OR REPLACE INTO adopted VALUES (?, ?)", (name, seq)),
            ]
        case _:
            return []


def _insert(key: str, seq: int) -> Operation:
    """Note where the completions of a group are."""
    return "INSERT INTO groups (key, generated) VALUES (?, ?)", (key, seq)


def _drop(key: str) -> list[Operation]:
    """Delete the contents of a group, if it has any."""
    contents = [
        f"DELETE FROM contents WHERE id >= (SELECT {which} << {_PARTS} FROM groups WHERE key = ?1)"
        f" AND id < (SELECT ({which} + 1) << {_PARTS} FROM groups WHERE key = ?1)"
        for which in ("generated", "taught")
    ]
    return [*((one, (key,)) for one in contents), ("DELETE FROM groups WHERE key = ?", (key,))]


def _drop_partial(first: str, end: str = "") -> list[Operation]:
    """Delete the partial completions of a group, or of all groups with keys from `first` (included) to `end`."""
    keys = (first, end or f"{first}\0")
    found = (
        f"SELECT contents.id FROM partials CROSS JOIN contents ON contents.id >= partials.seq << {_PARTS}"
        f" AND contents.id < (partials.seq + 1) << {_PARTS} WHERE key >= ? AND key < ?"
    )
    return [
        (f"DELETE FROM contents WHERE id IN ({found})", keys),
        ("DELETE FROM partials WHERE key >= ? AND key < ?", keys),
    ]


def _drop_evaluated() -> list[Operation]:
    """Delete the contents of all groups of evaluations."""
    found = (
        f"SELECT contents.id FROM groups CROSS JOIN contents ON contents.id >= generated << {_PARTS}"
        f" AND contents.id < (generated + 1) << {_PARTS} WHERE key >= 'e' AND key < 'f'"
    )
    return [
        (f"DELETE FROM contents WHERE id IN ({found})", ()),
        ("DELETE FROM groups WHERE key >= 'e' AND key < 'f'", ()),
    ]


def _raise_mark(name: str, step: int) -> Operation:
    return ("UPDATE marks SET value = max(value, ?) WHERE name = ?", (step, name))


def _marks(db: sqlite3.Connection) -> dict[str, int]:
    marks = dict(db.execute("SELECT name, value FROM marks").fetchall())
    for name, value in marks.items():
        if type(value) is not int:  # SQLite stores any type in a column of integers
            raise ValueError(f"the mark {name!r:.100} is no number")
    return marks


def _number(seq: object) -> int:
    """Return the position of a record as it is in the file. Raises ValueError for another type, or out of range."""
    if type(seq) is not int or not 0 <= seq < MAX_RECORDS:
        raise ValueError(f"{seq!r:.100} is not the position of a record")
    return seq


def _keys(db: sqlite3.Connection) -> set[str]:
    """Return the groups that have contents."""
    return {key for (key,) in db.execute("SELECT key FROM groups UNION SELECT key FROM partials")}


def _without_texts(record: CompletionsStored) -> CompletionsStored:
    bare = tuple([replace(one, text="", problem="", metrics={}) for one in record.trajectories])
    return replace(record, trajectories=bare)


def _read(path: Path, db: sqlite3.Connection, binding: Binding) -> Iterator[JournalEntry]:
    with as_config_error(path):
        marks = _marks(db)
        compacted = marks.get("compacted", 0)
        whole = _live_contents(db, marks["committed"])
    for seq, record in _records(path, db, compacted, binding):
        with as_config_error(path):
            yield _whole(db, seq, binding) if seq in whole else JournalEntry(record)
        if seq == compacted:
            for kept in sorted(one for one in whole if one < compacted):
                with as_config_error(path):
                    entry = _whole(db, kept, binding)
                yield JournalEntry(entry.record, entry.payload, kept=True)


def _live_contents(db: sqlite3.Connection, committed: int) -> set[int]:
    """Return the positions of the contents of groups that no committed step has trained."""
    queries = (
        "SELECT generated FROM groups WHERE step IS NULL",
        "SELECT taught FROM groups WHERE step IS NULL AND taught IS NOT NULL",
        "SELECT generated FROM groups WHERE step > :committed",
        "SELECT taught FROM groups WHERE step > :committed AND taught IS NOT NULL",
        "SELECT seq FROM partials",
    )
    return {_number(seq) for query in queries for (seq,) in db.execute(query, {"committed": committed})}


def _records(path: Path, db: sqlite3.Connection, compacted: int, binding: Binding) -> Iterator[tuple[int, Record]]:
    """Yield positions and records: the first one, and those from `compacted` on."""
    last = compacted - 1
    with as_config_error(path):
        query = "SELECT seq, body FROM records WHERE seq < ? ORDER BY seq LIMIT 1"
        before = [(seq, decode(body, binding.of_record(seq))) for seq, body in db.execute(query, (compacted,))]
    yield from before
    while True:
        with as_config_error(path):
            query = "SELECT seq, body FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
            rows: Sequence[tuple[int, bytes]] = db.execute(query, (last, RECORDS_PER_READ)).fetchall()
        for seq, body in rows:
            with as_config_error(path):
                record = decode(body, binding.of_record(seq))
            yield seq, record
        if not rows:
            return
        last = rows[-1][0]


def _whole(db: sqlite3.Connection, seq: int, binding: Binding) -> JournalEntry:
    """Return a record with its texts and its payload."""
    query = "SELECT body FROM contents WHERE id >= ? AND id < ? ORDER BY id"
    rows = [row[0] for row in db.execute(query, (seq << _PARTS, (seq + 1) << _PARTS))]
    if not rows:
        raise ValueError(f"the contents of record {seq} are missing")
    body, *payload = rows
    return JournalEntry(decode(body, binding.of_record(seq), payload), tuple(payload))
