"""Descendants of a process, and the end of all of them and of their files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

KILL_S: Final = 5.0
"""How long killed processes may take to be gone."""
_STATE, _NUM_THREADS = 0, 17


def is_dead(fields: Sequence[bytes]) -> bool:
    """Return whether a process has ended, by the fields of `/proc/<pid>/stat` after its name.

    The state is that of its first thread, which may have ended alone: then the process has other threads, and lives.
    """
    return fields[_STATE] in b"ZX" and int(fields[_NUM_THREADS]) <= 1


def descendants(pid: int, but: Collection[int] = (), *, dead: bool = False) -> list[int]:
    """Return the living children of a process, theirs, and so on, without those in `but` and below them.

    With `dead`, also those that have ended and that nobody has waited for yet.
    """
    by_kernel = os.path.exists(f"/proc/{pid}/task/{pid}/children")
    children_of = partial(_children, dead=dead) if by_kernel else _all_children(dead=dead).get
    found, pending = list[int](), [pid]
    while pending:
        below = [child for child in children_of(pending.pop(), []) if child not in but]
        found += below
        pending += below
    return found


def _children(pid: int, default: list[int], *, dead: bool) -> list[int]:
    """Return the children of a process, as the kernel lists them by thread (CONFIG_PROC_CHILDREN).

    The list may miss one while another is being reaped: it is complete for the only thread that reaps its own.
    """
    found = list[int]()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(name) for name in file.read().split() if dead or _parent(name.decode()) is not None]
    except OSError:
        return default  # it has ended meanwhile
    return found


def _all_children(*, dead: bool) -> dict[int, list[int]]:
    """Return the children of each process of the machine, which takes as long as there are processes."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name, dead=dead)) is not None:
            children.setdefault(parent, []).append(int(name))
    return children


def kill_all(find: Callable[[], Iterable[int]]) -> bool:
    """Kill what `find` returns, again and again, until it returns nothing; False if that takes longer than `KILL_S`."""
    until = time.monotonic() + KILL_S
    while found := list(find()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def end_kept(pid: int) -> None:
    """Have the parent process of a session kill it, and wait until it has, at most `KILL_S`."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(KILL_S * 1000)
        finally:
            os.close(descriptor)


def remove_tree(folder: str) -> None:
    """Remove a folder that hostile code has filled, as far as possible; an empty path is none.

    It follows no link, and no depth is too much: each folder is moved to the top before its entries are removed.
    """
    if not folder:
        return
    pending, emptied = [folder], list[str]()
    while pending:
        place = pending.pop()
        emptied.append(place)
        try:
            with os.scandir(place) as found:
                below = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
        except OSError:
            continue
        for path, is_folder in below:
            if not is_folder:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                continue
            moved = os.path.join(folder, f"removed-{os.urandom(8).hex()}")
            try:
                os.rename(path, moved)
                pending.append(moved)
            except OSError:  # the first version of Landlock forbids it
                pending.append(path)
    for place in reversed(emptied):
        with contextlib.suppress(OSError):
            os.rmdir(place)


def _parent(name: str, *, dead: bool = False) -> int | None:
    """Return the parent of a process; None if it is gone or, unless `dead`, has ended."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if is_dead(fields) and not dead else int(fields[1])
