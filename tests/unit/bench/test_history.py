"""The history of figures: what is recorded of a bench, and the page that is generated from it."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from figures import PAGE, TABLE, latest, render, shown, table
from history import FULL, HISTORY, QUICK, Entry, append_history, committed, read_history, run

BENCH = HISTORY.parent
MEASURED = re.compile(
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:\s(?:ms|us|s|ns|GB/s|MB/s|\w+/s|%|times)(?!\w)|(?<=\.\d)|(?<=\.\d\d)|(?<=\.\d\d\d))"
)
"""A number with a unit of time or rate, a share, or a decimal."""

PRINTING = """
import json, sys
line = {"bench": "one", "unit": "s", "goal": 2.0, "better": "lower"}
print(json.dumps({**line, "figure": "start_s", "value": 1.5, "detail": {"rounds": 3}}))
print(json.dumps({**line, "figure": "missing_s", "value": None, "detail": {"reason": "no GPU"}}))
sys.exit("fail" in sys.argv)
"""


def entry(figure: str, value: float, script: str = "one.py", **fields: Any) -> Entry:
    machine = {"num_cores": 2, "cpu": "x", "load_1m": 0.1, "other_cores": 0.0}
    known = {"commit": "a" * 12, "date": "2026-01-02T03:04Z", "bench": "one", "unit": "ratio", "goal": None}
    return Entry(
        figure=figure,
        value=value,
        script=script,
        **{**known, "better": "lower", "rounds": 1, "machine": machine, **fields},
    )


# --- recording -------------------------------------------------------------------------------------------------------


def test_figures_of_a_bench_are_recorded_with_commit_and_machine_and_missing_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.py").write_text(PRINTING)
    file = tmp_path / "history.jsonl"
    assert run(("one.py", "--quick"), "c0ffee", tmp_path, file)
    assert run(("one.py",), "c0ffee", tmp_path, file)
    first, second = read_history(file)
    assert (first.figure, first.value, first.unit, first.goal, first.rounds) == ("start_s", 1.5, "s", 2.0, 3)
    assert (first.script, second.script, first.file) == ("one.py --quick", "one.py", "one.py")
    assert first.commit == "c0ffee"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", first.date)
    assert first.machine is not None
    assert set(first.machine) == {"num_cores", "cpu", "load_1m", "other_cores"}
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert "not recorded: missing_s: no GPU" in printed.err


def test_bench_that_fails_or_runs_without_a_commit_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(PRINTING)
    file = tmp_path / "history.jsonl"
    assert not run(("one.py", "fail"), "c0ffee", tmp_path, file)
    assert run(("one.py",), None, tmp_path, file)
    assert not file.exists()


def test_other_work_is_measured_while_a_bench_runs(tmp_path: Path) -> None:
    """The bench ends when a process that is none of its children has taken half a second of processor time."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        clock = f"time.clock_gettime({~other.pid << 3 | 2})"
        (tmp_path / "one.py").write_text(f"import time\nstart = {clock}\nwhile {clock} < start + 0.5: pass\n{PRINTING}")
        file, started = tmp_path / "history.jsonl", time.monotonic()
        assert run(("one.py",), "c0ffee", tmp_path, file)
        seconds = time.monotonic() - started
    finally:
        other.kill()
        other.wait()
    (found,) = read_history(file)
    assert found.machine is not None
    assert found.machine["other_cores"] * seconds >= 0.4


