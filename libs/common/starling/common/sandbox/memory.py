"""Limit on the memory of a sandbox: of its first process and all that this starts, together.

Where a control group is delegated to this process, the kernel enforces the limit (`control_group`). Elsewhere the
payload limits the private memory of each of its processes (`settle`), and a thread of this process measures the sum
several times a second: above the limit the sandbox is killed, with what it has filled meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from starling.common.sandbox.control_group import ControlGroup, delegated_group
from starling.common.sandbox.processes import descendants
from starling.common.sandbox.threads import start_thread

LOOK_EVERY_S: Final = 0.05
_PAUSES: Final = 20
"""The thread pauses this many times longer than it has worked."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES: Final = 512
"""Unit of `st_blocks`."""
_OWN_FILES: Final = ("tmp", "dev/shm")
"""Where a sandbox with namespaces has file systems in memory."""


class MemoryLimit(Protocol):
    """Limit on the memory of one sandbox."""

    entry: tuple[str, ...]
    """Command that makes the limit hold for the command after it; empty if none is needed."""

    @property
    def is_exceeded(self) -> bool:
        """Whether the sandbox was killed because it exceeded the limit."""

    def watch(self, pid: int, kill: Callable[[], None]) -> None:
        """Measure the process `pid` and its descendants from now on, and call `kill` above the limit, from a thread."""

    def leave(self) -> None:
        """Do not call `kill` any more."""

    def close(self) -> None:
        """Give up what the limit takes; all processes have ended."""


def limit_memory(memory_mb: int) -> MemoryLimit:
    """Return the limit of a sandbox that is about to start; 0 for none.

    Raises:
        OSError: its control group cannot be made.
    """
    if memory_mb and (parent := delegated_group()) is not None:
        return GroupLimit(ControlGroup(parent, memory_mb))
    return WatchedLimit(memory_mb)


def limit_of_process_mb(memory_mb: int) -> int:
    """Return the limit on the private memory of each process that a payload is to set (`settle`), in MiB; 0 for none.

    `memory_mb` is the limit of the sandbox. The kernel refuses a process more than it; so the sum seldom exceeds the
    limit by much before it is measured.
    """
    return memory_mb if memory_mb and delegated_group() is None else 0


class GroupLimit:
    """Limit that the kernel enforces."""

    def __init__(self, group: ControlGroup) -> None:
        self._group = group
        self._was_exceeded = False
        self.entry = group.entry

    @property
    def is_exceeded(self) -> bool:
        """Whether the kernel has killed the sandbox at the limit."""
        self._was_exceeded = self._was_exceeded or self._group.has_killed()
        return self._was_exceeded

    def watch(self, pid: int, kill: Callable[[], None]) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Remove the group."""
        _ = self.is_exceeded  # it cannot be asked afterwards
        self._group.remove()


class WatchedLimit:
    """Limit that the thread of this process enforces; none if it is 0 MiB."""

    def __init__(self, memory_mb: int) -> None:
        self.entry: tuple[str, ...] = ()
        self.is_exceeded = False
        self._num_bytes = memory_mb << 20
        self._pid = 0
        self._kill: Callable[[], None] = lambda: None

    def watch(self, pid: int, kill: Callable[[], None]) -> None:
        """Measure from now on."""
        self._pid, self._kill = pid, kill
        if self._num_bytes:
            _watch.add(self)

    def exceeds(self) -> bool:
        """Return whether the processes have more memory than the limit."""
        return exceeds(self._pid, self._num_bytes)

    def kill(self) -> None:
        """Kill the sandbox."""
        self.is_exceeded = True
        self._kill()

    def leave(self) -> None:
        """Measure no more."""
        _watch.remove(self)

    def close(self) -> None:
        """Measure no more."""
        self.leave()


class _MemoryWatch:
    """Thread that measures sandboxes; it runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits = dict[WatchedLimit, None]()
        self._is_running = False

    def add(self, limit: WatchedLimit) -> None:
        with self._lock:
            self._limits[limit] = None
            if self._is_running:
                return
            self._is_running = True
        try:
            start_thread(threading.Thread(target=self._run, name="sandbox-memory", daemon=True))
        except BaseException:  # the next sandbox tries it again
            with self._lock:
                self._is_running = False
                self._limits.pop(limit, None)
            raise

    def remove(self, limit: WatchedLimit) -> None:
        with self._lock:
            self._limits.pop(limit, None)

    def _run(self) -> None:
        while limits := self._next():
            begun_s = time.thread_time()
            for limit in limits:
                with contextlib.suppress(
                    OSError, ValueError
                ):  # one that cannot be killed leaves the others their limits
                    if limit.exceeds():
                        self._kill(limit)
            time.sleep(max(LOOK_EVERY_S, _PAUSES * (time.thread_time() - begun_s)))

    def _next(self) -> Sequence[WatchedLimit]:
        with self._lock:
            self._is_running = bool(self._limits)
            return list(self._limits)

    def _kill(self, limit: WatchedLimit) -> None:
        with self._lock:
            if limit in self._limits:  # else its descriptors are closed, and their numbers may be of others
                del self._limits[limit]
                limit.kill()


