"""Rows of the journal that are in another place than they were written at: moved, exchanged, or of another run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import xxhash
from journal_writer import record_of

from starling.common.errors import ConfigError
from starling.controller.core.records import ControllerStarted, JournalEntry, RunBegun, StepFrozen
from starling.controller.shell.journal.database import VERSION
from starling.controller.shell.journal.journal import Journal, read_journal

REFUSED = "does not match its digest: it was changed, moved, or copied from another journal"


def journal_of(path: Path, *, last: int = 4) -> Path:
    """Write a journal with an incarnation, two groups with their rewards, and a step of both. Returns its path."""
    journal = Journal(path)
    journal.append(RunBegun(run="r", plan={}))
    for number in range(last):
        journal.append(*record_of(number))
    journal.append(StepFrozen(step=1, ordinals=(0, 1), prompts=("a", "b")))
    journal.append(ControllerStarted(incarnation=last))
    journal.commit()
    journal.close()
    return path


def change(path: Path, *statements: str, other: Path | None = None) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if other is not None:
            db.execute("ATTACH ? AS other", (str(other),))
        for statement in statements:
            db.execute(statement)


def read_all(path: Path) -> list[JournalEntry]:
    """Read a journal in each way."""
    entries = list(read_journal(path))
    journal = Journal(path)
    try:
        assert list(journal.read()) == entries
        list(journal.records())
        journal.fetch(1)
    finally:
        journal.close()
    return entries


def test_rows_in_their_places_are_read(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "journal.sqlite")
    assert [entry.record for entry in read_all(path)][1::2][:2] == [record_of(0)[0], record_of(2)[0]]


@pytest.mark.parametrize(
    "statements",
    [
        ["UPDATE records SET seq = 99 WHERE seq = 3"],
        ["INSERT INTO records SELECT 99, body FROM records WHERE seq = 7"],
        ["UPDATE records SET seq = seq + 50 WHERE seq >= 4"],
        [
            "UPDATE records SET seq = 99 WHERE seq = 3",
            "UPDATE records SET seq = 3 WHERE seq = 5",
            "UPDATE records SET seq = 5 WHERE seq = 99",
        ],
        [
            "UPDATE contents SET id = id + (97 << 16) WHERE id >= 2 << 16 AND id < 3 << 16",
            "UPDATE groups SET generated = 99 WHERE key = 't0'",
        ],
        ["UPDATE groups SET rewards = (SELECT rewards FROM groups WHERE key = 't1')"],
        ["UPDATE groups SET rewards = (SELECT body FROM records WHERE seq = 3) WHERE key = 't0'"],
        ["DELETE FROM marks WHERE name = 'binding'"],
    ],
    ids=["moved", "doubled", "shifted", "exchanged", "contents", "rewards", "record as rewards", "no mark"],
)
def test_row_in_another_place_is_refused(tmp_path: Path, statements: list[str]) -> None:
    path = journal_of(tmp_path / "journal.sqlite")
    change(path, *statements)
    with pytest.raises(ConfigError, match=REFUSED):
        read_all(path)


@pytest.mark.parametrize("seq", [1, 3, 7])
def test_row_of_another_run_is_refused(tmp_path: Path, seq: int) -> None:
    path, other = journal_of(tmp_path / "journal.sqlite"), journal_of(tmp_path / "other.sqlite")
    take = f"UPDATE records SET body = (SELECT body FROM other.records WHERE seq = {seq}) WHERE seq = {seq}"
    change(path, take, other=other)
    with pytest.raises(ConfigError, match=REFUSED):
        read_all(path)


def as_of_version_4(path: Path) -> None:
    """Make a journal as the version before wrote it: digests cover the record and its payload only."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        for seq, body in db.execute("SELECT seq, body FROM records").fetchall():
            db.execute("UPDATE records SET body = ? WHERE seq = ?", (unbound(body), seq))
            rows = db.execute(
                "SELECT id, body FROM contents WHERE id >= ? AND id < ? ORDER BY id", (seq << 16, (seq + 1) << 16)
            ).fetchall()
            if rows:
                first, whole = rows[0]
                changed = unbound(whole, *(part for _, part in rows[1:]))
                db.execute("UPDATE contents SET body = ? WHERE id = ?", (changed, first))
        for key, body in db.execute("SELECT key, rewards FROM groups").fetchall():
            db.execute("UPDATE groups SET rewards = ? WHERE key = ?", (unbound(body), key))
        db.execute("DELETE FROM marks WHERE name IN ('binding', 'bound_since')")
        db.execute("PRAGMA user_version = 4")
        db.execute("COMMIT")


def unbound(stored: bytes, *payload: bytes) -> bytes:
    body = stored[9:]
    return b"\xc1" + xxhash.xxh3_64_digest(b"".join((body, *payload))) + body


def test_journal_of_the_version_before_is_read_and_continued(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "journal.sqlite")
    before = read_all(path)
    as_of_version_4(path)
    assert list(read_journal(path)) == before, "without an upgrade, too"
    assert read_all(path) == before
    journal = Journal(path)
    for number in range(4, 8):
        journal.append(*record_of(number))
    journal.append(StepFrozen(step=2, ordinals=(2, 3), prompts=("c", "d")))
    journal.commit()
    steps = [[type(entry.record).__name__ for entry in journal.fetch(step)] for step in (1, 2)]
    assert steps == [["CompletionsStored", "RewardsStored"] * 2] * 2
    journal.close()
    assert len(read_all(path)) == len(before) + 5
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    change(path, "UPDATE records SET seq = 99 WHERE seq = 9")
    with pytest.raises(ConfigError, match=REFUSED):
        read_all(path)


def test_row_without_a_digest_is_of_an_older_version_only(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "journal.sqlite")
    plain = msgspec.msgpack.encode(ControllerStarted(incarnation=9)).hex()
    change(path, f"UPDATE records SET body = x'{plain}' WHERE seq = 7")
    with pytest.raises(ConfigError, match="a record has no digest"):
        read_all(path)
