"""Dashboard of a run, which the run starts beside itself (`launch.dashboard`) and ends with itself.

It is no part of the run: its end, whatever the reason, is said and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from starling.cli.run.attempt import Attempt
from starling.cli.run.processes import ServiceProcess, ServiceProcesses

NAME: Final = "dashboard"
ADDRESS_FILE: Final = "dashboard.url"


class RunPage:
    """The process of the dashboard, and its address once it serves."""

    def __init__(self, attempt: Attempt, children: ServiceProcesses, say: Callable[[str], None]) -> None:
        """`say` prints the address, and that the page has ended."""
        self._attempt, self._children, self._say = attempt, children, say
        self._file = attempt.folder / ADDRESS_FILE
        self._process: ServiceProcess | None = None
        self._is_announced = False

    def start(self, port: int) -> None:
        """Start the dashboard on this machine; port 0 for a free one."""
        self._file.unlink(missing_ok=True)
        # The address has the token, so it does not go to a log.
        arguments = [NAME, str(self._attempt.folder), "--port", str(port), "--address-file", str(self._file)]
        self._process = self._children.start(NAME, NAME, arguments, module="starling.cli.main")

    def look(self) -> None:
        """Say where the dashboard is, once it serves, or that it has ended."""
        process = self._process
        if process is None or process.reported:
            return
        if process.code is not None:
            process.reported = True
            last = next((line for line in reversed(process.last_lines) if line.startswith("starling: ")), "")
            why = f": {last.removeprefix('starling: ')}" if last else ""
            self._say(f"the dashboard {process.ending()}{why}; the run goes on without it")
        elif not self._is_announced:
            with suppress(OSError):
                self._say(f"dashboard: {self._file.read_text().strip()}")
                self._is_announced = True

    def close(self) -> None:
        """End the dashboard."""
        if self._process is not None:
            self._children.kill([NAME])
            self._process.reported = True
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
