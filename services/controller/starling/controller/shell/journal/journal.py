"""The journal: what must survive the controller's death, in one SQLite file beside the run.

    append, append, ..., commit        one transaction, one fsync: durable when `commit` returns

A `Send` that follows from a record goes out after the commit, so whatever the controller has said to anybody is on
disk. See docs/decisions/0009-journal.md for why it is made this way. Tables:

| table      | holds                                                                                              |
|------------|----------------------------------------------------------------------------------------------------|
| `records`  | every record, in order; of a generated group without the texts of its completions                   |
| `contents` | what came of a group and may be needed again: part 0 the whole record, then its payload             |
| `partials` | where the newest tokens of an interrupted group are, until there is more of it                       |
| `groups`   | where the contents of a group are, its teacher's, its score, and the step that takes it              |
| `adopted`  | the newest `VersionAdopted` of each replica; the older ones go                                       |
| `marks`    | `committed`: the last step made; `pruned`: up to which step a policy has a state, so contents may go |

The file grows to the most that it ever held at once: what is deleted leaves pages that the next records take.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from starling.common.errors import ConfigError, StarlingError
from starling.controller.core.events import Buffers
from starling.controller.core.records import (
    CompletionsStored,
    EvaluationClosed,
    EvaluationOpened,
    GroupDiscarded,
    GroupRequeued,
    JournalEntry,
    PartialCompletionsStored,
    Record,
    RewardsStored,
    StepCommitted,
    StepFrozen,
    TeacherLogprobsStored,
    VersionAdopted,
)
from starling.controller.shell.journal.database import check_file, explained, lock_file, open_file

PRUNED_PER_COMMIT: Final = 64
"""Groups whose contents one commit deletes, so that pruning hundreds of them holds nobody up."""
READ_AT_ONCE: Final = 512

_PARTS: Final = 16
"""Bits of `contents.id` below the record's number: the part."""

_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""No room for the file or its log, and no room for the log's index."""

Operation = tuple[str, tuple[Any, ...]]

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


class JournalError(StarlingError):
    """The journal cannot be written, and nobody knows what of the last transaction is on disk: only a restart can."""


class JournalFullError(JournalError):
    """The disk is full. Nothing was lost: `commit` can be tried again as soon as there is room."""


