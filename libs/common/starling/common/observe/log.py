"""Logging: one line per event to stderr, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from starling.common.observe.terminal import one_line, printable


def configure(role: str, form: Literal["text", "json"] = "text") -> None:
    """Set up the log of this process: that of structlog, and the standard library's, which other packages write to.

    Every line has the field `role`, unless its event has one of its own.
    """

    def add_role(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    is_json = form == "json"

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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = (
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
        if is_json
        else _TextFormatter(f"%(asctime)s [%(levelname)s] %(message)s role={role}", "%H:%M:%S")
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    """Formatter of the standard library's records."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, and its traceback, without control characters."""
        return printable(super().format(record))
