"""The scorer `math`: mathematical equality of the final expression and the reference (math-verify).

The library reads an expression without evaluating it, and evaluates it when it compares. A tower of powers as 9^9^9^9
then takes all time and memory, so the size of the numbers in an expression is bounded from its text before it is read.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from math_verify import parse, parser, verify

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import Scorer

MAX_DIGITS: Final = 300_000
"""Of each number that comes from evaluating an answer; it takes some tenths of a second."""
MAX_REAL_DIGITS: Final = 1000
"""Of an exponent of e, whose powers are not exact: digits are lost when they are computed."""
MAX_NESTING: Final = 50
"""Of groups in an answer."""
_DELIMITERS: Final = ("$", "\\boxed", "\\(", "\\[")
_TOKEN: Final = re.compile(
    r"(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|\*\*|\\[A-Za-z]+|\\.|[A-Za-z]+|\S", re.DOTALL
)
_MARKS: Final = re.compile(r"\||\\\||'|\\[lr]?[vV]ert|\\r(?:floor|ceil|angle|brace|brack|group)|\\[ul]rcorner")
"""Tokens whose power is that of what stands before them."""
_SPACE: Final = frozenset(("\\left", "\\right", "\\quad", "\\,", "\\;", "\\:", "\\!", "\\ ", "~"))
_OPEN: Final = frozenset(("(", "[", "{", "\\{"))
_CLOSE: Final = frozenset((")", "]", "}", "\\}"))
_PAIRS: Final = frozenset(("\\frac", "\\dfrac", "\\tfrac", "\\cfrac", "\\binom", "\\dbinom", "\\tbinom"))
"""Commands with two arguments."""
_WITH_BOUNDS: Final = frozenset(("\\sum", "\\int"))
"""Commands whose superscript is no power."""
_REAL: Final = {"e": math.log10(1 + math.e), "\\exp": math.log10(1 + math.e), "\\pi": math.log10(1 + math.pi)}


class TooLargeError(BaseException):
    """An expression has too large numbers; `text` is the expression. The library catches each `Exception`."""

    def __init__(self, text: str) -> None:
        super().__init__("an expression has numbers of too many digits")
        self.text = "".join(text.split())


def check_size(text: str, *, is_python: bool = False) -> None:
    """Raise TooLargeError for an expression that has too large numbers, or is nested too deeply.

    Args:
        text: LaTeX, or an expression of Python.
        is_python: 2**3**4 is 2**(3**4).
    """
    _SizeReader(text, is_python=is_python).check()


class _SizeReader:
    """Reads an expression once, from left to right.

    The size of a part is a bound on the digits of its numbers: log10(1 + n) of a number n, 0 of a symbol, and the sum
    of those of the parts, whether they are added, multiplied or divided.
    """

    def __init__(self, text: str, *, is_python: bool) -> None:
        self._text, self._is_python = text, is_python
        self._tokens = [token for token in _TOKEN.findall(text) if token not in _SPACE]
        self._at = 0

    def check(self) -> None:
        while self._at < len(self._tokens):
            self._group(0)  # up to its end, or to a bracket that closes nothing

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next
        self._at += 1
        return token

    def _group(self, depth: int) -> float:
        """Return the size of what stands before the next bracket that closes, and take that."""
        if depth > MAX_NESTING:
            return self._too_large()
        size = 0.0
        while self._next and self._next not in _CLOSE:
            size += self._power(depth, size)
        self._take()
        return size

    def _power(self, depth: int, before: float) -> float:
        """Return the size of an atom with its exponents and factorials; `before` is that of what precedes it."""
        token = self._next
        if token in _WITH_BOUNDS:
            return self._bounds(depth)
        size = self._atom(depth)
        if token == "\\exp":
            return self._raised(token, size, self._atom(depth))
        while self._next in ("^", "**", "!"):
            if _MARKS.fullmatch(token):  # as the second bar of |x|^2
                size = before
            is_power = self._take() != "!"
            size = self._raised(token, size, self._exponent(depth)) if is_power else self._factorial(size)
            token = ""
        return size

    def _exponent(self, depth: int) -> float:
        while self._next in ("+", "-"):
            self._take()
        if not self._is_python:
            return self._atom(depth)
        return self._power(depth + 1, 0.0) if depth <= MAX_NESTING else self._too_large()

    def _bounds(self, depth: int) -> float:
        self._take()
        size = 0.0
        while self._next in ("_", "^"):
            self._take()
            size += self._atom(depth)
        return size

    def _atom(self, depth: int) -> float:
        if depth > MAX_NESTING:
            return self._too_large()
        token = self._take()
        if token in _OPEN:
            return self._group(depth + 1)
        if token in _PAIRS:
            return self._atom(depth + 1) + self._atom(depth + 1)
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return self._number(token)
        return _REAL.get(token, 0.0)

    def _number(self, token: str) -> float:
        digits, _, exponent = token.replace(",", "").lower().partition("e")
        whole = digits.partition(".")[0]
        size = math.log10(1 + float(digits)) if len(whole) < 300 else float(len(whole))
        if len(exponent) > 12:
            return self._too_large()
        return self._limited(size + abs(int(exponent or "0")))

    def _raised(self, base: str, size: float, exponent: float) -> float:
        if base in ("e", "\\exp"):
            return size * 10.0 ** min(exponent, 300.0) if exponent <= MAX_REAL_DIGITS else self._too_large()
        if exponent > math.log10(MAX_DIGITS):
            return self._too_large()
        return self._limited(size * 10.0**exponent)

    def _factorial(self, size: float) -> float:
        return self._limited(10.0**size * size) if size < math.log10(MAX_DIGITS) else self._too_large()

    def _limited(self, size: float) -> float:
        return size if size <= MAX_DIGITS else self._too_large()

    def _too_large(self) -> float:
        raise TooLargeError(self._text)


def _guarded(convert: Callable[..., Any], *, is_python: bool) -> Callable[..., Any]:
    @functools.wraps(convert)
    def checked(text: str, *arguments: Any, **options: Any) -> Any:
        check_size(text, is_python=is_python)
        return convert(text, *arguments, **options)

    return checked


# Where the library turns the text of an answer, which only it finds in a completion, into an expression.
parser.latex2sympy = _guarded(parser.latex2sympy, is_python=False)
parser.parse_expr = _guarded(parser.parse_expr, is_python=True)


def _parsed(text: str) -> list[Any]:
    """Return the expressions in a text; the text of one that has too large numbers, which only equals itself."""
    try:
        return list(parse(text, parsing_timeout=None))
    except TooLargeError as error:
        return [error.text]


@lru_cache(maxsize=4096)
def parse_reference(reference: str) -> tuple[Any, ...]:
    """Parse a reference answer, LaTeX with or without delimiters. ValueError when it is no expression."""
    # Without delimiters the parser reads LaTeX as prose: of "3\pi" it would keep the 3.
    latex = reference if any(mark in reference for mark in _DELIMITERS) else f"${reference.strip()}$"
    parsed = _parsed(latex) or _parsed(reference)
    if not parsed:
        raise ValueError(f"the reference answer {reference[:60]!r} is not a mathematical expression")
    return tuple(parsed)


def make_math(precision: int = 6) -> Scorer:
    r"""Make the scorer `math`: 1 when the completion's answer equals the reference, else 0.

    The answer is what stands in ``\boxed{...}`` (several boxes are one set, so that guessing does not pay), else the
    last LaTeX, else the last plain expression of the completion; one that cannot be parsed or compared is not equal.
    Nor is one with numbers of more than about 300,000 digits, as a tower of powers, unless the reference is written
    like it. `precision` is the number of decimals to which numbers must agree. The library's own time limits are off,
    since they would turn an expression that hangs into a wrong answer: the worker's limit holds.
    """
    if not isinstance(precision, int) or precision < 0:
        raise ConfigError(f"Scorer 'math': precision must be a whole number of at least 0, not {precision!r}.")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limits are off, which is intended

    def equals(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        gold = list(parse_reference(reference))
        return float(verify(gold, _parsed(completion), float_rounding=precision, timeout_seconds=None))

    return equals
