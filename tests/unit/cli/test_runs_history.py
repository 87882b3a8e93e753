"""The history of a run from its metrics.jsonl: attempts joined, steps counted once, damage left out."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGUN, evaluation_line, make_attempt, many_steps, step_line

from starling.cli.report.statistics import MAX_POINTS
from starling.cli.runs.files.curves import COLUMNS, Column, Curve, Span, smoothed
from starling.cli.runs.files.history import NUM_ROWS, History, read_history
from starling.cli.runs.files.lines import decode, number, read_backwards
from starling.cli.runs.files.metrics import EVALUATION, REWARD
from starling.common.errors import ConfigError


def rewards(history: History) -> list[tuple[float, float]]:
    return [(column.x, round(column.mean, 6)) for column in history.curves[REWARD].by_step.columns()]


def test_attempt_replaces_its_predecessor_from_its_first_step_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_attempt(run, [*map(step_line, range(1, 11)), evaluation_line(4, 0.1), evaluation_line(9, 0.2)])
    later = [step_line(step, reward_mean=1.0, time=BEGUN + 1000 + step) for step in (6, 7)]
    make_attempt(run, later, number=2)
    history = read_history(run)
    assert rewards(history) == [(1, 0.001), (2, 0.002), (3, 0.003), (4, 0.004), (5, 0.005), (6, 1), (7, 1)]
    assert (history.num_steps, history.newest_step, len(history.attempts)) == (7, 7, 2)
    assert [line["version"] for _, line in history.events.evaluations.entries()] == [4]
    # 4 s to step 5 of the first attempt and 1 s of the second one; not the 995 s between them.
    assert history.seconds.end == pytest.approx(5.0)


def test_attempt_that_begins_anew_is_the_whole_history(tmp_path: Path) -> None:
    run = tmp_path / "run"
    failed = {"time": BEGUN, "kind": "discarded", "reason": "of the first attempt"}
    make_attempt(run, [failed, *map(step_line, range(1, 100))])
    make_attempt(run, map(step_line, range(1, 4)), number=2)
    history = read_history(run)
    assert [step for step, _ in rewards(history)] == [1, 2, 3]
    assert history.events.failures == {}
    assert [step for step, _ in rewards(read_history(run / "attempt-1"))][-1] == 99


def test_repeated_step_counts_once_and_the_last_line_is_taken(tmp_path: Path) -> None:
    lines = [*map(step_line, (1, 2, 3, 5)), step_line(2, reward_mean=0.5), step_line(4)]
    history = read_history(make_attempt(tmp_path / "run", lines))
    assert rewards(history) == [(1, 0.001), (2, 0.5), (3, 0.003), (4, 0.004), (5, 0.005)]
    assert history.num_steps == 5
    assert [row["step"] for row in history.rows] == [1, 2, 3, 4, 5]


def test_damaged_and_unknown_lines_are_left_out(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", map(step_line, (1, 2)))
    hostile: list[Any] = [None, True, "7", -1, 1 << 80, 1.5, [], {"a": 1}]
    with (folder / "metrics.jsonl").open("ab") as file:
        for value in hostile:
            file.write(json.dumps({"kind": "step", "step": value, "time": value}).encode() + b"\n")
            file.write(json.dumps({"kind": value, "time": 1e30}).encode() + b"\n")
            fields = dict.fromkeys(
                ("replica", "version", "pull_s", "reason", "reward_mean", "time", "publish_s"), value
            )
            for kind in ("joined", "left", "adopted", "published", "evaluation", "waiting", "set", "alarm"):
                file.write(json.dumps({**fields, "kind": kind}).encode() + b"\n")
        file.write(b'{"kind": "invented", "time": 1}\n\0\0\0\n[1]\n\xff\xfe\n')
        file.write(json.dumps(step_line(3, loss=math.nan, reward_mean=math.inf)).encode() + b"\n")
        file.write(b"[" * 100_000 + b"\n" + json.dumps(step_line(4)).encode()[:-5])
    history = read_history(folder)
    assert [step for step, _ in rewards(history)] == [1, 2]
    assert history.num_steps == 3, "step 3 has no finite reward, and step 4 is cut off"


def test_run_without_metrics_has_an_empty_history(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    history = read_history(tmp_path / "run")
    assert (history.num_steps, history.newest_step, history.begun) == (0, -1, None)
    with pytest.raises(ConfigError, match="there is no run in"):
        read_history(tmp_path / "nothing")


def test_long_run_takes_little_memory(tmp_path: Path) -> None:
    """Beyond the values of which medians are sampled, a step takes its place in the index only."""
    short, long = (make_attempt(tmp_path / f"run{num}", many_steps(num)) for num in (MAX_POINTS, MAX_POINTS + 7000))
    peaks = []
    for folder in (short, long):
        tracemalloc.start()
        history = read_history(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(history.rows) == NUM_ROWS
        assert len(history.curves[REWARD].by_step.columns()) <= COLUMNS
    assert peaks[1] - peaks[0] < 7000 * 16, f"{peaks} bytes: a step may take a few bytes, not its line"


def test_outlier_survives_in_a_column() -> None:
    curve = Curve(Span(0, 100_000))
    for step in range(100_000):
        curve.add(step, 9.0 if step == 54_321 else 1.0)
    columns = curve.columns()
    assert len(columns) == COLUMNS
    assert max(column.high for column in columns) == 9.0
    assert sum(column.num for column in columns) == 100_000
    assert curve.last() == 1.0


def test_smoothed_curve_begins_with_the_first_value() -> None:
    columns = [Column(x, 5.0, 5.0, 5.0, 1) for x in range(50)]
    assert smoothed(columns) == [(x, pytest.approx(5.0)) for x in range(50)]


def test_lines_backwards_are_the_lines_reversed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"n": {n}, "pad": "{"x" * (n * 7919 % 50_000)}"}}\n'.encode() for n in range(200)]
    path.write_bytes(b"".join(lines) + b'{"cut": ')
    assert list(read_backwards(path, 1 << 30)) == lines[::-1]
    few = list(read_backwards(path, 1 << 20))
    assert few == lines[::-1][: len(few)]
    assert 0 < len(few) < 200
    assert list(read_backwards(tmp_path / "nothing", 10)) == []


def test_numbers_of_lines_are_finite() -> None:
    assert [number(value) for value in (1, 2.5, True, "1", None, math.nan, math.inf, 10**400)] == [
        *(1.0, 2.5),
        *[None] * 6,
    ]
    line = decode(b'{"a": NaN}\n')
    assert line is not None
    assert math.isnan(line["a"])
    assert evaluation_line(1, 0.5)["reward_mean"] == EVALUATION.read(evaluation_line(1, 0.5))
