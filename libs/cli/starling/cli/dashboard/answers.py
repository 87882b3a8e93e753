"""Answers to the page: what it asks about one run, from what the run's watch has read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from starling.cli.dashboard.files.samples import Filter, Order, tokens_of
from starling.cli.dashboard.files.series import Series
from starling.cli.dashboard.watch import RunWatch, Sources
from starling.cli.runs.files.metrics import EVALUATION_PLOT, STEP_PLOTS, Plot
from starling.cli.runs.files.settings import changed_settings, differing_settings, settings_of
from starling.common.errors import ConfigError, StarlingError

MAX_COLUMNS: Final = 1200
MAX_NAMES: Final = 48
"""Series in one answer."""
MAX_TEXT: Final = 200
END: Final = 1e12


class BadQueryError(ValueError):
    """A parameter of the request cannot be used; one sentence."""


class NothingYetError(StarlingError):
    """The run has no files yet."""


class Query:
    """Parameters of a request, checked."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters

    def number(self, name: str, default: float, low: float = -END, high: float = END) -> float:
        """Return a finite number, limited to a range. Raises BadQueryError."""
        text = self._parameters.get(name)
        if text is None or text == "":
            return default
        try:
            value = float(text[:MAX_TEXT])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadQueryError(f"{name}={text[:40]!r} is no number")
        return min(high, max(low, value))

    def optional(self, name: str) -> float | None:
        """Return a number, None where it is not given. Raises BadQueryError."""
        return self.number(name, 0.0) if self._parameters.get(name) else None

    def text(self, name: str, default: str = "") -> str:
        """Return a short text."""
        return self._parameters.get(name, default)[:MAX_TEXT]

    def names(self, name: str) -> list[str]:
        """Return the names in a JSON array. Raises BadQueryError."""
        try:
            return msgspec.json.decode(self._parameters.get(name, "[]"), type=list[str])[:MAX_NAMES]
        except (msgspec.DecodeError, RecursionError):
            raise BadQueryError(f"{name} is no JSON array of names") from None


def plots() -> list[dict[str, Any]]:
    """Return the plots of the page, each with metrics of one unit."""
    return [_plot(plot, "step") for plot in STEP_PLOTS] + [_plot(EVALUATION_PLOT, "evaluation")]


def catalog(watch: RunWatch, query: Query) -> dict[str, list[str]]:
    """Return the names of all series of a run."""
    with watch.lock:
        record = _sources(watch).record
        return {"step": sorted(record.series), "evaluation": sorted(record.evaluations)}


