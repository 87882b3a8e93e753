"""Metrics over steps of any number in bounded memory, as buckets with minimum, mean and maximum.

A bucket covers the same number of steps everywhere. When there are `CAPACITY` buckets, neighbours merge, so a run of a
million steps takes as much memory as one of four thousand, and each step costs the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, Final

CAPACITY: Final = 4096
"""Most buckets of a series: several for each pixel of a plot, so that a part of it can be enlarged."""


class Series:
    """One metric by step; a step that comes again replaces all from it on."""

    __slots__ = ("_keys", "_newest_step", "_num", "_steps", "_tables", "_width", "newest")

    def __init__(self) -> None:
        self._width = 1
        self._keys = array("q")
        """Number of each bucket, rising: its first step over `_width`."""
        self._num = array("q")
        self._steps, *self._tables = (array("d") for _ in range(5))
        """Mean step; mean time (s), minimum, mean and maximum of the values."""
        self._newest_step = -1
        self.newest: float | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, step: int, seconds: float, value: float) -> None:
        """Add the finite value of a step at a time in seconds."""
        key = step // self._width
        keys = self._keys
        if step <= self._newest_step:
            self._rewind(key)
        self.newest, self._newest_step = value, step
        if keys and keys[-1] == key:
            self._merge(len(keys) - 1, step, seconds, (value, value, value), 1)
            return
        keys.append(key)
        self._num.append(1)
        self._steps.append(step)
        for table, number in zip(self._tables, (seconds, value, value, value), strict=True):
            table.append(number)
        if len(keys) >= CAPACITY:
            self._halve()

    def columns(
        self, begin: float, end: float, num: int, *, by_seconds: bool
    ) -> list[tuple[float, float, float, float]]:
        """Return at most `num` columns of the range: mean x, minimum, mean and maximum.

        x are steps, or seconds. The buckets next to the range belong to it, so that a curve reaches its borders.
        """
        xs = self._tables[0] if by_seconds else self._steps
        first = max(0, bisect_left(xs, begin) - 1)
        last = min(len(xs), bisect_right(xs, end) + 1)
        _, lows, means, highs = self._tables
        if last - first <= num:
            return [(xs[at], lows[at], means[at], highs[at]) for at in range(first, last)]
        found = []
        count = last - first
        for column in range(num):
            at, to = first + column * count // num, first + (column + 1) * count // num
            weights = self._num[at:to]
            total = sum(weights)
            x = sum(w * v for w, v in zip(weights, xs[at:to], strict=True)) / total
            mean = sum(w * v for w, v in zip(weights, means[at:to], strict=True)) / total
            found.append((x, min(lows[at:to]), mean, max(highs[at:to])))
        return found

    def last(self, num: int) -> float | None:
        """Return the mean of the last `num` buckets, None without any."""
        means = self._tables[2][-num:]
        return sum(means) / len(means) if means else None

    def _merge(self, at: int, step: float, seconds: float, bounds: tuple[float, float, float], num: int) -> None:
        times, lows, means, highs = self._tables
        self._num[at] += num
        share = num / self._num[at]
        self._steps[at] += (step - self._steps[at]) * share
        times[at] += (seconds - times[at]) * share
        means[at] += (bounds[1] - means[at]) * share  # a sum of large numbers may overflow
        lows[at], highs[at] = min(lows[at], bounds[0]), max(highs[at], bounds[2])

    def _rewind(self, key: int) -> None:
        """Drop the buckets from number `key` on."""
        length = bisect_left(self._keys, key)
        tables: tuple[array[Any], ...] = (self._keys, self._num, self._steps, *self._tables)
        for table in tables:
            del table[length:]

    def _halve(self) -> None:
        self._width *= 2
        old: tuple[Any, ...] = (self._keys, self._num, self._steps, *self._tables)
        self._keys, self._num = array("q"), array("q")
        self._steps, *self._tables = (array("d") for _ in range(5))
        times, lows, means, highs = self._tables
        for key, num, step, seconds, low, mean, high in zip(*old, strict=True):
            if self._keys and self._keys[-1] == key // 2:
                self._merge(len(self._keys) - 1, step, seconds, (low, mean, high), num)
                continue
            self._keys.append(key // 2)
            self._num.append(num)
            self._steps.append(step)
            for table, number in zip((times, lows, means, highs), (seconds, low, mean, high), strict=True):
                table.append(number)
