"""Line plots as SVG: axes with ticks, several series, raw values behind their moving mean. Colours are CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starling.cli.runs.files.curves import Column, smoothed
from starling.cli.runs.pages.page import escape

WIDTH: Final = 560
HEIGHT: Final = 240
LEFT: Final = 62
RIGHT: Final = 14
TOP: Final = 10
BOTTOM: Final = 36
FEW: Final = 60
"""Up to so many points are marked."""
LEAST_SMOOTHED: Final = 12
"""Columns from which on a moving mean says more than the values."""


@dataclass(frozen=True)
class Series:
    """A curve with its name and the number of its colour."""

    name: str
    colour: int
    columns: Sequence[Column]
    smooth: bool = True


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels, with its ticks."""

    low: float
    high: float
    begin: float
    end: float
    """Pixels of `low` and `high`."""
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def plot(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    described: str,
    x_begin: float = math.inf,
    whole_x: bool = False,
) -> str:
    """Return one plot; at least one series has points.

    `described`: the text for those who do not see it; `x_begin`: where the axis of x begins, unless points are before;
    `whole_x`: x is a count.
    """
    columns = [column for one in series for column in one.columns]
    x = axis(
        min(x_begin, *(c.x for c in columns)),
        max(c.x for c in columns),
        LEFT,
        WIDTH - RIGHT,
        6,
        tight=True,
        whole=whole_x,
    )
    y = axis(min(c.low for c in columns), max(c.high for c in columns), HEIGHT - BOTTOM, TOP, 5)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(described)}">',
        *_grid(x, y),
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
    ]
    if y_label:
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="label" transform="translate(11 {middle:g}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>"
        )
    drawn = sorted(series, key=lambda one: -len(one.columns))
    parts += [part for one in drawn for part in _raw(one, x, y)]
    parts += [part for one in drawn for part in _mean(one, x, y)]
    return "".join([*parts, "</svg>"])


def axis(
    low: float, high: float, begin: float, end: float, num: int, *, tight: bool = False, whole: bool = False
) -> Axis:
    """Return the scale from `low` to `high` with about `num` ticks at round values.

    `tight`: the scale ends at the values; otherwise at the ticks around them. `whole`: ticks are integers.
    """
    if high - low <= max(max(abs(low), abs(high)) * 1e-9, 1e-290):
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
        tight = False
    step = max(nice((high - low) / num), 1.0 if whole else 0.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [step * i for i in range(first, last + 1)]
    if tight:
        slack = (high - low) * 1e-6
        ticks = [tick for tick in ticks if low - slack <= tick <= high + slack]
    else:
        low, high = ticks[0], ticks[-1]
    return Axis(low, high, begin, end, tuple(ticks))


def nice(step: float) -> float:
    """Return the least of 1, 2 and 5 times a power of 10 that is not less than `step`, which is positive."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if step <= factor * power * (1 + 1e-9)), 10.0 * power)


def tick_text(value: float, step: float) -> str:
    """Return the label of a tick: ``0.05``, ``20``, ``15k``, ``2.5M``, ``1e-06``."""
    if abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e12 or abs(value) < 1e-4:
        return f"{value:.3g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.6g}{letter}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}"


def _grid(x: Axis, y: Axis) -> list[str]:
    lines = "".join(f"M{LEFT} {y.at(tick):.1f}H{WIDTH - RIGHT}" for tick in y.ticks)
    marks = "".join(f"M{x.at(tick):.1f} {HEIGHT - BOTTOM}v4" for tick in x.ticks)
    steps = [one.ticks[1] - one.ticks[0] if len(one.ticks) > 1 else abs(one.high - one.low) for one in (x, y)]
    parts = [
        f'<path class="grid" d="{lines}"/>',
        f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}{marks}"/>',
    ]
    parts += [
        f'<text class="tick" x="{x.at(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
        f"{tick_text(tick, steps[0])}</text>"
        for tick in x.ticks
    ]
    parts += [
        f'<text class="tick" x="{LEFT - 6}" y="{y.at(tick) + 3.5:.1f}" text-anchor="end">'
        f"{tick_text(tick, steps[1])}</text>"
        for tick in y.ticks
    ]
    return parts


def _raw(one: Series, x: Axis, y: Axis) -> list[str]:
    """Return the values as they are: a column of several points is a vertical line from minimum to maximum."""
    if not one.columns:
        return []
    points: list[tuple[float, float]] = []
    for index, column in enumerate(one.columns):
        ends = (column.low, column.high) if index % 2 == 0 else (column.high, column.low)
        points += [(column.x, end) for end in (ends if column.low != column.high else ends[:1])]
    faint = " faint" if _is_smoothed(one) else ""
    parts = [f'<path class="line c{one.colour}{faint}" d="{_path(points, x, y)}"/>']
    if len(one.columns) <= FEW and not faint:
        parts += [
            f'<circle class="dot c{one.colour}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.5"/>' for a, b in points
        ]
    return parts


def _mean(one: Series, x: Axis, y: Axis) -> list[str]:
    if not _is_smoothed(one):
        return []
    return [f'<path class="line strong c{one.colour}" d="{_path(smoothed(list(one.columns)), x, y)}"/>']


def _is_smoothed(one: Series) -> bool:
    return one.smooth and len(one.columns) >= LEAST_SMOOTHED


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    pixels = (f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in points)
    return "M" + "L".join(pixels)
