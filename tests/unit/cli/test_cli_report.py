"""The report of a run: evaluations by task."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from starling.cli.report.statistics import MAX_POINTS, AlarmSpans, gather
from starling.cli.report.summary import report, task_table
from starling.cli.run.attempt import Attempt


def test_task_table_shows_the_last_evaluation() -> None:
    add = {"num_prompts": 3, "reward_mean": 0.5, "pass_at_1": 0.5, "pass_at_k": 0.75, "k": 2}
    spell = {"num_prompts": 1, "reward_mean": None, "pass_at_1": None, "pass_at_k": None, "k": 0}
    whole = {"version": 7, "reward_mean": 0.5, "pass_at_1": 0.5, "pass_at_k": 0.75, "k": 2}
    table = task_table({**whole, "tasks": {"add": add, "spell": spell}})
    assert table is not None
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table)
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in shown.get().splitlines()]
    assert ["task", "prompts", "reward_mean", "pass_at_1", "pass_at_2"] in lines
    assert ["add", "3", "0.500", "0.500", "0.750"] in lines
    assert ["spell", "1"] in lines


def test_task_table_without_answers_has_no_pass_rate() -> None:
    none = {"num_prompts": 1, "reward_mean": None, "pass_at_k": None, "k": 0}
    table = task_table({"version": 0, **none, "tasks": {"add": none}})
    assert table is not None
    assert [column.header for column in table.columns] == ["task", "prompts", "reward_mean"]


def alarm_rows(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    spans = AlarmSpans()
    for line in lines:
        spans.add(line)
    return spans.rows()


def test_alarm_rows_group_alarms_by_kind() -> None:
    """Rows have the steps, the first value and the sentence of each alarm, and mark alarms that are over."""
    clip = {"kind": "alarm", "name": "clip", "value": 0.7, "bound": 0.5, "text": "most tokens are clipped"}
    lines = [
        {**clip, "step": 3},
        {"kind": "alarm_over", "name": "clip", "step": 6},
        {**clip, "step": 8, "value": 0.9},
        {"kind": "alarm", "step": 9, "name": "not_finite", "value": float("nan"), "bound": 0.0, "text": "skipped"},
    ]
    assert alarm_rows(lines) == [
        ("alarm clip", "steps 3 to 5, since step 8; 0.7 against a bound of 0.5: most tokens are clipped"),
        ("alarm not_finite", "since step 9; nan against a bound of 0: skipped"),
    ]
    again = [{**clip, "step": step} for step in range(1, 7)]
    assert "since step 3, and 3 times more; " in alarm_rows(again)[0][1]
    assert alarm_rows([]) == []


def test_task_table_is_none_without_tasks() -> None:
    assert task_table({}) is None
    assert task_table({"version": 3, "reward_mean": 0.1, "k": 1}) is None


def lines_of(num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run with two supervised steps and one adoption of each version, whose reward rises."""
    yield {"kind": "joined", "replica": "rollout-0"}
    for step in range(1, num_steps + 3):
        if step <= 2:
            yield {"kind": "step", "step": step, "loss": 1.0}
            continue
        done = (step - 3) / num_steps
        judged = {"eval_score/judge": 1.0 - done} if step % 2 else {}
        stale = {"staleness_mean": 0.5, "staleness_max": step % 3}
        yield {"kind": "step", "step": step, "reward_mean": done, **stale, **judged}
        adopted = {"pull_s": done, "pause_s": 0.001, "attested": step % 2 == 0, "transport": "ucx"}
        yield {"kind": "adopted", "version": step, **adopted, "padding": "x" * 300}
        if step % 100 == 0:
            yield {"kind": "evaluation", "version": step, "reward_mean": done, "k": 1}
    yield {"kind": "checkpoint", "step": num_steps + 2, "path": "/run/step-9"}


@pytest.mark.parametrize("num", [300, 20_000])
def test_statistics_of_short_and_long_runs(num: int) -> None:
    run = gather(lines_of(num))
    assert (run.num_steps, run.num_rl_steps) == (num + 2, num)
    assert (run.staleness_sum, run.staleness_max) == (num / 2, 2)
    assert (run.adoptions.num, run.adoptions.num_attested) == (num, num // 2)
    assert abs(run.adoptions.pull_s.median() - 0.5) < 0.03
    points = run.rewards.points()
    assert len(points) == num if num <= MAX_POINTS else MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    assert all(abs(y - (x - 3) / num) < 1e-9 for x, y in points), "a point is the mean of steps that follow each other"
    assert run.last_evaluation["version"] == num // 100 * 100
    assert run.checkpoints == ["/run/step-9"]


def test_report_shows_a_short_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(20)))
    console = Console(width=200)
    with console.capture() as shown:
        report(Attempt(tmp_path), 7.0, console)
    text = shown.get()
    for expected in (
        "22, 20 of them by reinforcement",
        "0.025 -> 0.925 (first and last tenth of the steps)",
        "evaluation score judge",
        "1.000 -> 0.100 (of the steps that have it)",
        "mean 0.50, most 2",
        "20 adoptions over ucx, 10 attested; median pull 500.0 ms, pause 1.0 ms",
        "/run/step-9",
    ):
        assert expected in text, text
    assert (tmp_path / "reward.png").exists()


MEASURE = """
import resource, sys
from pathlib import Path
from starling.cli.report.statistics import gather
from starling.cli.run.attempt import iter_metrics

peak_kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak_kib()
run = gather(iter_metrics(Path(sys.argv[1])))
print(run.num_steps, peak_kib() - before)
"""


def test_report_needs_bounded_memory(tmp_path: Path) -> None:
    path, num = tmp_path / "metrics.jsonl", 40_000
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines_of(num))
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    num_steps, more_kib = map(int, done.stdout.split())
    assert num_steps == num + 2
    assert more_kib < 8 << 10, f"{path.stat().st_size >> 10} KiB were read"
