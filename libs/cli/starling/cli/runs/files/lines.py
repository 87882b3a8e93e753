"""Lines of metrics.jsonl and samples.jsonl, decoded fast, forwards or from the end, with what is damaged left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.common.errors import ConfigError
from starling.common.files import MAX_LINE_BYTES, open_own, parse_line, read_lines

MAX_STEPS: Final = 1 << 23
"""Steps from this number on are not counted: no run is as long, and a damaged number must not take memory."""
MAX_TIME: Final = 1e11
"""Seconds since 1970 that a line can have."""
MAX_MAGNITUDE: Final = 1e300
_BLOCK: Final = 1 << 20
"""Bytes that are read at a time from the end of a file."""


class Head(msgspec.Struct):
    """The fields of a line that tell where it belongs; they may have any type."""

    kind: Any = None
    time: Any = None
    step: Any = None


_HEADS: Final = msgspec.json.Decoder(Head)


def read_heads(path: Path) -> Iterator[tuple[int, Head]]:
    """Yield the number and the head of each line that can be read. Raises ConfigError, as `read_lines`."""
    for number, text in enumerate(read_lines(path)):
        try:
            head = _HEADS.decode(text) if text.endswith(b"\n") else None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):  # also for NaN, which Python writes
            line = parse_line(text)
            head = Head(line.get("kind"), line.get("time"), line.get("step")) if line is not None else None
        if head is not None:
            yield number, head


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each line that can be read. Raises ConfigError, as `read_lines`."""
    for number, text in enumerate(read_lines(path)):
        line = decode(text)
        if line is not None:
            yield number, line


def decode(text: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None for a line that is incomplete or damaged."""
    if not text.endswith(b"\n"):
        return None
    try:
        line = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return parse_line(text)
    return line if isinstance(line, dict) else None


def read_backwards(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file from the last one on, of its last `max_bytes`; nothing where there is no file.

    A line that does not end, or is longer than `MAX_LINE_BYTES`, is left out. Raises ConfigError when the file is no
    regular one or cannot be read.
    """
    try:
        with os.fdopen(open_own(path), "rb") as file:
            end = os.fstat(file.fileno()).st_size
            first = max(0, end - max_bytes)
            rest = b""
            while end > first:
                begin = max(first, end - _BLOCK)
                lines = (os.pread(file.fileno(), end - begin, begin) + rest).split(b"\n")
                rest, end = lines[0], begin
                # What follows the last line feed is incomplete; `rest` may begin in an earlier block.
                for index in range(len(lines) - 1, 0, -1):
                    is_last = index == len(lines) - 1
                    if lines[index] and not is_last:
                        yield lines[index] + b"\n"
                rest += b"\n" if len(lines) > 1 else b""
                if len(rest) > MAX_LINE_BYTES:
                    return
            if first == 0 and rest.endswith(b"\n") and rest != b"\n":
                yield rest
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; move the file away") from None


def number(value: object) -> float | None:
    """Return a finite number of a line, which may be of any type; None for anything else."""
    if type(value) is not int and type(value) is not float:
        return None
    return float(value) if abs(value) < MAX_MAGNITUDE else None  # false for NaN; an int may be too large for a float


def step_of(value: object) -> int | None:
    """Return the number of a step, None for anything else."""
    return value if type(value) is int and 0 <= value < MAX_STEPS else None


def time_of(value: object) -> float | None:
    """Return the time of a line in seconds since 1970, None for anything else."""
    found = number(value)
    return found if found is not None and 0 < found < MAX_TIME else None


def text_of(line: Mapping[str, Any], name: str, limit: int = 300) -> str:
    """Return a field as text, shortened; empty where it is absent."""
    value = line.get(name)
    try:
        text = "" if value is None else value if isinstance(value, str) else repr(value)
    except RecursionError:  # of a value that is nested as deep as JSON can be read
        text = "(nested)"
    return text if len(text) <= limit else f"{text[:limit]} ..."
