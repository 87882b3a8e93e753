"""Control groups (version 2) of sandboxes, where one is delegated to this process.

systemd delegates the group of a unit with `Delegate=yes`, a container's own group belongs to its root where it is
mounted writable, and the group of another user than root is delegated if that user may write it. Only leaves of the
tree may have processes, so this process moves into a leaf of its own first. Where other processes are in its group,
too, it can give none to sandboxes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from functools import cache
from pathlib import Path
from typing import Final

_LEAF: Final = "starling-service"
_MIB: Final = 1 << 20
_REMOVE_S: Final = 1.0
_numbers: Final = itertools.count(1)


class ControlGroup:
    """Group with a limit on memory. A process that exceeds it is killed with all others in the group.

    Args:
        parent: from `delegated_group`.
        memory_mb: limit, in MiB, without swap.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, memory_mb: int) -> None:
        self.folder = parent / f"starling-{os.getpid()}-{next(_numbers)}"
        self.folder.mkdir()
        try:
            (self.folder / "memory.max").write_text(str(memory_mb * _MIB))
            (self.folder / "memory.oom.group").write_text("1")
            with contextlib.suppress(OSError):  # the kernel may count no swap
                (self.folder / "memory.swap.max").write_text("0")
        except OSError:
            self.remove()
            raise
        self.entry: tuple[str, ...] = ("/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))
        """Command that enters the group, and becomes the command after it."""

    def has_killed(self) -> bool:
        """Return whether the kernel has killed a process of the group at its limit."""
        with contextlib.suppress(OSError, ValueError):
            return num_kills((self.folder / "memory.events").read_text()) > 0
        return False

    def remove(self) -> None:
        """Remove the group; its processes have been killed, and may take a moment to be gone."""
        until = time.monotonic() + _REMOVE_S
        while True:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > until:
                    return
                time.sleep(0.005)
            else:
                return


def num_kills(events: str) -> int:
    """Return how many processes were killed at the limit, by the text of `memory.events`."""
    counts = dict(line.split(None, 1) for line in events.splitlines())
    return int(counts.get("oom_kill", "0"))


@cache
def delegated_group() -> Path | None:
    """Return the group in which this process may make others that limit memory; None if there is none.

    Moves this process into a leaf of it, for good.
    """
    try:
        own = own_group(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
        if own is None or not _is_delegated(own):
            return None
        if "memory" not in (own / "cgroup.controllers").read_text().split():
            return None
        return own if _give_memory_to_children(own) else None
    except OSError:
        return None


def own_group(groups: str, mounts: str) -> Path | None:
    """Return the folder of this process's group, if it is visible.

    Args:
        groups: text of `/proc/self/cgroup`.
        mounts: text of `/proc/self/mountinfo`.
    """
    path = next((line[3:] for line in groups.splitlines() if line.startswith("0::")), "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if path and after.split(" ", 1)[0] == "cgroup2":
            root, place = before.split(" ")[3:5]
            if path == root or path.startswith(root.rstrip("/") + "/"):
                return Path(place) / path[len(root.rstrip("/")) :].lstrip("/")
    return None


def _is_delegated(group: Path) -> bool:
    """Return whether this process may make groups in a group: it can, and nobody else manages them."""
    files = ("cgroup.procs", "cgroup.subtree_control")
    if not all(os.access(group / name, os.W_OK) for name in files) or not os.access(group, os.W_OK):
        return False
    if os.geteuid() != 0:
        return True
    for name in ("user.delegate", "trusted.delegate"):  # as systemd marks them
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    is_top = Path("/proc/self/cgroup").read_text().rstrip("\n").endswith("0::/")
    return is_top and (group / "cgroup.type").exists()  # of a container; that of the machine has no type


def _give_memory_to_children(group: Path) -> bool:
    leaf = group / _LEAF
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text("0")
    try:
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError:  # other processes are in the group
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text("0")
            leaf.rmdir()
        return False
    return True
