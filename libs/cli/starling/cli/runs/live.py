"""A run as it goes on: its controller's newest snapshot, and what its files gain, in bounded memory.

The telemetry (`runs.feed`) says how the run is now, the files what has happened. Each works without the other: a run
that is over has files only, and a run on another machine telemetry only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from starling.cli.run.attempt import Attempt
from starling.cli.runs.feed import ControllerFeed, Telemetry
from starling.cli.runs.files.lines import decode, read_backwards, step_of, time_of
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS, Metric
from starling.cli.runs.files.state import RunState, state_of
from starling.common.errors import ConfigError
from starling.common.files import read_lines
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.shell.outputs.samples import SAMPLES

MAX_POINTS: Final = 512
"""Points of a curve."""
MAX_EVENTS: Final = 500
MAX_EVALUATIONS: Final = 200
MAX_SAMPLES: Final = 100
MAX_BACK_BYTES: Final = 64 << 20
"""Bytes of metrics.jsonl, from its end, that are read at first."""
SAMPLE_BYTES: Final = 4 << 20
"""Bytes of samples.jsonl, from its end, in which the newest samples are looked for."""
QUIET: Final = frozenset(
    {"step", "trained", "step_repeated", "answered", "published", "adopted", "offered", "state", "filtered"}
)
"""Kinds of lines that come with every step: they are no events."""
SILENT_S: Final = 3.0
"""Time without a snapshot from which on the controller counts as silent: it publishes several times a second."""
STATE_EVERY_S: Final = 5.0
"""How often a silent run is looked at: whether it is over."""


class GrowingCurve:
    """Points of growing x in bounded memory: from `MAX_POINTS` points on, pairs of neighbours become their means."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._per_point = 1
        self._x = self._y = 0.0
        self._num = 0
        self.newest: float | None = None
        """The last value."""
        self.newest_x = float("-inf")

    def add(self, x: float, y: float) -> None:
        """Add a point of finite numbers, to the right of all others."""
        self.newest, self.newest_x = y, x
        self._num += 1
        self._x += (x - self._x) / self._num
        self._y += (y - self._y) / self._num
        if self._num < self._per_point:
            return
        self._points.append((self._x, self._y))
        self._x, self._y, self._num = 0.0, 0.0, 0
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in pairs]
            self._per_point *= 2

    def points(self) -> list[tuple[float, float]]:
        """Return the points, from left to right."""
        return [*self._points, (self._x, self._y)] if self._num else list(self._points)


