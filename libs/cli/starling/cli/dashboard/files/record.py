"""Record of a run as metrics.jsonl tells it, line by line and in bounded memory: series, events, publications."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from starling.cli.dashboard.files.series import Series
from starling.cli.runs.files.events import FAILURES, LISTED, Events
from starling.cli.runs.files.lines import MAX_MAGNITUDE, number, step_of, text_of, time_of
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS, Plot

MAX_NAMES: Final = 400
"""Fields of steps, and of evaluations, that have a series."""
MAX_EVENTS: Final = 1000
MAX_PUBLICATIONS: Final = 60
MAX_ADOPTIONS: Final = 256
"""Of one publication."""
MAX_FIELDS: Final = 12
"""Fields of an event that are shown."""
EVENT_KINDS: Final = LISTED | FAILURES | {"joined", "left", "evaluation", "state", "devices_switched"}
STALENESS: Final = "staleness/"
MAX_STALENESS: Final = 16
"""`staleness/16` has all older tokens."""
OWN_SERIES: Final = frozenset(
    {"step", "time", "version"} | {metric.title for plot in (*STEP_PLOTS, EVALUATION_PLOT) for metric in plot.metrics}
)
"""Fields that have no series of their own: the axis, and those whose name is that of a plotted metric."""


class Publication(msgspec.Struct):
    """One version on offer, and the replicas that adopted it."""

    version: int
    time: float
    publish_s: float | None
    offer_s: float | None
    adoptions: list[dict[str, Any]] = []
    num_adopted: int = 0


class RunRecord:
    """All lines of one metrics.jsonl that were read so far."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        """By field of the lines `step`, and by title of the metrics that are plotted."""
        self.evaluations: dict[str, Series] = {}
        """Likewise of the lines `evaluation`, by version."""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.publications: deque[Publication] = deque(maxlen=MAX_PUBLICATIONS)
        self.summary = Events()
        self.begun: float | None = None
        self.newest_time: float | None = None
        self.first_step = self.newest_step = -1
        self.last_step: dict[str, Any] = {}
        """Fields of the newest line `step`."""
        self._newest_staleness: tuple[int, dict[int, float]] = (-1, {})
        """Of the newest step that trained sampled tokens: the step, and their shares by age."""
        self.num_events = self.num_steps = self.num_evaluations = self.num_published = 0
        self.num_lines_changed = 0
        """Rises with each line about weights."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the fields of a line, which may have any names and types."""
        kind, time = line.get("kind"), time_of(line.get("time"))
        if not isinstance(kind, str):
            return
        if time is not None:
            self.begun = time if self.begun is None else self.begun
            self.newest_time = time
        seconds = max(0.0, time - self.begun) if time is not None and self.begun is not None else 0.0
        if kind == "step":
            self._add_step(line, seconds)
            return
        if kind == "evaluation":
            self._add_evaluation(line, seconds)
        elif kind == "published":
            self._add_publication(line, time)
        elif kind == "adopted":
            self._add_adoption(line, time)
        self.summary.add(kind, line, time)
        if kind in EVENT_KINDS:
            self.num_events += 1
            self.events.append({"number": self.num_events, "kind": kind[:40], "time": time, "text": _described(line)})

    def staleness(self, begin: float, end: float, num: int) -> dict[str, Any]:
        """Return the shares of trained tokens by their age: of the newest step, and of `num` columns of steps."""
        found = {}
        for age in range(MAX_STALENESS + 1):
            series = self.series.get(f"{STALENESS}{age}")
            if series is not None:
                columns = series.columns(begin, end, num, by_seconds=False)
                found[age] = [(x, mean) for x, _, mean, _ in columns]
        step, shares = self._newest_staleness
        return {"columns": found, "newest": shares, "step": step}

    def _add_step(self, line: Mapping[str, Any], seconds: float) -> None:
        step = step_of(line.get("step"))
        if step is None:
            return
        self.first_step = step if self.first_step < 0 else min(step, self.first_step)
        self.num_steps += 1
        self.newest_step, self.last_step = step, dict(line)
        ages = ((age, number(line.get(f"{STALENESS}{age}"))) for age in range(MAX_STALENESS + 1))
        shares = {age: share for age, share in ages if share is not None}
        if shares:
            self._newest_staleness = (step, shares)
        _add_all(self.series, line, step, seconds, STEP_PLOTS)

    def _add_evaluation(self, line: Mapping[str, Any], seconds: float) -> None:
        version = step_of(line.get("version"))
        if version is None:
            return
        self.num_evaluations += 1
        _add_all(self.evaluations, line, version, seconds, (EVALUATION_PLOT,))

    def _add_publication(self, line: Mapping[str, Any], time: float | None) -> None:
        version = step_of(line.get("version"))
        if version is None or time is None:
            return
        self.num_published += 1
        self.num_lines_changed += 1
        found = Publication(version, time, number(line.get("publish_s")), number(line.get("offer_s")), [])
        self.publications.append(found)

    def _add_adoption(self, line: Mapping[str, Any], time: float | None) -> None:
        version = step_of(line.get("version"))
        publication = next((one for one in reversed(self.publications) if one.version == version), None)
        if publication is None or time is None:
            return
        self.num_lines_changed += 1
        publication.num_adopted += 1
        if len(publication.adoptions) < MAX_ADOPTIONS:
            publication.adoptions.append(
                {
                    "replica": text_of(line, "replica", 80),
                    "after_s": max(0.0, time - publication.time),
                    "pull_s": number(line.get("pull_s")) or 0.0,
                    "pause_s": number(line.get("pause_s")) or 0.0,
                    "size_bytes": number(line.get("size_bytes")),
                    "sent_bytes": number(line.get("sent_bytes")),
                    "transport": text_of(line, "transport", 40),
                    "source": text_of(line, "source", 80),
                    "attested": line.get("attested") is True,
                }
            )


def _add_all(
    table: dict[str, Series], line: Mapping[str, Any], step: int, seconds: float, plots: tuple[Plot, ...]
) -> None:
    for plot in plots:
        for metric in plot.metrics:
            value = metric.read(line)
            if value is not None:
                _series(table, metric.title).add(step, seconds, value)
    for name, value in line.items():
        # Not a number that is none, or too large: also an int may be.
        if name not in OWN_SERIES and (type(value) is float or type(value) is int) and abs(value) < MAX_MAGNITUDE:
            series = table.get(name) or (_series(table, name) if len(table) < MAX_NAMES else None)
            if series is not None:
                series.add(step, seconds, float(value))


def _series(table: dict[str, Series], name: str) -> Series:
    found = table.get(name)
    if found is None:
        found = table[name] = Series()
    return found


def _described(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an event as texts."""
    names = [name for name in line if name not in ("kind", "time", "tasks")][:MAX_FIELDS]
    return {name[:60]: text_of(line, name, 400) for name in names}
