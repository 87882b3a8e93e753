"""A terminal with a program in it: what it shows, and how the program leaves it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
"""What a program sends to take the whole screen, and to give it back."""
_SEQUENCE = re.compile(r"\x1b(?:\[([0-9;?<>=]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|P[^\x1b]*\x1b\\|[@-Z\\-_a-z=>78])")


class PseudoTerminal:
    """A terminal, with a process that has it as its own. It knows texts and where the cursor is sent, no more."""

    def __init__(self, words: list[str], columns: int = 80, rows: int = 24, **variables: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self._columns, self._rows = columns, rows
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._rest = ""
        self.received = ""
        environment = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **variables}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "starling.cli.main", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self.master, keys.encode())

    def read(self, timeout_s: float) -> None:
        """Read what the program writes, for at most so long."""
        if not select.select([self.master], [], [], timeout_s)[0]:
            return
        text = os.read(self.master, 1 << 16).decode(errors="replace")
        self.received += text
        self._draw(self._rest + text)

    def screen(self) -> str:
        """Return what is shown."""
        return "\n".join("".join(row).rstrip() for row in self._cells)

    def wait_for(self, *texts: str, timeout_s: float) -> str:
        """Return the screen, as soon as it shows all texts."""
        self.wait_until(lambda: all(text in self.screen() for text in texts), texts, timeout_s)
        return self.screen()

    def wait_until(self, holds: Callable[[], Any], what: object, timeout_s: float) -> None:
        """Read until `holds` is true."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"no {what}:\n{self.screen()}"
            assert self.process.poll() is None or holds(), f"ended before {what}:\n{self.received[-3000:]}"
            self.read(0.1)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code, having read everything."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.screen()}"
            self.read(0.1)
        while select.select([self.master], [], [], 0.2)[0]:
            self.read(0.0)
        assert self.process.returncode is not None
        return self.process.returncode

    def is_restored(self) -> bool:
        """Return whether the program has left the terminal as it was: its modes, its screen and its cursor."""
        modes = termios.tcgetattr(self._slave) == self.before
        left = self.received.rfind(LEAVE) > self.received.rfind(ENTER)
        return modes and left and self.received.rfind("\x1b[?25h") > self.received.rfind("\x1b[?25l")

    def close(self) -> None:
        """Kill the program, and close the terminal."""
        self.process.kill()
        self.process.wait(60)
        os.close(self._slave)
        os.close(self.master)

    def _draw(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
                continue
            found = _SEQUENCE.match(text, at)
            if found is None:
                if len(text) - at < 200:  # it continues in what is read next
                    self._rest = text[at:]
                    return
                at += 1
                continue
            self._obey(found[1] or "", found[2] or "")
            at = found.end()
        self._rest = ""

    def _put(self, one: str) -> None:
        if one == "\r":
            self._column = 0
        elif one == "\n":
            self._row = min(self._row + 1, self._rows - 1)
        elif one >= " " and self._column < self._columns:
            self._cells[self._row][self._column] = one
            self._column += 1

    def _obey(self, numbers: str, letter: str) -> None:
        values = [int(one) if one.isdigit() else 1 for one in numbers.split(";")]
        if letter in "Hf" and letter:
            self._row = min(max(values[0], 1), self._rows) - 1
            self._column = min(max(values[1] if len(values) > 1 else 1, 1), self._columns) - 1
        elif letter == "J":
            self._cells = [[" "] * self._columns for _ in range(self._rows)]