class MetricsTail:
    """Curves, evaluations and events of a metrics.jsonl that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._offset = -1
        self.curves: dict[Metric, GrowingCurve] = {}
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=MAX_EVALUATIONS)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.step: dict[str, Any] = {}
        """The newest line of a step."""
        self.newest: float | None = None
        """Time of the newest line, in seconds since 1970."""

    def read(self) -> bool:
        """Read the lines that the file has gained; return whether there are any. Raises ConfigError, as `read_lines`.

        A file that is shorter than before is read anew.
        """
        try:
            size = self._path.stat().st_size
        except OSError:
            size = 0
        if size < self._offset:
            self._begin_anew()
        if self._offset < 0:
            self._offset = max(0, size - MAX_BACK_BYTES)
        if size <= self._offset:
            return False
        for text in read_lines(self._path, self._offset):
            if not text.endswith(b"\n"):
                break  # it is being written
            self._offset += len(text)
            line = decode(text)
            if line is not None and isinstance(line.get("kind"), str):
                self._add(line["kind"], line)
        return True

    def _add(self, kind: str, line: dict[str, Any]) -> None:
        self.newest = time_of(line.get("time")) or self.newest
        if kind == "step" and (step := step_of(line.get("step"))) is not None:
            self.step = line
            for plot in STEP_PLOTS:
                self._add_points(plot.metrics, step, line)
        elif kind == "evaluation" and (version := step_of(line.get("version"))) is not None:
            self.evaluations.append(line)
            self._add_points(EVALUATION_PLOT.metrics, version, line)
        if kind not in QUIET:
            self.events.append(line)

    def _add_points(self, metrics: tuple[Metric, ...], x: int, line: dict[str, Any]) -> None:
        for metric in metrics:
            value = metric.read(line)
            if value is None:
                continue
            curve = self.curves.setdefault(metric, GrowingCurve())
            if x > curve.newest_x:  # a step that is made again after a crash is the same step
                curve.add(x, value)


class LiveRun:
    """A run that is followed. One thread calls `poll` and `close`; the other methods are for any thread."""

    def __init__(self, attempt: Attempt | None, telemetry: Telemetry | None = None) -> None:
        """Follow the run in the folder of `attempt`, or the one that publishes at `telemetry`, or both."""
        self.attempt = attempt
        self._feed = ControllerFeed(telemetry)
        self._tail = MetricsTail(attempt.metrics) if attempt is not None else None
        self._lock = threading.Lock()
        self._begun_at, self._state_at = time.monotonic(), float("-inf")
        self._state: RunState | None = None
        self._problem = ""

    # --- the thread that follows the run ---------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a snapshot, and read the files; return whether anything is new."""
        before = self._feed.heard
        self._feed.follow(self.attempt)
        changed = self._feed.receive(timeout_s)
        if self._feed.heard is not before:
            self._state, self._problem = None, ""
        if self._tail is not None:
            try:
                with self._lock:
                    changed |= self._tail.read()
            except ConfigError as error:
                self._problem = str(error)
        return self._look_for_the_end() or changed

    def close(self) -> None:
        """End the subscription."""
        self._feed.close()

    def _look_for_the_end(self) -> bool:
        """Look at the files of a silent run: it may be over."""
        now = time.monotonic()
        if self.attempt is None or self.silent_s() < SILENT_S or now < self._state_at:
            return False
        self._state_at = now + STATE_EVERY_S
        self._state = state_of(self.attempt)
        return True

    # --- any thread ------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> RunSnapshot | None:
        """The newest snapshot; None before the first."""
        heard = self._feed.heard
        return heard.snapshot if heard is not None else None

    @property
    def state(self) -> RunState | None:
        """Of a silent run: whether it runs still, and how it ended; None while the controller publishes."""
        return self._state

    @property
    def problem(self) -> str:
        """Why there is no snapshot, or no line of a file, as far as is known."""
        return self._feed.problem or self._problem

    def silent_s(self) -> float:
        """Return the seconds since the last snapshot, or since this run is followed."""
        heard = self._feed.heard
        return time.monotonic() - max(heard.at if heard is not None else self._begun_at, self._begun_at)

    def curve(self, metric: Metric) -> list[tuple[float, float]]:
        """Return the points of a metric over steps, or versions."""
        with self._lock:
            curve = self._tail.curves.get(metric) if self._tail is not None else None
            return curve.points() if curve is not None else []

    def newest_step(self) -> dict[str, Any]:
        """Return the newest line of a step in metrics.jsonl; empty where there is none."""
        return self._tail.step if self._tail is not None else {}

    def newest_time(self) -> float | None:
        """Return the time of the newest line of metrics.jsonl, in seconds since 1970."""
        return self._tail.newest if self._tail is not None else None

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the last evaluations, oldest first."""
        with self._lock:
            found = list(self._tail.evaluations) if self._tail is not None else []
        snapshot = self.snapshot
        return found or [dict(one) for one in (snapshot.evaluations if snapshot is not None else ())]

    def events(self) -> list[dict[str, Any]]:
        """Return the last events, oldest first."""
        with self._lock:
            return list(self._tail.events) if self._tail is not None else []

    def samples(self) -> list[dict[str, Any]]:
        """Return the newest sample completions, newest first; reads the file. Raises ConfigError."""
        if self.attempt is None:
            return []
        found = []
        for text in read_backwards(self.attempt.folder / SAMPLES, SAMPLE_BYTES):
            line = decode(text)
            if line is not None:
                found.append(line)
            if len(found) == MAX_SAMPLES:
                break
        return found
