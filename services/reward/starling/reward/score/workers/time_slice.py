"""Time slices of threads in Linux's scheduler.

A thread that wakes up preempts one with a longer slice; one with an equal slice runs on until its slice is over. So the
service and its workers, which work for less than a millisecond at a time, ask for short slices: without them a request
waits, at each of its wake-ups, for what an attack keeps busy. A slice is no share: which part of a processor a thread
gets depends on nice values only.

`sched_runtime` of sched_setattr(2), for ordinary threads since Linux 6.12; older kernels ignore it. It imports only the
standard library, since `confine` uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from typing import Final

SHORT_S: Final = 0.0001
"""The kernel's least."""
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
_KEEP_POLICY: Final = 0x08


def ask_for_time_slice(slice_s: float) -> None:
    """Set the slice of each thread of this process, in seconds, for those that they start, too; 0 for the default.

    It does nothing where the kernel refuses.
    """
    if _SCHED_SETATTR is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            nice = os.getpriority(os.PRIO_PROCESS, int(thread))
            fields = (_ATTRIBUTES.size, 0, _KEEP_POLICY, nice, 0, round(slice_s * 1e9), 0, 0, 0, 0)
            libc.syscall(_SCHED_SETATTR, int(thread), _ATTRIBUTES.pack(*fields), 0)
