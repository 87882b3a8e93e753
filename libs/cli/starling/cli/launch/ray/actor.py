"""Actor of Ray that runs one agent (`starling.cli.launch.agent`), and with it the service of a replica on one node.

    driver -> actor -> sh -> agent -> service

Ray sends the class by value, and this module needs nothing but the standard library, so Ray's workers need no Starling:
the agent has an interpreter of its own. What is secret (the key, tokens in the configuration) comes as the argument of
a call, which goes from process to process and which Ray shows nowhere, and goes on through the agent's stdin into a
file that only its user can read.

The shell is there because Ray kills the children of an actor with SIGKILL when that ends for any reason: the agent, a
grandchild, lives on, sees the end of its stdin, ends the service, and removes its files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import Any

KEPT_LINES = 2000
"""Lines of the service that wait for the driver; older ones are left out."""
LINE_BYTES = 1 << 14
"""A longer line comes as several."""
READING_S = 5.0
"""How long the last lines of a process that has ended may take."""


class ProcessActor:
    """Runs one agent, and tells of it when it is asked."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._left_out = 0
        self._address = ""

    def prepare(self) -> dict[str, Any]:
        """Return where this actor is: the node's address and id, a free port there, and the niceness that Ray adds."""
        ray = importlib.import_module("ray")
        self._address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((self._address, 0))
            port = listener.getsockname()[1]
        return {
            "address": self._address,
            "node": ray.get_runtime_context().get_node_id(),
            "port": port,
            # Of the worker over that of the raylet, which starts it: what `RAY_worker_niceness` adds.
            "niceness": os.nice(0) - os.getpriority(os.PRIO_PROCESS, os.getppid()),
        }

    def start(self, text: str, python: str, meeting: str) -> None:
        """Start the agent under `python`, with the order `text`; the nodes of its replica meet at `meeting`."""
        order = json.loads(text)
        places = (("{address}", self._address), ("{meeting}", meeting))
        for place, value in places:
            order["arguments"] = [argument.replace(place, value) for argument in order["arguments"]]
        self._process = subprocess.Popen(
            ["sh", "-c", '"$@"; exit $?', "sh", python or sys.executable, "-m", "starling.cli.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="output", daemon=True)
        self._reader.start()
        # In a thread: an interpreter that does not start never reads it.
        line = json.dumps(order).encode() + b"\n"
        threading.Thread(target=self._write, args=(line,), name="order", daemon=True).start()

    def poll(self) -> dict[str, Any]:
        """Return the exit code (None while it runs), the lines since the last call, and how many were left out."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None and self._reader is not None:
            self._reader.join(READING_S)
        left_out, self._left_out = self._left_out, 0
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        # A shell that is killed itself has a negative code; the agent then ends the service by itself.
        return {"code": 128 - code if code is not None and code < 0 else code, "lines": lines, "left_out": left_out}

    def stop(self) -> None:
        """Ask the service to end."""
        self._write(b"stop\n")

    def close(self) -> None:
        """Close the agent's stdin, by which it ends the service within its grace time."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _write(self, data: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        stdout = process.stdout
        assert stdout is not None
        for line in iter(lambda: stdout.readline(LINE_BYTES), b""):
            self._left_out += len(self._lines) == KEPT_LINES
            self._lines.append(line.decode("utf-8", "replace").rstrip("\n"))
