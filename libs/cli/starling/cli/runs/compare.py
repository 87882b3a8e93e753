"""`starling compare`: the settings in which runs differ, their last figures, and their curves beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from starling.cli.console import Console
from starling.cli.run.screen import duration, short_path
from starling.cli.runs.files.history import History, check_different, read_history
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS
from starling.cli.runs.files.settings import ABSENT, differing_settings, settings_of
from starling.cli.runs.files.state import state_of
from starling.cli.runs.pages.figures import compared_plots
from starling.cli.runs.pages.page import document, element, figure_text, legend, moment, section, table, write_page
from starling.common.errors import ConfigError

MAX_RUNS = 8
"""Runs of one comparison: there are as many colours that can be told apart."""

Rows = list[tuple[str, list[str]]]


def compare(folders: Sequence[Path], out: Path | None) -> None:
    """Print what differs between runs, and write the plots to `out`. Raises ConfigError."""
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs are given; name 2 to {MAX_RUNS} of them, such as runs/a runs/b")
    check_different(folders)
    histories = [read_history(folder) for folder in folders]
    names = distinct_names(histories)
    settings, figures = differing_settings([settings_of(one.newest) for one in histories]), last_figures(histories)
    if out is not None:
        write_page(out, page(histories, names, settings, figures))
    console = Console()
    console.print(_table("settings that differ", names, settings) if settings else "The runs have the same settings.")
    console.print(_table("last figures", names, figures))
    if out is not None:
        console.print(f"plots: {short_path(out.absolute())}")


def distinct_names(histories: Sequence[History]) -> list[str]:
    """Return the names of runs; with their folder, where several have the same."""
    names = [one.name for one in histories]
    return [
        name if names.count(name) == 1 else short_path(one.folder) for name, one in zip(names, histories, strict=True)
    ]


def last_figures(histories: Sequence[History]) -> Rows:
    """Return the last figures of each run: its state, and of each metric the mean of the last steps."""
    states = [state_of(one.newest) for one in histories]
    rows: Rows = [
        ("state", [state.name for state in states]),
        ("version", [str(one.newest_step) if one.newest_step >= 0 else ABSENT for one in histories]),
        ("started", [moment(one.begun)[:16] or ABSENT for one in histories]),
        ("duration", [duration(one.seconds.end) for one in histories]),
    ]
    for plot in (STEP_PLOTS[0], EVALUATION_PLOT, *STEP_PLOTS[1:]):
        for metric in plot.metrics:
            curves = [one.curves[metric].by_step if metric in one.curves else None for one in histories]
            values = [None if c is None else c.newest() if plot is EVALUATION_PLOT else c.last() for c in curves]
            if any(value is not None for value in values):
                title = f"{metric.title} ({plot.unit})" if plot.unit not in ("", metric.title) else metric.title
                rows.append((title, [figure_text(value) or ABSENT for value in values]))
    return rows


def page(histories: Sequence[History], names: Sequence[str], settings: Rows, figures: Rows) -> str:
    """Return the comparison as HTML."""
    title = f"Comparison of {len(names)} runs"
    places = "".join(
        element("p", f"{name}: {one.folder}", "dim small") for name, one in zip(names, histories, strict=True)
    )
    keys = legend([(name, number) for number, name in enumerate(names)])
    columns = ("figure", *names)
    parts = [
        f"<header>{element('h1', title)}{keys}{places}</header>",
        section(
            "Last figures", table(columns, [(key, *values) for key, values in figures], text=("figure",)), "figures"
        )
        + element("p", "Metrics are means over the last 5 steps; evaluations are the last ones.", "dim small"),
        section("Curves", compared_plots(histories, names), "curves"),
        section("Settings that differ", _settings(names, settings), "settings"),
    ]
    return document(title, "".join(parts))


def _settings(names: Sequence[str], settings: Rows) -> str:
    if not settings:
        return element("p", "The runs have the same settings.", "dim")
    columns = ("setting", *names)
    return table(columns, [(key, *values) for key, values in settings], text=columns)


def _table(title: str, names: Sequence[str], rows: Rows) -> Table:
    drawn = Table(title=title, title_justify="left", header_style="dim")
    drawn.add_column("", overflow="fold")
    for name in names:
        drawn.add_column(Text(name), justify="right", overflow="fold")
    for key, values in rows:
        drawn.add_row(Text(key), *map(Text, values))
    return drawn