@pytest.mark.parametrize("changed", ["libs/a.py", "bench/one.py"])
def test_figures_are_recorded_for_committed_code_only(tmp_path: Path, changed: str) -> None:
    for file in ("libs/a.py", "bench/one.py", "services/b.py", "docs/page.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "constraints.txt").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "docs/page.md").write_text("changed")
    (tmp_path / "bench/history.jsonl").write_text("{}")
    assert re.fullmatch("[0-9a-f]{12}", committed(tmp_path))
    (tmp_path / changed).write_text("pass")
    with pytest.raises(SystemExit, match=changed):
        committed(tmp_path)


def test_every_bench_that_prints_figures_is_recorded() -> None:
    """All but the module that prints, the differences from other losses, which are no cost, and what needs a GPU."""
    printing = {file.name for file in BENCH.glob("*.py") if "print_figure(" in file.read_text()}
    left_out = {"figure.py", "departures.py", "attention_gpu.py", "precision_gpu.py", "weightsync_gpu.py"}
    assert {bench[0] for bench in FULL} == printing - left_out
    for bench in QUICK:
        assert bench[-1] == "--quick" or bench[0] == "check_samples.py"
        assert "--quick" in bench[1:] or bench in FULL


# --- the page --------------------------------------------------------------------------------------------------------


def test_page_is_what_the_history_gives() -> None:
    assert render(PAGE.read_text(), read_history()) == PAGE.read_text(), "run `make figures`"


def test_every_script_of_the_history_has_one_table_and_is_a_file() -> None:
    tables = TABLE.findall(PAGE.read_text())
    assert len(tables) == len(set(tables))
    assert set(tables) == {bench[0] for bench in FULL}
    assert {one.file for one in read_history()} <= set(tables)


def test_every_figure_of_the_page_is_in_a_generated_table() -> None:
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", TABLE.sub("", PAGE.read_text()), flags=re.DOTALL)
    assert MEASURED.findall(text) == [], "let a script in bench/ print it; `make bench-record`, then `make figures`"


@pytest.mark.parametrize(
    "text", ["it takes 4.5 ms", "in 3 s.", "0.97 of it", "81,000 records/s", "19.3 times", "a share of 5 %"]
)
def test_measured_numbers_are_recognised(text: str) -> None:
    assert MEASURED.search(text)


@pytest.mark.parametrize(
    "text", ["256 MiB", "16 slots", "1,024 rollouts", "FSDP 4 -> TP 2", "hidden size 192;", "every 2 seconds"]
)
def test_sizes_are_no_measured_numbers(text: str) -> None:
    assert not MEASURED.search(text)


@pytest.mark.campaign
def test_history_has_a_known_figure_in_every_line() -> None:
    """The name of a figure, or its constant parts, are in the script that is said to have printed it."""
    for one in read_history():
        tree = ast.parse((BENCH / one.file).read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert any(len(text) >= 3 and text.strip("_") and text in one.figure for text in texts), one
        assert re.fullmatch("[0-9a-f]{12}", one.commit)
        assert math.isfinite(one.value)


def test_table_has_the_last_commit_of_each_kind_with_all_its_runs() -> None:
    old, new = {"commit": "a" * 12}, {"commit": "b" * 12, "date": "2026-02-03T00:00Z"}
    entries = [
        entry("x_s", 9.0, unit="s", goal=2.5, **old),
        entry("x_s", 1.25, unit="s", goal=2.5, **new),
        entry("x_s", 1.5, unit="s", goal=2.5, **new),
        entry("x_s", 0.5, "one.py --quick", unit="s", goal=2.5, **old),
        entry("y", 12345.0, goal=10000.0, better="higher", **old),
        entry("z", 1.0, "other.py", **new),
    ]
    assert table("one.py", entries).splitlines() == [
        "| figure | full run | quick run | goal |",
        "|---|---|---|---|",
        "| `x_s` | 1.25, 1.5 s (`bbbbbbb`, 2026-02-03) | 0.5 s (`aaaaaaa`, 2026-01-02) | at most 2.5 |",
        "| `y` | 12,300 (`aaaaaaa`, 2026-01-02) |  | at least 10,000 |",
    ]
    assert "recorded yet" in table("none.py", entries)


def test_page_marks_values_of_a_busy_machine_and_of_the_page_before_the_history() -> None:
    busy = {"num_cores": 2, "cpu": "x", "load_1m": 5.0, "other_cores": 0.26}
    assert latest([entry("x", 1.0, machine=busy)]) == "1 (`aaaaaaa`, 2026-01-02, busy machine)"
    assert latest([entry("x", 1.0, machine=None)]) == "1 (`aaaaaaa`, 2026-01-02, from the page)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0301, "0.0301"),
        (2.2e-07, "2.2e-07"),
        (46200, "46,200"),
        (1.0, "1"),
        (-8.192, "-8.19"),
        (105e6, "105,000,000"),
    ],
)
def test_values_have_three_significant_digits(value: float, text: str) -> None:
    assert shown(value) == text


def test_changed_history_changes_the_page_and_check_says_so(tmp_path: Path) -> None:
    page = "before\n<!-- figures: one.py -->\nold\n<!-- end of figures -->\nafter\n"
    file = tmp_path / "history.jsonl"
    append_history([entry("x", 1.0)], file)
    written = render(page, read_history(file))
    assert "| `x` | 1 (" in written
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert render(written, read_history(file)) == written
    append_history([entry("x", 2.0)], file)
    assert render(written, read_history(file)) != written


def test_script_checks_the_page() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "figures.py"), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
