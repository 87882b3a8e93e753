"""Relay of what the code in a sandbox prints: line by line, and bounded, into the log of the service.

The code gets the end of a pipe instead of the service's stderr. That may be a file, which the code could read, truncate
and overwrite, or a terminal, from which it could read what its user types; and what it prints could have any length.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import structlog

from starling.common.sandbox.threads import start_thread

log = structlog.get_logger(__name__)

LINE_CHARS: Final = 1000
"""The rest of a line is dropped."""
BURST_BYTES: Final = 1 << 20
BYTES_PER_S: Final = 1 << 12
"""Allowance: `BURST_BYTES` at once and then this many a second; the rest is dropped and counted."""
_LINE_BYTES: Final = 100
"""Of a log line besides its text."""
_ENOUGH_BYTES: Final = 1 << 16
"""Allowance after which lines are printed again, so that they are not single ones."""
_CHUNK: Final = 1 << 16
_PAUSE_S: Final = 0.01
"""Between chunks that are dropped, so that code that prints without end does not take the service's processor."""


class OutputAllowance:
    """How much may be logged of what one sandbox prints, or several that share it, one after the other or at once.

    Without sharing, code that ends its process again and again would get `BURST_BYTES` each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes, self._at = float(BURST_BYTES), time.monotonic()

    def left(self) -> float:
        """Return the number of bytes that may be logged now."""
        with self._lock:
            return self._grown()

    def take(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` may be logged, which then count."""
        with self._lock:
            is_enough = self._grown() >= num_bytes
            if is_enough:
                self._num_bytes -= num_bytes
            return is_enough

    def _grown(self) -> float:
        now = time.monotonic()
        self._num_bytes = min(BURST_BYTES, self._num_bytes + BYTES_PER_S * (now - self._at))
        self._at = now
        return self._num_bytes


def relay_output(what: str, allowance: OutputAllowance | None = None) -> tuple[int, threading.Thread]:
    """Return a descriptor to print to, and the thread that logs it as output of `what` until all copies are closed."""
    reading, writing = os.pipe()
    relay = _Relay(what, allowance or OutputAllowance())
    thread = threading.Thread(target=relay.read, args=(reading,), name="sandbox-output", daemon=True)
    start_thread(thread)
    return writing, thread


class _Relay:
    """What one sandbox prints, and how much more it may print."""

    def __init__(self, what: str, allowance: OutputAllowance) -> None:
        self._what, self._allowance = what, allowance
        self._dropped_bytes = 0

    def read(self, descriptor: int) -> None:
        """Log the lines of a pipe until its end."""
        rest = b""
        try:
            while data := os.read(descriptor, _CHUNK):
                if self._dropped_bytes and not self._may_print_again():
                    self._dropped_bytes += len(rest) + len(data)
                    rest = b""
                    time.sleep(_PAUSE_S)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _CHUNK:  # a line without end
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._print(line)
            if rest:
                self._print(rest)
            self._report_dropped()
        finally:
            os.close(descriptor)

    def _may_print_again(self) -> bool:
        if self._allowance.left() < _ENOUGH_BYTES:
            return False
        self._report_dropped()
        return True

    def _print(self, line: bytes) -> None:
        cost = len(line) + _LINE_BYTES  # also of an empty line, and of what is not logged: it took time to read
        if self._dropped_bytes or not self._allowance.take(cost):
            self._dropped_bytes += len(line) + 1
            return
        if text := line.strip().decode("utf-8", "backslashreplace"):
            log.info("sandbox_output", of=self._what, text=text[:LINE_CHARS])

    def _report_dropped(self) -> None:
        if self._dropped_bytes:
            log.warning("sandbox_output_dropped", of=self._what, num_bytes=self._dropped_bytes)
            self._dropped_bytes = 0