class Journal:
    """The one writer of a journal."""

    def __init__(self, path: Path) -> None:
        """Open the journal at `path`, or make it. Raises ConfigError when it cannot be used, or is in use."""
        self.path = path
        self._lock = lock_file(path)
        try:
            with explained(path):
                self._db = open_file(path)
                self._seq: int = self._db.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0]
        except BaseException:  # nobody will close what was not made
            os.close(self._lock)
            raise
        self._pruning = True
        """There may be contents to delete."""
        self._forget()

    def append(self, record: Record, payload: Buffers = ()) -> None:
        """Add `record`; only what comes of a group has a payload. It is durable once `commit` has returned."""
        has_contents = isinstance(record, CompletionsStored | TeacherLogprobsStored | PartialCompletionsStored)
        assert not payload or has_contents, f"{type(record).__name__} has no payload"
        self._seq += 1
        body = _encoder.encode(record)
        if has_contents:
            # Inserted as they are: one row for each buffer spares the copy that joining them would be.
            first = self._seq << _PARTS
            self._contents += [(first + part, buffer) for part, buffer in enumerate((body, *payload))]
        if isinstance(record, CompletionsStored):
            body = _encoder.encode(_without_texts(record))
        self._records.append((self._seq, body))
        self._operations += _operations(self._seq, record)

    def prune(self, step: int) -> None:
        """Let the contents of the groups of steps up to `step` go, from the next commit on and a few at a time."""
        self._operations.append(_raise_mark("pruned", step))
        self._pruning = True

    @property
    def num_pending(self) -> int:
        """Records that were appended since the last commit that succeeded."""
        return len(self._records)

    def commit(self) -> None:
        """Make durable all that was appended, in one transaction with one fsync; nothing when there is nothing to do.

        Pruning goes on with each call, so call it also when nothing was appended.
        Raises JournalFullError when the disk is full; everything is still here, and the next commit tries it again.
        Raises JournalError when it is not known what is on disk.
        """
        if not (self._records or self._operations or self._pruning):
            return
        try:
            pruning = self._write()
        except sqlite3.Error as error:
            self._roll_back()
            if getattr(error, "sqlite_errorcode", None) in _FULL:
                raise JournalFullError(
                    f"the disk of the journal {self.path} is full; {self.num_pending} records wait for room, make some"
                ) from None
            raise JournalError(f"the journal {self.path} cannot be written: {error}; look at its disk") from None
        self._pruning = pruning
        self._forget()

    def read(self) -> Iterator[JournalEntry]:
        """Return what is durable, in order.

        A generated group that no committed step has taken comes whole, with its payload; any other without payload,
        and without the texts of its completions, so that a long run fits into memory. Raises ConfigError.
        """
        return _read(self.path, self._db)

    def fetch(self, step: int) -> tuple[JournalEntry, ...]:
        """Return what `step` was made of: of each group its last `CompletionsStored` and `TeacherLogprobsStored`,
        whole, and its
        `RewardsStored`.

        The groups come in the order of `StepFrozen.ordinals`. Empty when the step has no groups, or is pruned.
        Raises ConfigError when the file is damaged.
        """
        with explained(self.path):
            if step <= _marks(self._db)["pruned"]:
                return ()
            kept: list[JournalEntry] = []
            query = "SELECT generated, taught, scored FROM groups WHERE step = ? ORDER BY rank"
            for generated, taught, scored in self._db.execute(query, (step,)).fetchall():
                body = self._db.execute("SELECT body FROM records WHERE seq = ?", (scored,)).fetchone()[0]
                kept += [_whole(self._db, seq) for seq in (generated, taught) if seq is not None]
                kept.append(JournalEntry(_decoder.decode(body)))
            return tuple(kept)

    def close(self) -> None:
        """Let the file go. What was appended and not committed is dropped."""
        try:
            self._db.close()
        finally:
            os.close(self._lock)

    def _write(self) -> bool:
        """Run the transaction. Returns whether there is more to prune."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO records VALUES (?, ?)", self._records)
        db.executemany("INSERT INTO contents VALUES (?, ?)", self._contents)
        for operation, values in self._operations:
            db.execute(operation, values)
        due = self._pruned_groups() if self._pruning else []
        for key in due:
            for operation, values in _drop(key):
                db.execute(operation, values)
        db.execute("COMMIT")
        return len(due) == PRUNED_PER_COMMIT

    def _pruned_groups(self) -> list[str]:
        step = _marks(self._db)["pruned"]
        rows = self._db.execute("SELECT key FROM groups WHERE step <= ? LIMIT ?", (step, PRUNED_PER_COMMIT))
        return [key for (key,) in rows.fetchall()]

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors; what stays in this object is what counts.
        if self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.Error:
                pass

    def _forget(self) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._contents: list[tuple[int, bytes]] = []
        self._operations: list[Operation] = []


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Return what is durable in the journal at `path`, as `Journal.read`, also while a controller writes it.

    Raises ConfigError.
    """
    if not path.is_file():
        raise ConfigError(f"there is no journal {path}; give the path of a run's journal")
    with explained(path):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        with explained(path):
            check_file(path, db)
        yield from _read(path, db)
    finally:
        db.close()