_watch: Final = _MemoryWatch()


# --- measurement -----------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """Memory of processes that can be read without cost by its size."""

    mapped_bytes: int
    """Sum of what each has mapped; what several share counts several times."""
    file_bytes: int
    """Of files in memory, each once."""


def exceeds(pid: int, limit_bytes: int) -> bool:
    """Return whether a process and its descendants have more memory than `limit_bytes`.

    Counted are private memory, where processes that share a page have a part of it each, shared memory, and the files
    in memory that they hold or see in a file system of their sandbox. The rest, as code of libraries, the kernel drops
    when memory is short.
    """
    processes = (pid, *descendants(pid))
    rough = _measure(processes)
    if rough.mapped_bytes + rough.file_bytes <= limit_bytes:
        return False
    found = [_proportional(one) for one in processes]
    private_bytes, shared_bytes = sum(private for private, _ in found), sum(shared for _, shared in found)
    return private_bytes + max(shared_bytes, rough.file_bytes) > limit_bytes  # files in memory may be mapped, too


def _measure(processes: Sequence[int]) -> _Memory:
    mapped, own_tmp = 0, {_device(f"/{folder}") for folder in _OWN_FILES}
    file_systems, files = dict[int, int](), dict[tuple[int, int], int]()
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{pid}/statm", "rb") as file:
                mapped += int(file.read().split()[1]) * _PAGE_BYTES
            for folder in _OWN_FILES:
                place = f"/proc/{pid}/root/{folder}"
                if (device := _device(place)) not in own_tmp and device not in file_systems:
                    status = os.statvfs(place)
                    file_systems[device] = (status.f_blocks - status.f_bfree) * status.f_frsize
            _add_unnamed(f"/proc/{pid}/fd", files)
    return _Memory(mapped, sum(file_systems.values()) + sum(files.values()))


def _device(path: str) -> int:
    """Return the device of a path; 0 if it cannot be seen."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0


def _add_unnamed(folder: str, files: dict[tuple[int, int], int]) -> None:
    """Add the sizes of the files in memory that a process holds by descriptors in `folder`, by device and inode."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                status = os.stat(f"{folder}/{name}")
                files[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES


def _proportional(pid: int) -> tuple[int, int]:
    """Return the private and the shared memory of a process, in bytes, each page divided by those that share it."""
    fields = dict[bytes, int]()
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            file.readline()
            for line in file:
                name, _, amount = line.partition(b":")
                fields[name] = int(amount.split()[0]) << 10
    except (OSError, ValueError, IndexError):  # it has ended
        return 0, 0
    return fields.get(b"Pss_Anon", 0) + fields.get(b"SwapPss", 0), fields.get(b"Pss_Shmem", 0)
