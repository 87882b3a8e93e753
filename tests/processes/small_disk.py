"""A small file system in memory, which can be filled."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Fill it completely."""
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0")

    def free(self) -> None:
        """Free the space."""
        self._ballast.unlink(missing_ok=True)

    def allow_writes(self, *, allowed: bool) -> None:
        """Make it read-only, or writable again."""
        mode = "rw" if allowed else "ro"
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], timeout=60, check=True)


@contextmanager
def disk(folder: Path, size_mb: int) -> Iterator[Disk]:
    """Mount a file system of `size_mb` at `folder`. Skips the test without permission."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=60, check=True)


class BreakableDisk:
    """A small ext4 file system that becomes read-only at an error, as Linux makes that of a broken disk."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self._error = Path("/sys/fs/ext4") / device / "trigger_fs_error"

    def break_down(self) -> None:
        """Let the kernel find an error."""
        self._error.write_text("1")


@contextmanager
def breakable_disk(folder: Path, size_mb: int) -> Iterator[BreakableDisk]:
    """Mount a file system of `size_mb`, at least 8, at `folder`. Skips the test without permission."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    _run_or_skip("mkfs.ext4", "-q", str(image))
    _run_or_skip("mount", "-o", "loop,errors=remount-ro", str(image), str(folder))
    try:
        source = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line)
        yield BreakableDisk(folder, Path(source).name)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=60, check=True)


def _run_or_skip(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk that breaks can be mounted here: {done.stderr.strip()}")
