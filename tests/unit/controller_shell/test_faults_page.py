"""`docs/operations/faults.md` has the sentences of the code, and events that are logged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations/faults.md").read_text()
ROWS = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
SENTENCES = sorted({text for row in ROWS for text in re.findall(r"`([^`]+ [^`]+)`", row[1])})
EVENTS = sorted({text for row in ROWS for part in row[1:3] for text in re.findall(r"events? `(\w+)`", part)})
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\bN\b")
KEPT = {"CURVE", "NTP", "TMPDIR"}
"""Words in capitals that are no placeholders."""


@cache
def strings() -> tuple[str, ...]:
    """Return the strings of the code, with a newline for each value that is formatted into one."""
    found: list[str] = []
    for folder in ("libs", "services"):
        for path in sorted((ROOT / folder).rglob("starling/**/*.py")):
            found += map(text_of, literals(ast.parse(path.read_text())))
    return tuple(found)


def literals(module: ast.Module) -> Iterator[ast.expr]:
    return (
        node
        for node in ast.walk(module)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


def text_of(literal: ast.expr) -> str:
    match literal:
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.Constant(value=str(text)):
            return re.sub(r"\{\w+\}", "\n", text)
    return "\n"


def pattern(sentence: str) -> re.Pattern[str]:
    """Return what finds a sentence of the page in `strings`."""
    parts: list[str] = []
    end = 0
    for found in PLACEHOLDER.finditer(sentence):
        if found[0] not in KEPT:
            parts += [re.escape(sentence[end : found.start()]), "\n"]
            end = found.end()
    return re.compile("".join([*parts, re.escape(sentence[end:])]))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentence_of_the_page_is_one_of_the_code(sentence: str) -> None:
    assert any(pattern(sentence).search(text) for text in strings())


def test_events_of_the_page_are_listed_with_the_others() -> None:
    listed = (ROOT / "docs/reference/log-events.md").read_text()
    assert len(SENTENCES) > 15
    assert len(EVENTS) > 8
    assert [name for name in EVENTS if f"| `{name}` |" not in listed] == []
