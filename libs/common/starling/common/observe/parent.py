"""What a process shares with the one that started it: signals of their group, and its end. Imports nothing else."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child of a multithreaded process must not wait for the loader's lock.
LIBC = ctypes.CDLL(None, use_errno=True)
GROUP_SIGNALS: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals that may reach all processes of a run at once: from its terminal, or from systemd or Slurm."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, so that no run leaves processes behind."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