def _operations(seq: int, record: Record) -> list[Operation]:
    """Return what a record changes in `groups`, `contents` and `marks`."""
    match record:
        case CompletionsStored(key=key):
            return [*_drop(key), *_drop_partial(key), ("INSERT INTO groups (key, generated) VALUES (?, ?)", (key, seq))]
        case RewardsStored(key=key) if key.startswith("e"):
            return _drop(key)  # nobody trains it, and its texts were for the scorers
        case RewardsStored(key=key):
            return [("UPDATE groups SET scored = ? WHERE key = ?", (seq, key))]
        case TeacherLogprobsStored(key=key):
            return [("UPDATE groups SET taught = ? WHERE key = ?", (seq, key))]
        case PartialCompletionsStored(key=key):
            return [*_drop_partial(key), ("INSERT INTO partials VALUES (?, ?)", (key, seq))]
        case GroupRequeued(key=key) | GroupDiscarded(key=key):
            return [*_drop(key), *_drop_partial(key)]
        case EvaluationOpened() | EvaluationClosed():
            return _drop_partial("e", "f")  # of one that is over, nothing is gone on with
        case StepFrozen(step=step, ordinals=ordinals):
            sealing = "UPDATE groups SET step = ?, rank = ? WHERE key = ?"
            return [(sealing, (step, rank, f"t{ordinal}")) for rank, ordinal in enumerate(ordinals)]
        case StepCommitted(step=step):
            return [_raise_mark("committed", step)]
        case VersionAdopted(name=name):
            # Only the newest of each replica counts: a thousand rollouts prove a version each at every step.
            return [
                ("DELETE FROM records WHERE seq = (SELECT seq FROM adopted WHERE name = ?)", (name,)),
                ("INSERT OR REPLACE INTO adopted VALUES (?, ?)", (name, seq)),
            ]
        case _:
            return []


def _drop(key: str) -> list[Operation]:
    """Delete the contents of a group, if it has any."""
    contents = [
        f"DELETE FROM contents WHERE id >= (SELECT {which} << {_PARTS} FROM groups WHERE key = ?1)"
        f" AND id < (SELECT ({which} + 1) << {_PARTS} FROM groups WHERE key = ?1)"
        for which in ("generated", "taught")
    ]
    return [*((one, (key,)) for one in contents), ("DELETE FROM groups WHERE key = ?", (key,))]


def _drop_partial(first: str, end: str = "") -> list[Operation]:
    """Delete the tokens of an interrupted group, or of all whose keys are from `first` on and before `end`."""
    keys = (first, end or f"{first}\0")
    found = (
        f"SELECT contents.id FROM partials CROSS JOIN contents ON contents.id >= partials.seq << {_PARTS}"
        f" AND contents.id < (partials.seq + 1) << {_PARTS} WHERE key >= ? AND key < ?"
    )
    return [
        (f"DELETE FROM contents WHERE id IN ({found})", keys),
        ("DELETE FROM partials WHERE key >= ? AND key < ?", keys),
    ]


def _raise_mark(name: str, step: int) -> Operation:
    return ("UPDATE marks SET value = max(value, ?) WHERE name = ?", (step, name))


def _marks(db: sqlite3.Connection) -> dict[str, int]:
    return dict(db.execute("SELECT name, value FROM marks").fetchall())


def _without_texts(record: CompletionsStored) -> CompletionsStored:
    return replace(record, trajectories=tuple(replace(t, text="") for t in record.trajectories))


def _read(path: Path, db: sqlite3.Connection) -> Iterator[JournalEntry]:
    with explained(path):
        wanted = "SELECT generated, taught FROM groups WHERE step IS NULL OR step > ?"
        whole = {seq for both in db.execute(wanted, (_marks(db)["committed"],)) for seq in both}
        whole |= {seq for (seq,) in db.execute("SELECT seq FROM partials")}
    last = 0
    while True:
        with explained(path):
            query = "SELECT seq, body FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
            rows: Sequence[tuple[int, bytes]] = db.execute(query, (last, READ_AT_ONCE)).fetchall()
        for seq, body in rows:
            with explained(path):
                one = _whole(db, seq) if seq in whole else JournalEntry(_decoder.decode(body))
            yield one
        if not rows:
            return
        last = rows[-1][0]


def _whole(db: sqlite3.Connection, seq: int) -> JournalEntry:
    """Return what came of a group, with its texts and its payload."""
    query = "SELECT body FROM contents WHERE id >= ? AND id < ? ORDER BY id"
    body, *payload = [row[0] for row in db.execute(query, (seq << _PARTS, (seq + 1) << _PARTS))]
    return JournalEntry(_decoder.decode(body), tuple(payload))
