"""Plots of curves in Braille characters, each of which has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from starling.cli.runs.pages.page import figure_text

DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille character, by row and column."""
BLANK: Final = 0x2800
LABEL: Final = 7
"""Columns of the numbers at the left axis."""
MIN_WIDTH: Final = LABEL + 12
MIN_HEIGHT: Final = 4

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve of a plot."""

    name: str
    points: Points
    style: str = ""


@dataclass(frozen=True)
class _Frame:
    """The range of values that a plot shows."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def around(cls, lines: Sequence[Line]) -> _Frame:
        xs = [x for line in lines for x, _ in line.points]
        ys = [y for line in lines for _, y in line.points]
        low, high = min(ys), max(ys)
        if not high - low > abs(high) * 1e-9:  # one value: in the middle
            margin = abs(high) / 2 or 0.5
            low, high = low - margin, high + margin
        return cls((min(xs), max(xs)), (low, high))

    def place(self, x: float, y: float, columns: int, rows: int) -> tuple[int, int]:
        """Return column and row of a value among the dots, the row from above."""
        width, height = self.x[1] - self.x[0], self.y[1] - self.y[0]
        across = (x - self.x[0]) / width if width > 0 else 0.5
        up = (y - self.y[0]) / height
        return round(across * (columns - 1)), round((1 - up) * (rows - 1))


def plot(title: str, lines: Sequence[Line], width: int, height: int, unit: str = "", label: str = "step") -> list[Text]:
    """Return a plot as `height` rows of `width` columns: title, curves with the range of values, and the axis of steps.

    Curves without a finite point are left out; without any curve the plot says that there is nothing yet.
    """
    finite = [Line(one.name, [p for p in one.points if all(map(math.isfinite, p))], one.style) for one in lines]
    shown = [line for line in finite if line.points]
    rows = [_head(title, shown, unit)]
    if not shown:
        rows.append(Text("  nothing yet", style="dim"))
    else:
        frame = _Frame.around(shown)
        rows += _body(frame, shown, max(1, width - LABEL - 1), max(1, height - 2))
        rows.append(_axis(frame, label, width))
    rows += [Text() for _ in range(height - len(rows))]
    for row in rows:
        row.truncate(width, pad=True)
    return rows[:height]


def beside(plots: Sequence[Sequence[Text]], gap: int = 2) -> list[Text]:
    """Return plots of equal height beside each other."""
    return [Text(" " * gap).join(rows) for rows in zip(*plots, strict=True)]


def _head(title: str, lines: Sequence[Line], unit: str) -> Text:
    head = Text(title, style="bold")
    for line in lines:
        head.append(f"  {line.name}" if len(lines) > 1 else "", style=f"not bold {line.style}".strip())
        head.append(f" {figure_text(line.points[-1][1])}", style="bold")
    if unit:
        head.append(f" {unit}", style="not bold dim")
    return head


def _body(frame: _Frame, lines: Sequence[Line], width: int, height: int) -> list[Text]:
    """Return the curves, with the highest and the lowest value at the left."""
    cells = [[BLANK] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for line in lines:
        for across, down in _dots(frame, line.points, 2 * width, 4 * height):
            cells[down // 4][across // 2] |= DOTS[down % 4][across % 2]
            styles[down // 4][across // 2] = line.style
    rows = []
    for number, (bits, colours) in enumerate(zip(cells, styles, strict=True)):
        value = {0: frame.y[1], height - 1: frame.y[0]}.get(number)
        row = Text(_label(value))
        row.append("┤" if value is not None else "│", style="dim")
        begin = 0
        for end in range(1, width + 1):
            if end == width or colours[end] != colours[begin]:
                row.append("".join(map(chr, bits[begin:end])), style=colours[begin])
                begin = end
        rows.append(row)
    return rows


def _label(value: float | None) -> str:
    """Return a number for the left axis, with as many digits as there is room for."""
    texts = [figure_text(value, digits) for digits in (4, 3, 2, 1)]
    return f"{next((text for text in texts if len(text) <= LABEL), '…'):>{LABEL}}"


def _dots(frame: _Frame, points: Points, columns: int, rows: int) -> list[tuple[int, int]]:
    """Return the dots of a curve, with straight lines between its points."""
    dots: list[tuple[int, int]] = []
    for x, y in points:
        column, row = frame.place(x, y, columns, rows)
        if dots:
            before, from_row = dots[-1]
            num = max(abs(column - before), abs(row - from_row))
            dots += [
                (before + round((column - before) * i / num), from_row + round((row - from_row) * i / num))
                for i in range(1, num)
            ]
        dots.append((column, row))
    return dots


def _axis(frame: _Frame, label: str, width: int) -> Text:
    first, last = (f"{x:,.0f}" for x in frame.x)
    left = f"{label} {first}"
    return Text(f"{'':>{LABEL + 1}}{left}{last:>{max(1, width - LABEL - 1 - len(left))}}", style="dim")
