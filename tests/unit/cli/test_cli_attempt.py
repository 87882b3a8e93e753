"""Attempts: found by folder, locked by one process, and their metrics."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt, read_metrics
from starling.cli.run.supervisor import start_limit_s
from starling.common.errors import ConfigError
from starling.common.settings import load


def attempts(folder: Path, run: str, *numbers: int) -> Path:
    for number in numbers:
        made = folder / run / f"attempt-{number}"
        made.mkdir(parents=True)
        (made / "config.toml").touch()
    return folder / run


def test_find_accepts_an_attempt_or_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = attempts(tmp_path, "quick", 9, 10)
    (run / "attempt-11").mkdir()  # it has no attempt
    (run / "attempt-old").mkdir()
    assert Attempt.find(run).folder == run / "attempt-10"
    assert Attempt.find(run / "attempt-9").folder == run / "attempt-9"
    monkeypatch.chdir(run)
    assert Attempt.find(Path("attempt-9")).folder == run / "attempt-9"


def test_find_without_a_folder_returns_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = attempts(tmp_path / "runs", "b", 1, 2), attempts(tmp_path / "runs", "a", 1)
    for age, path in enumerate((newer / "attempt-1", older / "attempt-2", older / "attempt-1")):
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.chdir(tmp_path)
    assert Attempt.find(None).folder == newer / "attempt-1"


def test_find_without_any_run_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (None, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"there is no run in .*; give the folder of one"):
            Attempt.find(folder)


def hold(folder: Path, held: Event, done: Event) -> None:
    Attempt(folder).acquire()
    held.set()
    done.wait(60)


def test_acquire_truncates_no_file_that_its_lock_links_to(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("of another user")
    attempt = Attempt(attempts(tmp_path, "quick", 1) / "attempt-1")
    attempt._lock.symlink_to(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="cannot be opened"):
        attempt.acquire()
    assert (tmp_path / "foreign").read_text() == "of another user"


def test_acquire_locks_the_attempt_for_one_process(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    assert not attempt.is_over(), "no process runs it yet"
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, held, done))
    process.start()
    assert held.wait(60)
    assert not attempt.is_over()
    with pytest.raises(ConfigError, match=f"is being run by process {process.pid}; `starling status"):
        attempt.acquire()
    process.kill()  # the kernel releases its lock
    process.join(60)
    assert attempt.is_over()
    os.close(attempt.acquire())
    assert attempt.is_over()


def test_read_metrics_skips_truncated_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st{"kind": "step", "step": 2}\n{"kind": "left"}\n{"kind"')
    assert read_metrics(path) == [{"kind": "step", "step": 1}, {"kind": "left"}]
    assert read_metrics(path, "left") == [{"kind": "left"}]


def test_start_limit_grows_with_what_the_controller_reads(tmp_path: Path) -> None:
    """A journal of an older version may have millions of records, which take longer than a minute to read."""
    attempt = Attempt.create_at(tmp_path / "attempt-1")
    assert start_limit_s(attempt, 45.0) == 45.0
    for file, num_bytes in ((attempt.journal, 5 << 30), (attempt.metrics, 1 << 30)):
        with file.open("wb") as sparse:
            sparse.truncate(num_bytes)
    assert start_limit_s(attempt, 45.0) > 6045.0


PREPARED = {
    "run": {"name": "mine"},
    "data": {"source": "p.jsonl", "format": "{question}"},
    "reward": {"scorers": [{"name": "math"}]},
    "rl": {"num_steps": 7},
}


@pytest.fixture(params=["folder", "scratch"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> Attempt:
    """Return an attempt with its keys, recipe and configuration, of a model in a folder or from scratch."""
    model = {"path": "m"} if request.param == "folder" else {"scratch": {"config": {"hidden_size": 8}}}
    recipe = Recipe.model_validate({**PREPARED, "model": model})
    attempt = Attempt.create_at(tmp_path / "attempt-1")
    attempt.prepare(recipe, ["policy-0"])
    return attempt


def prepare_again(attempt: Attempt) -> None:
    attempt.prepare(load(Recipe, [attempt.recipe], []), ["policy-0"])


def test_unedited_attempt_is_prepared_again(prepared: Attempt) -> None:
    before = prepared.config.read_bytes()
    prepare_again(prepared)
    assert prepared.config.read_bytes() == before


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["recipe.toml", "config.toml"])
@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("num_steps = 7", "num_steps = 8", "rl.num_steps"),
        ("max_rows = ", "max_rows = 1", "rollout.max_rows"),
        ('name = "math"', 'name = "gsm8k"', "reward.scorers"),
        ("num_steps = 7\n", "", "rl.num_steps"),
    ],
)
def test_edit_of_one_file_of_an_attempt_is_refused(name: str, old: str, new: str, key: str, prepared: Attempt) -> None:
    """Services read config.toml and the supervisor recipe.toml: an edit of one took effect in a part of the run."""
    edit(prepared.folder / name, old, new)
    with pytest.raises(ConfigError, match=rf"{key} = .*: one of them was edited since the run began; undo that, or ed"):
        prepare_again(prepared)


def test_same_edit_of_both_files_is_taken(prepared: Attempt) -> None:
    for file in (prepared.recipe, prepared.config):
        edit(file, "num_steps = 7", "num_steps = 8")
    prepare_again(prepared)
