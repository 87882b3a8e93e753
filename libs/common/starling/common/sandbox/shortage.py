"""Shortage of what the kernel counts by user: the processes of a user, in all sandboxes and outside, share it.

The code in one sandbox can use it up. A program in another one may then fail although it is right: a pipe that holds
8 KiB, and not 64, blocks who writes a longer text into it before it is read. It imports only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from functools import cache
from typing import Final

PROBED_EVERY_S: Final = 0.1
_PIPE_BYTES: Final = 1 << 16
"""Size of a pipe on which programs rely; that of 16 pages of 4 KiB."""


def shortage_of_user() -> str:
    """Return what this process's user lacks now because its limit in the kernel is reached; empty if there is enough.

    It is the rest of a sentence: ``pipes hold 8 KiB, since ...``. Takes some microseconds.
    """
    try:
        reading, writing = os.pipe()
    except OSError as error:
        return f"no pipe can be made ({error.strerror})"
    try:
        num_bytes = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        if num_bytes < min(_PIPE_BYTES, _max_pipe_bytes()):
            limit = "the limit of its user (fs.pipe-user-pages-soft)"
            return f"pipes held {num_bytes >> 10} KiB, and not {_PIPE_BYTES >> 10}, because {limit} was reached"
        with select.epoll() as events:
            events.register(reading)
        return ""
    except OSError as error:
        return f"no event loop could watch a file ({error.strerror}; see fs.epoll.max_user_watches)"
    finally:
        os.close(reading)
        os.close(writing)


@cache
def _max_pipe_bytes() -> int:
    """Return the largest size that this machine's pipes may have, in bytes."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/fs/pipe-max-size", "rb") as file:
        return int(file.read())
    return _PIPE_BYTES
