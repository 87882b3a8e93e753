"""Faults as lines of metrics.jsonl: once each, and never more than a limited number."""

from __future__ import annotations

from starling.controller.shell.notice_lines import FORGET_S, MAX_LINES, MAX_TEXTS, WINDOW_S, NoticeLines


def test_fault_is_written_once_and_again_when_it_returns_later() -> None:
    lines = NoticeLines()
    assert lines.new(("a", "b"), 0.0) == ["a", "b"]
    for second in range(1, 2000):
        assert lines.new(("a",), float(second)) == [], "it is still there"
    assert lines.new(("b",), 1.5 * FORGET_S + 2000) == ["b"]
    assert lines.new((), 3 * FORGET_S + 2000) == []
    assert lines.new(("a",), 3 * FORGET_S + 2001) == ["a"]


def test_ever_new_faults_make_no_endless_file() -> None:
    lines = NoticeLines()
    found = [text for number in range(10_000) for text in lines.new((f"peer {number}",), number / 10)]
    assert len(found) == MAX_LINES
    assert len(lines._seen) <= MAX_TEXTS
    assert lines.new(("another",), WINDOW_S + 1000) == ["another"]