def series(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return series of a run, each as x, minimum, mean and maximum of its columns."""
    num = int(query.number("columns", 480, 2, MAX_COLUMNS))
    begin, end = query.number("begin", -END), query.number("end", END)
    by_seconds = query.text("x") == "seconds"
    names = query.names("names")
    with watch.lock:
        record = _sources(watch).record
        table = record.evaluations if query.text("of") == "evaluation" else record.series
        found = {name: _columns(table[name], begin, end, num, by_seconds) for name in names if name in table}
    return {"series": found, "revision": record.num_steps + record.num_evaluations}


def staleness(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return the shares of trained tokens by age, of the newest step and over the steps."""
    num = int(query.number("columns", 120, 2, MAX_COLUMNS))
    with watch.lock:
        return _sources(watch).record.staleness(query.number("begin", -END), query.number("end", END), num)


def events(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return the newest events after the one with the number `after`, faults among them that are in no file, and
    failures by their reason."""
    after = query.number("after", 0)
    with watch.lock:
        record = _sources(watch).record
        unwritten = watch.notices.besides(record.events)
        newest = [event for event in record.events if event["number"] > after]
        if unwritten:
            newest = sorted([*newest, *unwritten], key=lambda event: event["time"] or 0.0)
        failures = [
            {"kind": kind, "status": status, "reason": reason, "num": each.num, "first": each.first, "last": each.last}
            for (kind, status, reason), each in record.summary.failures.items()
        ]
    return {"events": newest, "num": record.num_events, "failures": failures}


def weights(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return the newest publications with their adoptions, oldest first."""
    num = int(query.number("num", 24, 1, 60))
    with watch.lock:
        record = _sources(watch).record
        shown = [msgspec.to_builtins(one) for one in list(record.publications)[-num:]]
        slowest = [
            {"pull_s": pull_s, "version": version, "replica": replica, "pause_s": pause_s}
            for pull_s, _, version, replica, pause_s in sorted(record.summary.slowest, reverse=True)
        ]
    return {"publications": shown, "num": record.num_published, "slowest": slowest}


def replicas(watch: RunWatch, query: Query) -> list[dict[str, Any]]:
    """Return what the run's files say of each replica that ever joined."""
    with watch.lock:
        rows = _sources(watch).record.summary.replicas
        return [
            {
                "name": name,
                "role": row.role,
                "host": row.host,
                "joined": row.num_joined,
                "left": row.num_left,
                "lost": row.num_lost,
                "first_joined": row.first_joined,
                "last_reason": row.last_reason,
                "adopted": row.num_adopted,
                "transport": row.transport,
                "pull_max_s": row.pull_max_s,
            }
            for name, row in rows.items()
        ]


def completions(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return a page of sample completions."""
    order = query.text("order", "newest")
    if order not in get_args(Order):
        raise BadQueryError(f"order={order!r} is none of {', '.join(get_args(Order))}")
    wanted = Filter(
        first_step=int(query.number("first_step", 0, 0, 1 << 23)),
        last_step=int(query.number("last_step", 1 << 23, 0, 1 << 23)),
        min_reward=query.optional("min_reward"),
        max_reward=query.optional("max_reward"),
        text=query.text("text"),
    )
    skip, num = int(query.number("skip", 0, 0, 1e9)), int(query.number("num", 12, 1, 50))
    with watch.lock:
        index = _sources(watch).samples
        found, total = index.page(wanted, order, skip, num)  # type: ignore[arg-type]
        return {"completions": found, "num": total, "revision": index.num_read}


def tokens(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return the tokens of one completion: texts, log-probabilities and versions. Raises NothingYetError."""
    from starling.cli.dashboard.files.tokens import pieces

    attempt = watch.attempt
    line = _line(watch, query)
    found = tokens_of(line)
    if found is None or attempt is None:
        raise NothingYetError("this completion was stored without its tokens")
    ids, logprobs, versions = found
    return {"ids": ids, "texts": pieces(attempt, ids), "logprobs": logprobs, "versions": versions}


def media_uri(watch: RunWatch, query: Query) -> str:
    """Return the address of one image or video of a completion's prompt. Raises NothingYetError."""
    media = _line(watch, query).get("media")
    number = int(query.number("number", 0, 0, 1000))
    if not isinstance(media, list) or number >= len(media) or not isinstance(media[number], dict):
        raise NothingYetError("there is no such image or video")
    uri = media[number].get("uri")
    if not isinstance(uri, str):
        raise NothingYetError("there is no such image or video")
    return uri


def settings(watch: RunWatch, query: Query) -> dict[str, Any]:
    """Return the settings that are no defaults, and those that may change while the run lasts."""
    from starling.controller.core.training.dynamic_settings import DYNAMIC

    attempt = watch.attempt
    if attempt is None:
        raise NothingYetError(f"there is no run in {watch.folder}")
    values = settings_of(attempt)
    with watch.lock:
        newest = _sources(watch).record.last_step
    changed = [{"key": key, "value": value, "default": default} for key, value, default in changed_settings(attempt)]
    dynamic = [
        {
            "key": key,
            "range": setting.valid_range,
            "value": newest.get(f"set/{key}", values.get(key)),
        }
        for key, setting in DYNAMIC.items()
    ]
    return {"changed": changed, "dynamic": dynamic}


def compare(watches: Sequence[RunWatch]) -> dict[str, Any]:
    """Return the settings in which the runs differ."""
    found = []
    for watch in watches:
        attempt = watch.attempt
        try:
            found.append(settings_of(attempt) if attempt is not None else {})
        except ConfigError:
            found.append({})
    rows = differing_settings(found) if len(found) > 1 else []
    return {"names": [watch.name for watch in watches], "settings": rows[:500]}


def _sources(watch: RunWatch) -> Sources:
    if watch.sources is None:
        raise NothingYetError(f"there is no run in {watch.folder} yet")
    return watch.sources


def _line(watch: RunWatch, query: Query) -> dict[str, Any]:
    with watch.lock:
        line = _sources(watch).samples.line(int(query.number("key", 0, 0, END)))
    if line is None:
        raise NothingYetError("this completion is in the run's files no more")
    return line


def _columns(of: Series, begin: float, end: float, num: int, by_seconds: bool) -> list[list[float]]:
    columns = of.columns(begin, end, num, by_seconds=by_seconds)
    return [list(table) for table in zip(*columns, strict=True)] if columns else [[], [], [], []]


def _plot(plot: Plot, of: str) -> dict[str, Any]:
    return {"title": plot.title, "unit": plot.unit, "of": of, "metrics": [metric.title for metric in plot.metrics]}
