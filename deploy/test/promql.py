"""The metrics and labels that a PromQL expression reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

KEYWORDS: Final = frozenset(
    {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}
)
_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR: Final = re.compile(rf"({_NAME})\s*(\{{[^}}]*\}})?\s*(\()?")


def selectors(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Return each metric of an expression with the labels that its selector names."""
    texts = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    rest = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub(" ", texts))
    rest = re.sub(r"\boffset\s+\w+", " ", rest)
    found = []
    for name, labels, call in _SELECTOR.findall(rest):
        if not call and name not in KEYWORDS:
            found.append((name, frozenset(re.findall(rf"({_NAME})\s*[=!]", labels))))
    return found


def grouped(expression: str) -> frozenset[str]:
    """Return the labels that an expression groups or matches by."""
    return frozenset(
        label.strip() for group in _GROUPING.findall(expression) for label in group.split(",") if label.strip()
    )


def reads(expression: str, recorded: Mapping[str, str]) -> set[str]:
    """Return the metrics of services that an expression reads, also through recording rules."""
    names = {name for name, _ in selectors(expression)}
    return {source for name in names for source in (reads(recorded[name], recorded) if name in recorded else {name})}
