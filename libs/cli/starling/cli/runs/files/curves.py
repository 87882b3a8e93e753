"""Curves of any length in bounded memory: minimum, maximum and mean per column of pixels."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

COLUMNS: Final = 480
"""Columns of a curve: a plot is not much wider in pixels."""
NUM_LAST: Final = 5
"""Values whose mean is the last figure of a curve: single steps are noisy."""


class Column(NamedTuple):
    """The points of a curve within one column."""

    x: float
    """Mean."""
    low: float
    mean: float
    high: float
    num: int


@dataclass(frozen=True)
class Span:
    """The range of x that a curve covers."""

    begin: float
    end: float

    def column(self, x: float) -> int:
        """Return the column of `x`; what is outside belongs to the first or the last one."""
        width = self.end - self.begin
        share = (x - self.begin) / width if width > 0 else 0.0
        return min(COLUMNS - 1, max(0, int(share * COLUMNS)))


class Curve:
    """Points in any order, as columns: a run of a million steps takes as much memory as one of a thousand."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._num = array("Q", bytes(8 * COLUMNS))
        self._x, self._y, self._low, self._high = (array("d", bytes(8 * COLUMNS)) for _ in range(4))
        self._last: deque[float] = deque(maxlen=NUM_LAST)

    def add(self, x: float, y: float) -> None:
        """Add a point of finite numbers."""
        at = self._span.column(x)
        first = self._num[at] == 0
        self._low[at] = y if first else min(self._low[at], y)
        self._high[at] = y if first else max(self._high[at], y)
        self._num[at] += 1
        # Running means: a sum of many large numbers may overflow.
        self._x[at] += (x - self._x[at]) / self._num[at]
        self._y[at] += (y - self._y[at]) / self._num[at]
        self._last.append(y)

    def columns(self) -> list[Column]:
        """Return the columns that have points, from left to right."""
        return [
            Column(self._x[at], self._low[at], self._y[at], self._high[at], self._num[at])
            for at in range(COLUMNS)
            if self._num[at]
        ]

    def last(self) -> float | None:
        """Return the mean of the last `NUM_LAST` values, None without any."""
        return sum(value / len(self._last) for value in self._last) if self._last else None

    def newest(self) -> float | None:
        """Return the last value, None without any."""
        return self._last[-1] if self._last else None


def smoothed(columns: list[Column]) -> list[tuple[float, float]]:
    """Return an exponential moving mean of the columns, without the bias of its beginning.

    Its window is about a thirtieth of the curve, and at least 4 columns.
    """
    keep = 1 - 2 / (max(4.0, len(columns) / 30) + 1)
    mean = weight = 0.0
    points = []
    for column in columns:
        mean = keep * mean + (1 - keep) * column.mean
        weight = keep * weight + (1 - keep)
        points.append((column.x, mean / weight))
    return points
