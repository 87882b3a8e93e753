"""Counts in messages: the singular is for 1 alone."""

from __future__ import annotations

import pytest

from starling.common.counts import counted


@pytest.mark.parametrize(
    ("num", "words"), [(0, "0 words"), (1, "1 word"), (2, "2 words"), (-1, "-1 words"), (1000, "1000 words")]
)
def test_only_one_is_singular(num: int, words: str) -> None:
    assert counted(num, "word") == words


def test_plural_and_format_can_be_given() -> None:
    assert counted(1, "pass", "passes") == "1 pass"
    assert counted(1200, "pass", "passes", form=",") == "1,200 passes"
