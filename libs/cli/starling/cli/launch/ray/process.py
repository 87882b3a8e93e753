"""The process of the driver (`driver.py`), as the launcher holds it: nothing here waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from starling.common.files import open_own
from starling.common.observe.parent import die_with_parent
from starling.common.settings import child_environment

MAX_LINE_BYTES = 64 << 20
"""A longer line of the driver is damaged."""


class DriverProcess:
    """A driver of Ray, and the lines from it and to it."""

    def __init__(self, address: str, log: Path) -> None:
        """Start it for the cluster at `address`. What Ray prints goes to `log`. Raises OSError."""
        descriptor = open_own(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "starling.cli.launch.ray.driver", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env=child_environment(PYTHONUNBUFFERED="1", RAY_DISABLE_IMPORT_WARNING="1"),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(descriptor)
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="ray-driver", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="ray-commands", daemon=True).start()

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def send(self, kind: str, **fields: Any) -> None:
        """Give it a command, when it reads."""
        self._commands.put({"kind": kind, **fields})

    def told(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the lines that it has written since the last call; wait for the first one at most `timeout_s`."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._told.get(timeout=timeout_s) if timeout_s else self._told.get_nowait())
            while True:
                found.append(self._told.get_nowait())
        return found

    def rest(self) -> list[dict[str, Any]]:
        """Return the last lines of one that has ended."""
        self._reader.join(2.0)
        return self.told()

    def kill(self) -> None:
        """End it now, if it runs; then Ray ends its actors."""
        self._process.kill()
        self._process.wait(10)

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while self.code is None:
                with contextlib.suppress(queue.Empty):
                    stdin.write(json.dumps(self._commands.get(timeout=1.0)).encode() + b"\n")
                    stdin.flush()
            stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in iter(lambda: stdout.readline(MAX_LINE_BYTES), b""):
                with contextlib.suppress(ValueError):
                    self._told.put(json.loads(line))
