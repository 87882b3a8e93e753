"""Logging: one line per event to stderr, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Final, Literal, TextIO, cast

import structlog

from starling.common.observe.terminal import one_line, printable

MAX_WAITING: Final = 200
"""Lines of a log that wait for space; beyond this the oldest are lost."""


class LogStream:
    """Writer to a stream whose disk may be full: that ends no process, and the newest lines wait for space.

    They are written with the next line after there is space, or at the end, behind a line that says so. A line is what
    a thread writes up to a newline at the end of a text. Bytes go to the descriptor, past the buffer of the stream:
    that one keeps what could not be written, and would write it again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._begun = threading.local()
        """Its `text`: the line that this thread has begun."""
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._rest = b""
        """What comes before the lines that wait: the rest of a line that was written in part, and why lines wait."""
        self._reason = ""
        """Why lines wait; empty while none do."""

    def write(self, text: str) -> int:
        """Write text, now or when there is space; what ends no line, when its line ends."""
        line = getattr(self._begun, "text", "") + text
        is_whole = line.endswith("\n")
        self._begun.text = "" if is_whole else line
        if is_whole:
            self._waiting.append(line.encode("utf-8", "backslashreplace"))
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write the lines that wait, as far as there is space."""
        while data := self._next():
            num = 0
            try:
                while num < len(data):
                    num += self._put(data[num:])
            except OSError as error:
                self._keep(data, num, error.strerror or str(error))
                return
            self._reason = ""

    def _next(self) -> bytes:
        """Take what is written next; nothing if no line waits."""
        rest, self._rest = self._rest, b""
        if rest:
            return rest
        with suppress(IndexError):  # none waits, or another thread has taken the last one
            return self._waiting.popleft()
        return b""

    def _put(self, data: bytes) -> int:
        """Write some of `data`; return how many bytes. Raises OSError if there is no space for any."""
        if self._descriptor >= 0:
            return os.write(self._descriptor, data)
        self._stream.write(data.decode())
        self._stream.flush()
        return len(data)

    def _keep(self, data: bytes, num: int, reason: str) -> None:
        """Keep `data`, of which `num` bytes are written, and the reason for the first of the lines that wait."""
        left = data[num:]
        if not self._reason:
            self._reason = reason
            if not num:
                self._waiting.appendleft(data)
                left = b""
            left += f"this log could not be written for a while ({reason}), and may lack lines\n".encode()
        self._rest += left


def _descriptor(stream: TextIO) -> int:
    """Return the descriptor of a stream, or -1 if it has none."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def configure(role: str, form: Literal["text", "json"] = "text") -> None:
    """Set up the log of this process: that of structlog, and the standard library's, which other packages write to.

    Every line has the field `role`, unless its event has one of its own.
    """

    def add_role(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    is_json, stream = form == "json", LogStream(sys.stderr)

    def escape_controls(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Escape what would control a terminal, or begin a line; JSON does so anyway, and values are quoted."""
        return {one_line(key): printable(value) if isinstance(value, str) else value for key, value in event.items()}

    shared: list[structlog.typing.Processor] = [
        add_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S", utc=is_json),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if is_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[*shared, renderer] if is_json else [*shared, escape_controls, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, stream)),
        cache_logger_on_first_use=True,
    )
    formatter = (
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
        if is_json
        else _TextFormatter(f"%(asctime)s [%(levelname)s] %(message)s role={role}", "%H:%M:%S")
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    """Formatter of the standard library's records."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, and its traceback, without control characters."""
        return printable(super().format(record))
