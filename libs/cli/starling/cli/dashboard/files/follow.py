"""Follower of a file of lines that grows: each byte is read once, whatever the size of the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from starling.common.files import MAX_LINE_BYTES, open_own

BLOCK: Final = 1 << 20


class Follower:
    """Reads the complete lines that were appended to a file, which may not exist yet, be cut off or be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._rest = b""
        self._is_skipping = False
        """In a line longer than `MAX_LINE_BYTES`, whose beginning was dropped."""
        self.position = 0
        """Of the first byte that was not read."""
        self.size = 0
        self.identity = (0, 0)
        """Device and inode of the file that is read."""
        self.num_begun = 0
        """How often the file was read from its beginning."""

    def lines(self, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Yield position and text of the next complete lines, of about `max_bytes`; all that is known of a file that
        was replaced or cut off is void when `num_begun` has changed. Raises OSError when it cannot be read."""
        if not self._open():
            return
        left = max_bytes
        while left > 0 and (block := os.pread(self._descriptor, BLOCK, self.position)):
            begin = self.position - len(self._rest)
            self.position += len(block)
            left -= len(block)
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                if not self._is_skipping:
                    yield begin, line + b"\n"
                self._is_skipping = False
                begin += len(line) + 1
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest, self._is_skipping = b"", True

    @property
    def share(self) -> float:
        """The share of the file that was read."""
        return min(1.0, self.position / self.size) if self.size else 1.0

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> bool:
        """Open the file, anew where the name is another one's. Returns whether there is a file."""
        try:
            named = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if self._descriptor >= 0:
            opened = os.fstat(self._descriptor)
            is_same = named is None or (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
            self.size = opened.st_size
            # A file that was renamed is read to its end first.
            if self.size > self.position or (is_same and self.size == self.position):
                return True
            self.close()
        if named is None:
            return False
        self._descriptor = open_own(self._path)
        opened = os.fstat(self._descriptor)
        self.identity, self.size = (opened.st_dev, opened.st_ino), opened.st_size
        self.position, self._rest, self._is_skipping = 0, b"", False
        self.num_begun += 1
        return True
