"""Output of commands on a terminal, which texts from a run cannot control."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from starling.common.observe.terminal import printable


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
