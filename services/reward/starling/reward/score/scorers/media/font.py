"""A fixed bitmap font of capital letters, digits and some signs, five by seven: drawn, and read again.

It is for synthetic data, on which a model can learn to draw text without any model that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from starling.reward.score.scorers.media.frames import WHITE, Clip, luma

Bits = npt.NDArray[np.bool_]
"""[rows, columns]; whether there is ink."""

HEIGHT: Final = 7
WIDTH: Final = 5
PITCH: Final = 6
"""Columns from one character to the next."""
LINE_PITCH: Final = 9
"""Rows from one line to the next."""
MARGIN: Final = 2
UNKNOWN: Final = "?"
SPACE_COLUMNS: Final = 6
"""A wider gap between characters is a space: the widest one without has five columns."""
MAX_WRONG: Final = 0.2
"""Of a glyph's points."""
MAX_CHARACTERS: Final = 256
"""That are read of one image; more is no text but noise."""
_MIN_CONTRAST: Final = 48.0

_ROWS: Final = {
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "B": "11110 10001 10001 11110 10001 10001 11110",
    "C": "01110 10001 10000 10000 10000 10001 01110",
    "D": "11110 10001 10001 10001 10001 10001 11110",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "G": "01110 10001 10000 10111 10001 10001 01111",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "I": "01110 00100 00100 00100 00100 00100 01110",
    "J": "00111 00010 00010 00010 00010 10010 01100",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "N": "10001 11001 11001 10101 10011 10011 10001",
    "O": "01110 10001 10001 10001 10001 10001 01110",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "Q": "01110 10001 10001 10001 10101 10010 01101",
    "R": "11110 10001 10001 11110 10100 10010 10001",
    "S": "01111 10000 10000 01110 00001 00001 11110",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "V": "10001 10001 10001 10001 10001 01010 00100",
    "W": "10001 10001 10001 10101 10101 11011 10001",
    "X": "10001 10001 01010 00100 01010 10001 10001",
    "Y": "10001 10001 01010 00100 00100 00100 00100",
    "Z": "11111 00001 00010 00100 01000 10000 11111",
    "0": "01110 10011 10101 10101 10101 11001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
    "!": "00100 00100 00100 00100 00100 00000 00100",
    "?": "01110 10001 00001 00110 00100 00000 00100",
    "+": "00000 00100 00100 11111 00100 00100 00000",
    "-": "00000 00000 00000 11111 00000 00000 00000",
    "=": "00000 00000 11111 00000 11111 00000 00000",
    ".": "00000 00000 00000 00000 00000 01100 01100",
}
GLYPHS: Final[dict[str, Bits]] = {
    character: np.array([[bit == "1" for bit in row] for row in rows.split()]) for character, rows in _ROWS.items()
}
"""[7, 5] of each character that is drawn and read."""


class _Template(NamedTuple):
    character: str
    bits: Bits
    """Without the columns that are empty at both sides."""


_TEMPLATES: Final = tuple(
    _Template(character, bits[:, bits.any(axis=0).argmax() : WIDTH - bits[:, ::-1].any(axis=0).argmax()])
    for character, bits in GLYPHS.items()
)


def draw(text: str, scale: int = 1) -> Clip:
    """Return an image of a text, white on black, as a clip of one frame.

    Args:
        text: of the characters of `GLYPHS`, of small letters, spaces and line feeds.
        scale: side of a point, in pixels.

    Raises:
        ValueError: a character has no glyph.
    """
    lines = text.upper().split("\n")
    columns = max(map(len, lines)) * PITCH
    ink = np.zeros((2 * MARGIN + len(lines) * LINE_PITCH, 2 * MARGIN + columns), np.bool_)
    for number, line in enumerate(lines):
        for place, character in enumerate(line):
            if character == " ":
                continue
            if character not in GLYPHS:
                raise ValueError(f"the font has no {character!r}; it has {''.join(GLYPHS)}")
            top, left = MARGIN + number * LINE_PITCH, MARGIN + place * PITCH
            ink[top : top + HEIGHT, left : left + WIDTH] = GLYPHS[character]
    large = np.kron(ink, np.ones((scale, scale), np.uint8)) * np.uint8(WHITE)
    return np.repeat(large[None, :, :, None], 3, axis=3)


def read(frame: npt.NDArray[np.uint8]) -> str:
    """Return the text in an image [H, W, 3] in which `draw`, or a model, has written with this font, in any size.

    Lines are separated by line feeds. What has a line's height but is no glyph is read as `?`.
    """
    ink = _ink(frame)
    text = ""
    for top, bottom in _runs(ink, axis=1):
        scale = round((bottom - top) / HEIGHT)
        if scale:
            text += ("\n" if text else "") + _line(ink[top:bottom], scale)
        if len(text) > MAX_CHARACTERS:
            break
    return text[:MAX_CHARACTERS]


def _ink(frame: npt.NDArray[np.uint8]) -> Bits:
    """Return where there is ink: what differs from the more frequent of dark and light."""
    brightness = luma(frame.astype(np.float32))
    low, high = float(brightness.min()), float(brightness.max())
    is_light: Bits = brightness > (low + high) / 2
    if high - low < _MIN_CONTRAST:
        return np.zeros_like(is_light)
    return ~is_light if is_light.mean() > 0.5 else is_light


def _line(ink: Bits, scale: int) -> str:
    """Return the text of one line, whose characters are `scale` times as large as the font."""
    text = ""
    before = 0
    for left, right in _runs(ink, axis=0):
        if text and left - before >= SPACE_COLUMNS * scale:
            text += " "
        text += _character(ink[:, left:right], scale)
        before = right
        if len(text) > MAX_CHARACTERS:
            break
    return text


def _character(ink: Bits, scale: int) -> str:
    width = round(ink.shape[1] / scale)
    if not 1 <= width <= WIDTH:
        return UNKNOWN
    bits = _shrunk(ink, HEIGHT, width)
    same_width = [one for one in _TEMPLATES if one.bits.shape[1] == width]
    num_wrong, character = min(((int((one.bits != bits).sum()), one.character) for one in same_width), default=(99, ""))
    return character if num_wrong <= MAX_WRONG * HEIGHT * width else UNKNOWN


def _shrunk(ink: Bits, num_rows: int, num_columns: int) -> Bits:
    """Return, for each of the parts of equal size, whether most of it is ink."""
    rows, columns = np.linspace(0, ink.shape[0], num_rows + 1), np.linspace(0, ink.shape[1], num_columns + 1)
    shrunk = np.zeros((num_rows, num_columns), np.bool_)
    for row in range(num_rows):
        for column in range(num_columns):
            part = ink[_between(rows, row), _between(columns, column)]
            shrunk[row, column] = part.size > 0 and part.mean() > 0.5
    return shrunk


def _between(edges: npt.NDArray[np.float64], index: int) -> slice:
    return slice(round(edges[index]), round(edges[index + 1]))


def _runs(ink: Bits, axis: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of rows (axis 1) or columns (axis 0) with ink."""
    has_ink = np.asarray(ink.any(axis=axis))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], has_ink, [False]))))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
