"""Whether what a program printed, or a function returned, is what a test expects."""

from __future__ import annotations

import math
import re
from typing import Any, Final, Literal

Rule = Literal["lines", "tokens", "exact"]
RULES: Final[tuple[Rule, ...]] = ("lines", "tokens", "exact")
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)
_MOST_DIGITS: Final = 300


def same_output(printed: str, expected: str, *, rule: Rule = "lines", tolerance: float = 0.0) -> bool:
    """Return whether a program printed what is expected.

    Args:
        printed: by the program.
        expected: by the test.
        rule: ``lines``: white space at the ends of lines, and at the end of the text, does not count. ``tokens``: only
            the words count, not the white space between them. ``exact``: everything counts.
        tolerance: words that are numbers may differ by this much, or by this part of the larger one; not of ``exact``.
    """
    if printed == expected or rule == "exact":
        return printed == expected
    if rule == "tokens":
        return _same_words(printed.split(), expected.split(), tolerance)
    ours, theirs = _lines(printed), _lines(expected)
    if ours == theirs or not tolerance or len(ours) != len(theirs):
        return ours == theirs
    return all(_same_words(one.split(), two.split(), tolerance) for one, two in zip(ours, theirs, strict=True))


def same_value(value: Any, expected: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether JSON values are equal, numbers within `tolerance` as in `same_output`."""
    if isinstance(value, list) and isinstance(expected, list):
        same_size = len(value) == len(expected)
        return same_size and all(same_value(*pair, tolerance=tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        same_keys = value.keys() == expected.keys()
        return same_keys and all(same_value(value[key], expected[key], tolerance=tolerance) for key in value)
    if tolerance and _is_number(value) and _is_number(expected):
        return _close(value, expected, tolerance)
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_words(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    same_size = len(ours) == len(theirs)
    return same_size and all(_same_word(*pair, tolerance) for pair in zip(ours, theirs, strict=True))


def _same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs or not tolerance or max(len(ours), len(theirs)) > _MOST_DIGITS:
        return ours == theirs
    return bool(_NUMBER.match(ours) and _NUMBER.match(theirs)) and _close(float(ours), float(theirs), tolerance)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(one: float, two: float, tolerance: float) -> bool:
    try:
        return one == two or math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond floats
        return False
