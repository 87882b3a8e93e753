"""Output of commands on a terminal, which texts from a run cannot control."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from starling.common.observe.terminal import printable

_RAW_CONTROLS = re.compile("[\x7f-\x9f]")
"""Control characters that JSON has as they are."""


def print_json(text: str) -> None:
    """Print JSON with its control characters as JSON writes them, which `guarded_output` would escape otherwise."""
    print(_RAW_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Escape control characters in all texts that this process prints to stdout and stderr."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _PrintableOutput(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _PrintableOutput:
    """A stream of text with control characters escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream itself, to which rich writes its styles; `starling.cli.console` escapes its texts."""

    def write(self, text: str) -> int:
        """Write a text."""
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
