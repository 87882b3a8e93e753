"""Commands that are forked from a server that has imported torch, transformers and Starling already.

Importing them takes 10 s of CPU time for the processes of one run. A forked run has the same processes, with the same
parents, signals, sessions, descriptors and environments as an executed one.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from forked_interpreter import NO_MARK

SERVER = Path(__file__).with_name("forked_server.py")
SERVER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "SPT_NOENV": "1"}
"""Variables that libraries read during their import, or at the change of a title."""
_lock = threading.Lock()


class ForkedCommand:
    """A forked process with the methods of `subprocess.Popen` that the tests use."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], mark: str, out: Path, err: Path
    ) -> None:
        """Fork `python ARGUMENTS` in `folder`; its output goes to the files `out` and `err`.

        /proc shows the variable `mark` of its environment, and none of the others.
        """
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": dict(environment),
            "mark": environment[mark],
            "out": str(out.absolute()),
            "err": str(err.absolute()),
        }
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(_server(mark))
        self._connection.send(json.dumps(request).encode())
        self.pid = int(self._connection.recv(64))
        self.returncode: int | None = None
        self._reads = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; -n when signal n killed it."""
        return self._read(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for its exit, at most `timeout` seconds."""
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("forked command", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout_s: float) -> int | None:
        with self._reads:
            if self.returncode is None:
                self._connection.settimeout(timeout_s)
                with suppress(BlockingIOError, TimeoutError):
                    answer = self._connection.recv(64)
                    assert answer, "the server of the forks has exited"
                    self.returncode = int(answer)
                    self._connection.close()
            return self.returncode


def _server(variable: str) -> str:
    """Return the address of the server, which is started with the first command."""
    with _lock:
        return _start_server(variable)[0]


@cache
def _start_server(variable: str) -> tuple[str, subprocess.Popen[bytes]]:
    address = f"\0starling-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            # The further words leave room for the titles of processes.
            [sys.executable, str(SERVER), str(listener.fileno()), *["fork"] * 16],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env={**os.environ, **SERVER_ENVIRONMENT, variable: NO_MARK},
            start_new_session=True,
        )
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return address, process
