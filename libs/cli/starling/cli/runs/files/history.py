"""History of a run: its attempts read as one, in two passes over their metrics.jsonl and in bounded memory.

The first pass finds which lines count and the range of steps and times; the second one fills curves of fixed size and
tables of limited length. Steps that were made again count once:

- within an attempt, the last line of a step is its line (a journal that lost its end, lines written again);
- an attempt replaces its predecessors from its own first step on: it began there, from a saved state or anew.

Seconds run from the first line of the oldest attempt that counts; the time between two attempts is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from starling.cli.run.attempt import Attempt, attempts_in
from starling.cli.runs.files.curves import Curve, Span
from starling.cli.runs.files.events import Events
from starling.cli.runs.files.lines import MAX_STEPS, read_heads, read_objects, step_of, time_of
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS, Metric
from starling.common.errors import ConfigError

NUM_ROWS: Final = 24
"""Steps of the table."""


@dataclass
class _Extent:
    """What the first pass finds of one attempt."""

    attempt: Attempt
    cut: int
    """Steps from here on are those of a newer attempt."""
    places: array[int] = field(default_factory=lambda: array("I"))
    """By step, one more than the number of its last line; 0 where there is none."""
    first_step: int = MAX_STEPS
    last_step: int = -1
    first_time: float | None = None
    last_time: float | None = None
    """Of the last step that counts, or of the last line of the newest attempt."""
    num_steps: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first line to the last one that counts."""
        if self.first_time is None or self.last_time is None:
            return 0.0
        return max(0.0, self.last_time - self.first_time)

    def is_line_of(self, step: int, number: int) -> bool:
        """Return whether the line with this number is the one of the step."""
        return step < self.cut and step < len(self.places) and self.places[step] == number + 1


@dataclass
class MetricCurves:
    """One metric over steps (or versions) and over seconds."""

    by_step: Curve
    by_second: Curve


@dataclass
class History:
    """What the files of a run say, in bounded memory."""

    folder: Path
    attempts: list[Attempt]
    """Those that count, oldest first."""
    steps: Span
    seconds: Span
    num_steps: int
    newest_step: int
    """-1 without a step."""
    begun: float | None
    """Seconds since 1970."""
    curves: dict[Metric, MetricCurves]
    rows: list[dict[str, Any]]
    """Lines of about `NUM_ROWS` steps, evenly spaced."""
    events: Events

    @property
    def newest(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def name(self) -> str:
        """The run's name; with the attempt, where only that was given."""
        newest = self.newest.folder
        return newest.parent.name if self.folder != newest else f"{newest.parent.name}/{newest.name}"


def read_history(folder: Path) -> History:
    """Read the run in `folder`, or the attempt in it alone. Raises ConfigError when there is none."""
    newest = Attempt.find(folder)
    folder = folder.absolute()
    found = [newest]
    if newest.folder != folder:
        order = sorted(attempts_in(folder), key=lambda path: int(path.name.removeprefix("attempt-")))
        found = [Attempt(path) for path in order if path.is_dir()]
    return _read(folder, _extents(found))


def _extents(attempts: Sequence[Attempt]) -> list[_Extent]:
    """Return the extents of the attempts that count, oldest first."""
    cut, extents = MAX_STEPS, list[_Extent]()
    for attempt in reversed(attempts):
        extent = _survey(attempt, cut)
        cut = min(cut, extent.first_step)
        if extent.num_steps or not extents:
            extents.append(extent)
    return extents[::-1]


def _survey(attempt: Attempt, cut: int) -> _Extent:
    extent = _Extent(attempt, cut)
    places, newest_time = extent.places, None
    for number, head in read_heads(attempt.metrics):
        time = time_of(head.time)
        if time is not None:
            newest_time = time
            extent.first_time = time if extent.first_time is None else extent.first_time
        step = step_of(head.step) if head.kind == "step" else None
        if step is None:
            continue
        extent.first_step = min(extent.first_step, step)
        if step >= cut:
            continue
        if step >= len(places):
            places.extend([0] * (step + 1 - len(places)))
        extent.num_steps += places[step] == 0
        places[step] = number + 1
        extent.last_step = max(extent.last_step, step)
        extent.last_time = time if time is not None else extent.last_time
    if cut == MAX_STEPS:
        extent.last_time = newest_time
    return extent


def _read(folder: Path, extents: list[_Extent]) -> History:
    steps = [extent for extent in extents if extent.num_steps]
    first = min((extent.first_step for extent in steps), default=0)
    newest_step = max((extent.last_step for extent in steps), default=-1)
    history = History(
        folder=folder,
        attempts=[extent.attempt for extent in extents],
        steps=Span(min(first, max(newest_step, 0)), max(newest_step, 0)),
        seconds=Span(0.0, sum(extent.duration_s for extent in extents)),
        num_steps=sum(extent.num_steps for extent in extents),
        newest_step=newest_step,
        begun=next((extent.first_time for extent in extents if extent.first_time is not None), None),
        curves={},
        rows=[],
        events=Events(),
    )
    wanted = _wanted(extents)
    before_s = 0.0
    for extent in extents:
        _read_attempt(history, extent, wanted, before_s)
        before_s += extent.duration_s
    history.rows.sort(key=lambda line: int(line["step"]))
    return history


def _wanted(extents: list[_Extent]) -> frozenset[int]:
    """Return the steps of the table: the first, the last, and those evenly between them."""
    total = sum(extent.num_steps for extent in extents)
    if not total:
        return frozenset()
    ranks = {round(i * (total - 1) / (NUM_ROWS - 1)) for i in range(NUM_ROWS)}
    wanted, rank = set(), 0
    for extent in extents:
        for step, place in enumerate(extent.places):
            if place:
                if rank in ranks:
                    wanted.add(step)
                rank += 1
    return frozenset(wanted)


def _read_attempt(history: History, extent: _Extent, wanted: frozenset[int], before_s: float) -> None:
    begun = extent.first_time
    for number, line in read_objects(extent.attempt.metrics):
        time = time_of(line.get("time"))
        seconds = None if time is None or begun is None else before_s + max(0.0, time - begun)
        kind = line.get("kind")
        if kind == "step":
            step = step_of(line.get("step"))
            if step is None or not extent.is_line_of(step, number):
                history.events.num_replaced += 1
                continue
            for plot in STEP_PLOTS:
                _add(history, plot.metrics, line, step, seconds)
            if step in wanted:
                history.rows.append(line)
        elif isinstance(kind, str):
            version = step_of(line.get("version")) if kind == "evaluation" else None
            if version is not None and version < extent.cut:
                _add(history, EVALUATION_PLOT.metrics, line, version, seconds)
            if kind != "evaluation" or version is None or version < extent.cut:
                history.events.add(kind, line, time)


def _add(history: History, metrics: Sequence[Metric], line: dict[str, Any], step: int, seconds: float | None) -> None:
    for metric in metrics:
        value = metric.read(line)
        if value is None:
            continue
        curves = history.curves.get(metric)
        if curves is None:
            curves = history.curves[metric] = MetricCurves(Curve(history.steps), Curve(history.seconds))
        curves.by_step.add(step, value)
        if seconds is not None:
            curves.by_second.add(seconds, value)


def check_different(folders: Sequence[Path]) -> None:
    """Raise ConfigError when a run is given twice."""
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ConfigError(f"{folder} is given twice; name different runs")
        seen.add(folder.resolve())
