"""The scorer `gsm8k`: equality of the final number and the reference's.

The data set writes its reference answers as a solution followed by ``#### 1,234`` (Cobbe et al. 2021,
arXiv:2110.14168); a reference may also be a bare number.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

from starling.reward.score.scorers.registry import Scorer

MARK: Final = "####"
# A minus is a sign only where it stands at the number and cannot be a subtraction, a range or a bullet.
_NUMBER: Final = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]])[-−])?(?:\$\s?(?P<inner_sign>[-−])?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def find_numbers(text: str) -> list[Decimal]:
    """Return every number written in `text`, in order: with thousands' commas, a dollar sign, a sign, decimals."""
    numbers = []
    for match in _NUMBER.finditer(text):
        number = Decimal(match["digits"].replace(",", ""))
        numbers.append(-number if match["sign"] or match["inner_sign"] else number)
    return numbers


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last ``####``, else the last number of the text, else None."""
    head, mark, tail = text.rpartition(MARK)
    after = find_numbers(tail) if mark else []
    if after:
        return after[0]
    numbers = find_numbers(head if mark else tail)
    return numbers[-1] if numbers else None


def gsm8k(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return 1 when the completion's final number equals the reference's, else 0. ValueError without the latter."""
    expected = final_number(reference)
    if expected is None:
        raise ValueError(f"the reference answer {reference[:60]!r} contains no number")
    return float(final_number(completion) == expected)


def make_gsm8k() -> Scorer:
    """Make the scorer `gsm8k`; it has no options."""
    return gsm8k
