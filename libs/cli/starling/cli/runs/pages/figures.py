"""Plots of one run or of several beside each other, over steps and over seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from starling.cli.runs.files.history import History, MetricCurves
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS, Metric, Plot
from starling.cli.runs.pages.page import NUM_COLOURS, escape, legend
from starling.cli.runs.pages.svg import Series, plot

MINUTES_FROM_S: Final = 600.0
HOURS_FROM_S: Final = 4 * 3600.0


def run_plots(history: History) -> str:
    """Return the plots of one run over its steps: metrics with one unit share a plot."""
    figures = []
    for one in (STEP_PLOTS[0], EVALUATION_PLOT, *STEP_PLOTS[1:]):
        curves = [(m.title, history.curves[m]) for m in one.metrics if m in history.curves]
        label = "version" if one is EVALUATION_PLOT else "step"
        if curves:
            figures.append(_figure(one, one.title, curves, label, by_second=False))
    return f'<div class="plots">{"".join(figures)}</div>' if figures else '<p class="dim">There is no step yet.</p>'


def compared_plots(histories: Sequence[History], names: Sequence[str]) -> str:
    """Return the plots of runs: one metric in a row, over steps and over seconds."""
    figures = []
    for one in (STEP_PLOTS[0], EVALUATION_PLOT, *STEP_PLOTS[1:]):
        for metric in one.metrics:
            curves = _curves(metric, histories, names)
            if not any(curve.by_step.columns() for _, curve, _ in curves):
                continue
            title = metric.title[:1].upper() + metric.title[1:]
            label = "version" if one is EVALUATION_PLOT else "step"
            for by_second in (False, True):
                chosen = [(name, curve) for name, curve, _ in curves]
                colours = [colour for _, _, colour in curves]
                figures.append(_figure(one, title, chosen, label, by_second=by_second, colours=colours))
    return f'<div class="plots">{"".join(figures)}</div>' if figures else '<p class="dim">No run has a step yet.</p>'


def _curves(metric: Metric, histories: Sequence[History], names: Sequence[str]) -> list[tuple[str, MetricCurves, int]]:
    """Return name, curves and colour of the runs that have the metric: a run has one colour in all plots."""
    return [
        (name, history.curves[metric], number % NUM_COLOURS)
        for number, (history, name) in enumerate(zip(histories, names, strict=True))
        if metric in history.curves
    ]


def _figure(
    one: Plot,
    title: str,
    curves: Sequence[tuple[str, MetricCurves]],
    label: str,
    *,
    by_second: bool,
    colours: Sequence[int] | None = None,
) -> str:
    columns = [(curve.by_second if by_second else curve.by_step).columns() for _, curve in curves]
    if not any(columns):
        return ""
    if by_second:
        size, label = time_unit(max(column.x for each in columns for column in each))
        columns = [[column._replace(x=column.x / size) for column in each] for each in columns]
    names = [name for name, _ in curves]
    series = [
        Series(name, colour, each, smooth=one is not EVALUATION_PLOT)
        for name, colour, each in zip(names, colours or range(len(names)), columns, strict=True)
        if each
    ]
    keys = legend([(s.name, s.colour) for s in series]) if len(series) > 1 or colours is not None else ""
    drawn = plot(
        series,
        label,
        one.unit,
        described=described(title, label, series),
        x_begin=0.0 if by_second else math.inf,
        whole_x=not by_second,
    )
    return f"<figure><h3>{escape(title)}</h3>{keys}{drawn}</figure>"


def described(title: str, label: str, series: Sequence[Series]) -> str:
    """Return a plot in one sentence, for those who do not see it."""
    parts = ", ".join(f"{s.name} from {s.columns[0].mean:.4g} to {s.columns[-1].mean:.4g}" for s in series)
    return f"{title} over {label}: {parts}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit in which so many seconds are shown."""
    if seconds >= HOURS_FROM_S:
        return 3600.0, "hours"
    return (60.0, "minutes") if seconds >= MINUTES_FROM_S else (1.0, "seconds")
