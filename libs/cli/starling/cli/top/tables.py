"""Rows of the tables: replicas, evaluations, events and completions, sorted and filtered. Their texts are hostile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starling.cli.runs.files.events import event_text
from starling.cli.runs.files.lines import number, text_of, time_of
from starling.cli.runs.pages.page import figure_text, moment
from starling.common.observe.terminal import one_line, printable
from starling.common.wire.telemetry import ReplicaView, RunSnapshot

MAX_CELL: Final = 160
"""Characters of a cell; the details of a row show all of it."""
MAX_DETAIL: Final = 100_000
OWN_GAUGES: Final = ("tokens_per_s",)
"""Gauges with a column of their own."""
EVALUATION_FIELDS: Final = ("version", "cause", "num_prompts", "num_failed", "reward_mean", "pass_at_k")
SAMPLE_FIELDS: Final = ("prompt", "completion")

Value = str | float | None


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    key: str
    """Different for each row of a table."""
    cells: tuple[Value, ...]
    detail: str = ""
    """Everything about it, in lines."""
    style: str = ""


@dataclass(frozen=True)
class Order:
    """By which column a table is sorted; -1 for the order in which things happened."""

    column: int = -1
    descending: bool = False


@dataclass(frozen=True)
class Table:
    """What one view lists."""

    columns: tuple[str, ...]
    numbers: frozenset[str]
    """Columns of numbers, which are aligned at the right."""
    rows: Sequence[Row]
    empty: str
    """What to say without any row."""

    def chosen(self, order: Order, needle: str) -> list[Row]:
        """Return the rows that contain the text `needle`, in this order."""
        wanted = needle.casefold()
        rows = [row for row in self.rows if not wanted or any(wanted in cell_text(c).casefold() for c in row.cells)]
        if 0 <= order.column < len(self.columns):
            rows.sort(key=lambda row: _rank(row.cells[order.column]), reverse=order.descending)
            rows.sort(key=lambda row: row.cells[order.column] in (None, ""))  # those without a value come last
        return rows


def cell_text(value: Value) -> str:
    """Return a value as the text of a cell, on one line."""
    if isinstance(value, str):
        text = one_line(value[: MAX_CELL + 1])
        return text if len(value) <= MAX_CELL else f"{text[:MAX_CELL]}…"
    return figure_text(value)


def replica_table(snapshot: RunSnapshot | None) -> Table:
    """Return the replicas: what they hold, do and measure."""
    columns = ("replica", "role", "version", "behind", "leases", "tokens/s", "pulls", "gauges")
    rows = [_replica_row(snapshot, replica) for replica in snapshot.replicas] if snapshot is not None else []
    numbers = frozenset({"version", "behind", "leases", "tokens/s"})
    return Table(columns, numbers, rows, "No replica has joined.")


def _replica_row(snapshot: RunSnapshot, replica: ReplicaView) -> Row:
    holds = replica.role in ("policy", "rollout") and replica.version >= 0
    version = float(replica.version) if holds else None
    behind = float(snapshot.version - replica.version) if holds else None
    pulls = pull_text(replica)
    others = {name: value for name, value in replica.gauges.items() if name not in OWN_GAUGES}
    gauges = ", ".join(f"{name} {figure_text(value)}" for name, value in sorted(others.items()))
    speed = replica.gauges.get("tokens_per_s")
    cells = (
        replica.name,
        replica.role,
        version,
        behind,
        float(replica.num_leases),
        speed if speed is not None and math.isfinite(speed) else None,
        pulls,
        gauges,
    )
    lines = [
        f"{replica.name}: {replica.role}",
        f"weight version  {replica.version}, {behind:.0f} behind" if holds and behind is not None else "",
        f"leases          {replica.num_leases}",
        f"pulls           {pulls}" if pulls else "",
        "",
        *(f"{name:<28} {figure_text(value)}" for name, value in sorted(replica.gauges.items())),
    ]
    shown = "\n".join(one_line(line) for n, line in enumerate(lines) if line or n == 4)
    return Row(replica.name, cells, shown, "yellow" if behind is not None and behind > 1 else "")


def pull_text(replica: ReplicaView) -> str:
    """Return which version a replica pulls, and how far it is; empty for none."""
    return "" if replica.progress is None else f"{replica.pulling}: {replica.progress}"


def evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """Return the evaluations, newest first."""
    columns = ("version", "cause", "prompts", "failed", "reward", "pass at k", "scores")
    rows = []
    for index, line in enumerate(evaluations):
        scores = [
            name for name in line if name.startswith(("score/", "eval_score/")) and number(line[name]) is not None
        ]
        text = ", ".join(f"{name.partition('/')[2]} {figure_text(number(line[name]))}" for name in scores)
        values = [text_of(line, n) if n == "cause" else number(line.get(n)) for n in EVALUATION_FIELDS]
        rows.append(Row(f"{index}", (*values, text), fields_text(line)))
    numbers = frozenset(columns) - {"cause", "scores"}
    return Table(columns, numbers, rows[::-1], "No evaluation yet.")


def event_table(events: Sequence[Mapping[str, Any]]) -> Table:
    """Return the events, newest first."""
    rows = [
        Row(
            f"{index} {line.get('time')}",
            (_clock(time_of(line.get("time"))), text_of(line, "kind", 40), event_text(line)),
            fields_text(line),
            "red" if line.get("kind") in ("alarm", "failed") else "",
        )
        for index, line in enumerate(events)
    ]
    return Table(("time", "event", "what"), frozenset(), rows[::-1], "No event yet.")


def sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Return sample completions, as given."""
    columns = ("step", "reward", "status", "tokens", "prompt", "completion")
    rows = []
    for index, line in enumerate(samples):
        cells = (
            number(line.get("step")),
            number(line.get("reward")),
            text_of(line, "status", 40),
            number(line.get("num_tokens")),
            text_of(line, "prompt", MAX_CELL),
            text_of(line, "completion", MAX_CELL),
        )
        others = {name: value for name, value in line.items() if name not in SAMPLE_FIELDS}
        texts = [f"{name}\n{printable(text_of(line, name, MAX_DETAIL))}" for name in SAMPLE_FIELDS]
        rows.append(Row(f"{index}", cells, "\n\n".join([*texts, fields_text(others)])))
    return Table(columns, frozenset({"step", "reward", "tokens"}), rows, "No sample completion yet.")


def fields_text(line: Mapping[str, Any]) -> str:
    """Return all fields of a line of a file, one on each line."""
    shown: dict[str, Callable[[Any], str]] = {"time": lambda value: moment(time_of(value))}
    return "\n".join(
        f"{one_line(name[:80]):<28} {one_line(shown[name](value) if name in shown else text_of(line, name, 2000))}"
        for name, value in line.items()
    )


def _clock(seconds: float | None) -> str:
    """Return the time of day; with the date, where it is another day."""
    text = moment(seconds)
    return text[11:] if text[:10] == moment(time.time())[:10] else text


def _rank(value: Value) -> tuple[int, float, str]:
    if isinstance(value, str):
        return 1, 0.0, value.casefold()
    return 0, value if value is not None and not math.isnan(value) else 0.0, ""
