"""Empty file system in user space, mounted under a type of choice: a thread answers the kernel over /dev/fuse."""

from __future__ import annotations

import ctypes
import enum
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_FOUND, DETACH = -2, 2


class Operation(enum.IntEnum):
    """Requests of the kernel, as in linux/fuse.h."""

    FORGET = 2
    GETATTR = 3
    STATFS = 17
    INIT = 26
    BATCH_FORGET = 42


@contextmanager
def mounted(folder: Path, type_: str) -> Iterator[bool]:
    """Mount it at `folder` as `type_`, such as ``fuse.sshfs``; yields False where this is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"user", os.fsencode(folder), type_.encode(), 0, options) != 0:
        os.close(device)
        yield False
        return
    thread = threading.Thread(target=_serve, args=(device,), daemon=True)
    thread.start()
    try:
        yield True
    finally:
        libc.umount2(os.fsencode(folder), DETACH)
        thread.join(10.0)
        os.close(device)


def _serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return  # it is unmounted
        _, operation, number = struct.unpack_from("<IIQ", request)
        if operation in (Operation.FORGET, Operation.BATCH_FORGET):
            continue
        body = _answer(operation)
        error = 0 if body is not None else NOT_FOUND
        answer = body or b""
        os.write(device, struct.pack("<IiQ", 16 + len(answer), error, number) + answer)


def _answer(operation: int) -> bytes | None:
    match operation:
        case Operation.INIT:
            return struct.pack("<IIIIHHII", 7, 31, 4096, 0, 1, 1, 4096, 1).ljust(64, b"\0")
        case Operation.GETATTR:
            times_and_sizes = struct.pack("<6Q3I", 1, 0, 0, 0, 0, 0, 0, 0, 0)
            attributes = times_and_sizes + struct.pack("<7I", stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
            return struct.pack("<QII", 0, 0, 0) + attributes
        case Operation.STATFS:
            return struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        case _:
            return None
