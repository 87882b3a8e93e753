"""Exceptions of a user's code in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from starling.common.importing import import_object
from starling.common.raised import MAX_PLACE, MAX_TEXT, describe_raised, describe_type

LIBRARY = """import json

def reward(text):
    return json.loads(text)["reward"]
"""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError


def caught(function: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as found:
        function()
    return found.value


def test_line_is_of_the_users_file_and_not_of_the_library_that_it_called(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LIBRARY)
    reward = import_object(f"{tmp_path}/mine.py:reward", "Scorer")
    assert describe_raised(caught(lambda: reward("{}"))) == f"KeyError: 'reward' ({tmp_path}/mine.py:4)"
    assert describe_raised(caught(lambda: reward("{"))).endswith(f" ({tmp_path}/mine.py:4)")


def test_exception_without_a_users_line_has_none() -> None:
    assert describe_raised(ValueError("a\nb")) == "ValueError: a b"
    assert describe_raised(UnprintableError()) == "UnprintableError: (its text cannot be had)"


def test_description_is_bounded_text(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    (folder / "mine.py").write_text("def fail():\n    raise ValueError('y' * 999 + '\\ud800')\n")
    text = describe_raised(caught(import_object(f"{folder}/mine.py:fail", "Scorer")))
    assert text.endswith("xx/mine.py:2)")
    assert len(text) <= MAX_TEXT + MAX_PLACE + 3
    assert describe_type(ValueError("\ud800")) == "ValueError: ?"
