"""The scorer `math`: mathematical equality of the final expression and the reference (math-verify)."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

from math_verify import parse, verify

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import Scorer

_DELIMITERS: Final = ("$", "\\boxed", "\\(", "\\[")


@lru_cache(maxsize=4096)
def parse_reference(reference: str) -> tuple[Any, ...]:
    """Parse a reference answer, LaTeX with or without delimiters. ValueError when it is no expression."""
    # Without delimiters the parser reads LaTeX as prose: of "3\pi" it would keep the 3.
    latex = reference if any(mark in reference for mark in _DELIMITERS) else f"${reference.strip()}$"
    parsed = parse(latex, parsing_timeout=None) or parse(reference, parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the reference answer {reference[:60]!r} is not a mathematical expression")
    return tuple(parsed)


def make_math(precision: int = 6) -> Scorer:
    r"""Make the scorer `math`: 1 when the completion's answer equals the reference, else 0.

    The answer is what stands in ``\boxed{...}`` (several boxes are one set, so that guessing does not pay), else the
    last LaTeX, else the last plain expression of the completion; one that cannot be parsed or compared is not equal.
    `precision` is the number of decimals to which numbers must agree. The library's own time limits are off, since
    they would turn an expression that hangs into a wrong answer: the worker's limit holds.
    """
    if not isinstance(precision, int) or precision < 0:
        raise ConfigError(f"Scorer 'math': precision must be a whole number of at least 0, not {precision!r}.")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limits are off, which is intended

    def equals(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        gold = list(parse_reference(reference))
        answer = parse(completion, parsing_timeout=None)
        return float(verify(gold, answer, float_rounding=precision, timeout_seconds=None))

    return equals
