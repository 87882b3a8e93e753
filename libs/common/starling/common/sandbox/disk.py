"""Disk space that the processes of a sandbox take in a folder, also by files that have no name any more.

Such a file exists while a process has it open, has mapped a part of it, or runs it as its program. It imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from starling.common.sandbox.processes import descendants

_BLOCK_BYTES: Final = 4096
_SHARE_OF_UNKNOWN: Final = 16
_MAPS_BYTES: Final = 128 << 20
"""How much of `/proc/<pid>/maps` is read of all processes together, about two million mappings, some seconds."""
_DELETED: Final = b" (deleted)"


def num_bytes_in(folder: str, pid: int, limit: int) -> int:
    """Return the disk space that the descendants of a process take in a folder, files without a name included.

    Stops to count above `limit`. An entry counts as a block at least, since their number fills a disk too. Only root
    can see the size of a file that is mapped and not open: for others it is a sixteenth of `limit`, so that programs
    may remove some libraries that they have loaded. More mappings than can be read are more than `limit`.
    """
    total = _num_bytes_named(folder, limit)
    if total > limit:
        return total
    unnamed = _Unnamed(folder, limit)
    for one in descendants(pid):
        unnamed.look(one)
        if unnamed.is_unreadable:
            return limit + 1
    return total + unnamed.num_bytes()


def _num_bytes_named(folder: str, limit: int) -> int:
    total, pending = 0, [folder]
    while pending and total <= limit:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as found:
            for entry in found:
                status = entry.stat(follow_symlinks=False)
                total += max(_BLOCK_BYTES, 512 * status.st_blocks)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                if total > limit:
                    break
    return total


class _Unnamed:
    """Files without a name, each counted once.

    Args:
        folder: where they were made; a file that is open may be anywhere on its device.
        limit: more bytes are not counted.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._device = os.stat(folder).st_dev
        self._prefix = os.fsencode(os.path.realpath(folder)) + b"/"
        self._num_bytes_unknown = limit // _SHARE_OF_UNKNOWN
        self._known, self._unknown = dict[int, int](), set[int]()
        """Bytes by inode, and inodes whose size cannot be seen."""
        self._num_bytes_left = _MAPS_BYTES

    @property
    def is_unreadable(self) -> bool:
        """Whether the processes have more mappings than can be read."""
        return self._num_bytes_left <= 0

    def num_bytes(self) -> int:
        """Return the bytes of all files together."""
        unknown = self._unknown.difference(self._known)
        return sum(self._known.values()) + len(unknown) * self._num_bytes_unknown

    def look(self, pid: int) -> None:
        """Count what a process holds.

        Each of its threads may have descriptors of its own. Its first one may have ended, and then shows no mapping.
        """
        has_maps = False
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                place = f"/proc/{thread}"
                self._look_at_descriptors(place)
                has_maps = has_maps or self._look_at_maps(place)

    def _look_at_descriptors(self, place: str) -> None:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"{place}/fd"):
                self._see(f"{place}/fd/{descriptor}")

    def _look_at_maps(self, place: str) -> bool:
        """Count mapped files of a process, with its program; return whether it has any mapping."""
        has_maps = False
        with contextlib.suppress(OSError):
            if self._is_ours(os.readlink(os.fsencode(f"{place}/exe"))):
                self._see(f"{place}/exe")
            with open(f"{place}/maps", "rb") as file:
                for line in file:
                    has_maps = True
                    self._num_bytes_left -= len(line)
                    if self.is_unreadable:
                        break
                    if line.endswith(_DELETED + b"\n"):
                        self._look_at_mapping(place, line[:-1])
        return has_maps

    def _look_at_mapping(self, place: str, line: bytes) -> None:
        addresses, _, _, _, inode, path = line.split(None, 5)
        if not self._is_ours(path) or int(inode) in self._known:
            return
        first, end = (int(address, 16) for address in addresses.split(b"-"))
        if not self._see(f"{place}/map_files/{first:x}-{end:x}"):
            self._unknown.add(int(inode))

    def _is_ours(self, path: bytes) -> bool:
        return path.startswith(self._prefix) and path.endswith(_DELETED)

    def _see(self, path: str) -> bool:
        """Count a file if it has no name; return whether it can be seen."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        if not status.st_nlink and status.st_dev == self._device:
            self._known[status.st_ino] = 512 * status.st_blocks
        return True
