"""Characters that control a terminal, in what commands print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.table import Table
from rich.text import Text

from starling.cli.console import Console
from starling.cli.run.processes import LINE_CHARS, ServiceProcesses
from starling.cli.terminal import guarded_output, print_json

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e"
ESCAPED = r"\x1b[2J\x1b]0;title\x07\x9b1m\u202e"


def test_printed_texts_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_output():
        print(HOSTILE)
        print("kept", file=sys.stderr)
    assert capsys.readouterr() == (f"{ESCAPED}\n", "kept\n")
    print("\x1b", end="")
    assert capsys.readouterr().out == "\x1b", "the stream is what it was before"


@pytest.mark.parametrize("encode", [json.dumps, lambda value: msgspec.json.encode(value).decode()])
def test_printed_json_stays_json(encode: Callable[[Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    names = {"host": HOSTILE, "delete \x7f": ["next line \x85", "\u2028"]}
    with guarded_output():
        print_json(encode(names))
    printed = capsys.readouterr().out
    assert json.loads(printed) == names
    assert printed.rstrip("\n").isprintable()


def test_texts_of_rich_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE))
    with guarded_output():
        console = Console(force_terminal=True, width=200, legacy_windows=False, color_system="standard")
        console.print(table, Text("styled", style="bold"))
    printed = capsys.readouterr().out
    assert printed.count(r"\x1b[2J") == 2, "cells are as wide as rich measured their texts"
    assert "\x1b[1mstyled\x1b[0m" in printed, "styles stay"
    assert "\x1b[2J" not in printed


def test_errors_do_not_control_the_terminal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "starling.cli.main", "status", str(tmp_path / HOSTILE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "starling: " in done.stderr
    assert [one for one in done.stderr.replace("\n", "") if not one.isprintable()] == []


def test_lines_of_services_are_escaped_and_bounded(tmp_path: Path) -> None:
    """Whatever a process prints, also without a line's end."""
    shown: list[str] = []
    processes = ServiceProcesses(tmp_path, 1, lambda name, line: shown.append(line))
    code = f"import sys; print({HOSTILE!r}); sys.stdout.write('x' * {3 * LINE_CHARS})"
    child = processes.start("rollout-0", "reward", ["-n1", "-r1", code], module="timeit")
    assert processes.wait(60) == []
    assert child.reader is not None
    child.reader.join(60)
    log = (tmp_path / "rollout-0.log").read_text()
    assert shown[0] == ESCAPED
    assert log.startswith(f"{ESCAPED}\n")
    assert max(map(len, shown)) <= LINE_CHARS
    assert sum(line.count("x") for line in shown) >= 3 * LINE_CHARS
