"""The report of a run: evaluations by task."""

from __future__ import annotations

from rich.console import Console

from starling.cli.report.summary import alarm_rows, task_table


def test_task_table_shows_the_last_evaluation() -> None:
    add = {"num_prompts": 3, "reward_mean": 0.5, "pass_at_1": 0.5, "pass_at_k": 0.75, "k": 2}
    spell = {"num_prompts": 1, "reward_mean": None, "pass_at_1": None, "pass_at_k": None, "k": 0}
    whole = {"version": 7, "reward_mean": 0.5, "pass_at_1": 0.5, "pass_at_k": 0.75, "k": 2}
    table = task_table([{"version": 0, "tasks": {}}, {**whole, "tasks": {"add": add, "spell": spell}}])
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
    table = task_table([{"version": 0, **none, "tasks": {"add": none}}])
    assert table is not None
    assert [column.header for column in table.columns] == ["task", "prompts", "reward_mean"]


def test_alarm_rows_group_alarms_by_kind() -> None:
    """Rows have the steps, the first value and the sentence of each alarm, and mark alarms that are over."""
    clip = {"kind": "alarm", "name": "clip", "value": 0.7, "bound": 0.5, "text": "most tokens are clipped"}
    lines = [
        {**clip, "step": 3},
        {"kind": "step", "step": 4},
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
    assert task_table([]) is None
    assert task_table([{"version": 3, "reward_mean": 0.1, "k": 1}]) is None
