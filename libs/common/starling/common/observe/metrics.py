"""Metrics in the text format of Prometheus: families, samples, histograms, and their text."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]
"""Values by the name of the sample and its labels. Once published, they are not changed."""

MAX_SERIES: Final = 512
"""Series of one metric whose labels come from replicas and scorers. Prometheus keeps each for weeks."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SAMPLES_OF: Final = {"summary": 2, "histogram": 32}
"""Samples of one series, at most; others have one."""
SUFFIXES: Final = ("_bucket", "_sum", "_count")
"""Of the samples of a summary or a histogram."""


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    kind: str
    """gauge, counter, summary (a sum and a count), or histogram."""
    text: str
    labels: tuple[str, ...] = ()


class Histogram:
    """Durations in buckets. Its methods belong to one thread.

    Args:
        name: of the metric.
        bounds: upper bounds of the buckets, in seconds, ascending; there is one more without a bound.
        labels: of all of its samples.
    """

    def __init__(self, name: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        self._name, self._bounds, self._labels = name, tuple(bounds), labels
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, num: int = 1) -> None:
        """Add a duration, `num` times."""
        self._counts[bisect.bisect_left(self._bounds, seconds)] += num
        self._sum += seconds * num

    def samples(self) -> Samples:
        """Return the samples: the counts of all buckets are cumulative."""
        found: Samples = {}
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            found[f"{self._name}_bucket", (*self._labels, ("le", _number(bound)))] = total
        found[f"{self._name}_sum", self._labels] = self._sum
        found[f"{self._name}_count", self._labels] = total
        return found


def render(families: Iterable[Family], samples: Mapping[tuple[str, Labels], float]) -> str:
    """Return all families as text, those without a sample too. Samples of other families are left out."""
    known = {family.name: family for family in families}
    lines: dict[str, list[str]] = {name: [] for name in known}
    limits = {name: MAX_SERIES * SAMPLES_OF.get(family.kind, 1) for name, family in known.items()}
    for (name, labels), value in samples.items():
        family = name if name in known else _without_suffix(name)
        if family in lines and len(lines[family]) < limits[family]:
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines[family].append(f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}")
    return "\n".join(_texts(known.values(), lines)) + "\n"


def table(families: Iterable[Family]) -> str:
    """Return the families as a Markdown table, for the reference."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(rows)


def _texts(families: Iterable[Family], lines: Mapping[str, list[str]]) -> Iterator[str]:
    for family in families:
        yield f"# HELP {family.name} {_escaped(family.text)}"
        yield f"# TYPE {family.name} {family.kind}"
        yield from lines[family.name]


def _without_suffix(name: str) -> str:
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.endswith(suffix)), name)


def _number(value: float) -> str:
    """Return a number as Prometheus reads it."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
