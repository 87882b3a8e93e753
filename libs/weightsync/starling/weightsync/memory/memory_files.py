"""Memory files (memfd): memory without a name, which other processes of the same user map for reading only.

They open one through ``/proc/<pid>/fd/<n>``, which the kernel grants to the same user alone. Its size is sealed: no
process can cut off what another one reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import Final

from starling.common.errors import WeightsError

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1
_ADDRESS: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def create_file(name: str, size_bytes: int) -> int:
    """Return the descriptor of a new file. Raises OSError; out of memory is one, and not a SIGBUS later."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """Fix the size of a file, whose present mapping stays the only one that writes. Raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)


def address_of(descriptor: int) -> str:
    """Return the path by which other processes of this user open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_file(address: str, what: str, least_bytes: int) -> tuple[int, int]:
    """Open a file of this or another process for reading.

    Args:
        address: as `address_of` returns it, from a peer.
        what: what it should be, for errors, such as ``an arena``.
        least_bytes: its minimum size.

    Returns: its descriptor, and its size in bytes.

    Raises:
        WeightsError: no such address, its process has ended, or the file is smaller or can be made so.
    """
    if not _ADDRESS.fullmatch(address):
        raise WeightsError(f"{address!r} is not the address of {what}.")
    try:
        descriptor = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(f"{address}, {what}, cannot be opened ({error.strerror}): did its process end?") from error
    size = os.fstat(descriptor).st_size
    problem = ""
    if size < least_bytes:
        problem = f"it has {size} bytes"
    elif not _keeps_size(descriptor):  # reading what was cut off would end this process
        problem = "it can be made smaller"
    if problem:
        os.close(descriptor)
        raise WeightsError(f"{address} is not {what}: {problem}.")
    return descriptor, size


def _keeps_size(descriptor: int) -> bool:
    """Return whether no process can make a file smaller."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # its file system has no seals
        return False
