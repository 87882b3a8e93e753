"""Journals whose schema or positions someone else has written: refused in one sentence, and nothing of them is run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.controller.core.records import ControllerStarted
from starling.controller.shell.journal.journal import Journal, check_before_resume, has_ended, last_ending, read_journal

TRIGGER = "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END"
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT name, value FROM kept, n"


def changed(folder: Path, *statements: str) -> Path:
    """Return the journal of one incarnation, changed by `statements`."""
    path = folder / "journal.sqlite"
    journal = Journal(path)
    journal.append(ControllerStarted(incarnation=1))
    journal.commit()
    journal.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)
    return path


def num_records(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT count(*) FROM records").fetchone()[0])


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        ((TRIGGER,), "trigger 't'"),
        (("ALTER TABLE marks RENAME TO kept", f"CREATE VIEW marks AS {ENDLESS}"), "view 'marks'"),
        (("CREATE VIRTUAL TABLE words USING fts5 (body)",), "virtual table 'words'"),
    ],
    ids=["trigger", "view", "virtual table"],
)
def test_schema_that_would_run_is_refused(tmp_path: Path, statements: tuple[str, ...], what: str) -> None:
    path = changed(tmp_path, *statements)
    for opened in (Journal, check_before_resume, lambda path: list(read_journal(path)), has_ended, last_ending):
        with pytest.raises(ConfigError, match=f"has the {what}, which no journal has"):
            opened(path)
    assert num_records(path) == 1


def test_tables_and_indices_of_others_are_left_alone(tmp_path: Path) -> None:
    path = changed(tmp_path, "CREATE TABLE notes (text TEXT)", "CREATE INDEX of_notes ON notes (text)", "ANALYZE")
    journal = Journal(path)
    journal.append(ControllerStarted(incarnation=2))
    journal.commit()
    journal.close()
    assert len(list(read_journal(path))) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE marks SET value = '0 OR (SELECT 1)' WHERE name = 'committed'",
        "UPDATE marks SET value = 'x' WHERE name = 'pruned'",
        "INSERT INTO marks VALUES ('compacted', 'x')",
        "INSERT INTO groups (key, generated) VALUES ('t0', 'x')",
        "INSERT INTO groups (key, generated) VALUES ('t0', 9000000000000000000)",
        "INSERT INTO partials VALUES ('t0', -1)",
        "INSERT INTO records VALUES (9223372036854775807, x'00')",
    ],
)
def test_marks_and_positions_of_other_types_are_damage(tmp_path: Path, statement: str) -> None:
    path = changed(tmp_path, statement)
    with pytest.raises(ConfigError, match="is damaged"):
        open_and_read(path)


def open_and_read(path: Path) -> None:
    journal = Journal(path)
    try:
        list(journal.read())
    finally:
        journal.close()


def test_end_of_a_run_with_a_damaged_mark(tmp_path: Path) -> None:
    path = changed(tmp_path, "INSERT INTO marks VALUES ('compacted', 'x')")
    with pytest.raises(ConfigError, match="the mark 'compacted' is no number"):
        has_ended(path)
