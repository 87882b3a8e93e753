"""Flame graphs of a process, sampled by py-spy from outside: nothing in the process is slower by more than a stop."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from starling.common.observe.parent import LIBC

NO_PY_SPY: Final = (
    "no flame graph: py-spy is not installed here; install starling-common[profile], or leave --flames out"
)
END_S: Final = 20.0
"""How long py-spy may take to write its file."""
RATE: Final = 100
"""Samples a second."""
PR_SET_PTRACER: Final = 0x59616D61


class FlameGraph:
    """One sampling of this process and its children by py-spy."""

    def __init__(self, path: Path, limit_s: float) -> None:
        """Start to sample into `path`, for `limit_s` at most. Raises OSError if py-spy is not there or fails."""
        program = find_py_spy()
        if program is None:
            raise FileNotFoundError(NO_PY_SPY)
        self._path = path
        words = [program, "record", "--pid", str(os.getpid()), "--subprocesses", "--nonblocking", "--rate", str(RATE)]
        words += ["--duration", str(max(1, round(limit_s))), "--format", "flamegraph", "--output", str(path)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        # Where a process may be traced by its ancestors only, it has to allow its child to trace it.
        LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(self._process.pid), 0, 0, 0)

    def end(self) -> str:
        """Stop and have the file written. Returns why there is none; empty if there is one."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            _, error = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            error = f"py-spy did not end within {END_S:g} s".encode()
        finally:
            LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
        if self._path.is_file() and self._path.stat().st_size:
            return ""
        reasons = [line.strip() for line in error.decode(errors="replace").splitlines() if line.strip()]
        return f"no flame graph: {reasons[0] if reasons else 'py-spy wrote no file'}"


def find_py_spy() -> str | None:
    """Return the path of py-spy, beside this interpreter or on the search path; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")
