"""The tutorial from top to bottom, as a reader types it, in a folder that looks like a checkout.

The chapters build on each other: a later one runs only after those before it.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from snippets import ROOT, snippets_of
from terminals import BLOCK_S, Terminal

CHAPTERS = ("first-run", "own-data", "own-reward", "two-machines")
COPIED = ("Makefile", "pyproject.toml", "*.txt", "recipes/*", "libs/*/pyproject.toml", "services/*/pyproject.toml")
FIRST = "First terminal"
TERMINAL = re.compile(r"(First|Second) terminal")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what `make` and the recipes need, and the environment of this test as its `.venv`."""
    folder = tmp_path_factory.mktemp("tutorial") / "starling"
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed"):
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv/.installed").touch()  # `make demo` finds everything installed
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def done() -> list[str]:
    """The chapters that have run to their end."""
    return []


@pytest.mark.timeout(4 * BLOCK_S)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_tutorial_runs(chapter: str, checkout: Path, tmp_path: Path, done: list[str]) -> None:
    before = CHAPTERS[: CHAPTERS.index(chapter)]
    if tuple(done) != before:
        pytest.skip(f"needs what {', '.join(before)} have written")
    with ExitStack() as stack:
        terminals: dict[str, Terminal] = {}
        for snippet in snippets_of(f"docs/tutorial/{chapter}.md"):
            if snippet.language == "sh":
                name = snippet.title or FIRST
                assert TERMINAL.match(name), f"{snippet}: {name} is no terminal"
                name = name.partition(",")[0]
                if name not in terminals:
                    terminals[name] = stack.enter_context(Terminal(name, checkout, tmp_path))
                if name == FIRST:
                    terminals[name].type(snippet.text)
                else:
                    terminals[name].type_until_it_works(snippet.text)
            elif snippet.title:
                (checkout / snippet.title).write_text(snippet.text)
        for terminal in terminals.values():
            terminal.wait()
    done.append(chapter)


def test_all_chapters_run() -> None:
    assert {path.stem for path in (ROOT / "docs/tutorial").glob("*.md")} == set(CHAPTERS)
