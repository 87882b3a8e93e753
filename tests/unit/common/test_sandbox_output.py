"""The relay of what code in a sandbox prints."""

from __future__ import annotations

import os
from typing import Any

from structlog.testing import capture_logs

from starling.common.sandbox.output import BURST_BYTES, LINE_CHARS, relay_output


def relayed(*parts: bytes) -> list[Any]:
    with capture_logs() as logged:
        descriptor, thread = relay_output("tool")
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in parts:
                file.write(part)
        thread.join(60)
        assert not thread.is_alive()
    return logged


def test_lines_are_logged_in_order() -> None:
    logged = relayed(b"one\n\ntw", b"o\n", "drei \N{EURO SIGN}\n".encode(), b"no end")
    assert [line["text"] for line in logged] == ["one", "two", "drei €", "no end"]
    assert {(line["event"], line["of"]) for line in logged} == {("sandbox_output", "tool")}


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert [line["text"] for line in relayed(b"\xff\xfe\n")] == ["\\xff\\xfe"]


def test_line_without_end_is_cut() -> None:
    logged = relayed(*[b"x" * (1 << 16)] * 4)
    assert all(len(line["text"]) <= LINE_CHARS for line in logged)


def test_output_beyond_the_limit_is_dropped_and_counted() -> None:
    line = b"y" * 999 + b"\n"
    parts = [line * 64] * 64
    logged = relayed(*parts)
    texts = [line for line in logged if line["event"] == "sandbox_output"]
    dropped = [line for line in logged if line["event"] == "sandbox_output_dropped"]
    assert 0 < sum(len(line["text"]) for line in texts) <= BURST_BYTES
    assert sum(line["num_bytes"] for line in dropped) >= 64 * 64 * 999 - BURST_BYTES


def test_empty_lines_are_dropped_beyond_the_limit() -> None:
    """They are not logged, but to read them takes the service's processor."""
    for line in (b"\n", b" \n"):
        logged = relayed(*[line * (1 << 14)] * 4)
        assert [entry["event"] for entry in logged] == ["sandbox_output_dropped"]
