"""Faults of the host: a full disk, a jumping clock, a cut network."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wall_clock.c")
HOUR_S = 3600.0


class WallClock:
    """Wall clock of the processes of a run, by LD_PRELOAD; the clock of the machine does not change."""

    def __init__(self, folder: Path) -> None:
        """Compile the library to preload into `folder`. Skips the test without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the preloaded clock")
        self._library, self._offset = folder / "wall_clock.so", folder / "wall_clock.offset"
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE)]
        subprocess.run(command, check=True, timeout=60)
        self._offset.write_bytes(struct.pack("q", 0))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of the run."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: float) -> None:
        """Move the clock by `seconds`; negative values move it back."""
        with self._offset.open("r+b") as file:
            (offset,) = struct.unpack("q", file.read(8))
            file.seek(0)
            file.write(struct.pack("q", offset + int(seconds * 1e9)))


class Network:
    """Two namespaces, joined by one cable: `near` has the address 10.213.0.1, `far` has 10.213.0.2."""

    def __init__(self, near: str, far: str) -> None:
        self.near, self.far = near, far

    def command_prefix(self, namespace: str) -> tuple[str, ...]:
        """Return the prefix of a command that runs in `namespace`."""
        return ("ip", "netns", "exec", namespace)

    def cut(self) -> None:
        """Cut the link: packets of `near` are lost, and `far` finds the network unreachable."""
        _ip("-n", self.far, "link", "set", "cable", "down")

    def restore(self) -> None:
        """Restore the link."""
        _ip("-n", self.far, "link", "set", "cable", "up")


@contextmanager
def network() -> Iterator[Network]:
    """Create two connected network namespaces. Skips the test without permission."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")
    made = Network(f"starling-near-{os.getpid()}", f"starling-far-{os.getpid()}")
    namespaces = (made.near, made.far)
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", made.near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", made.far)
        for number, namespace in enumerate(namespaces, start=1):
            _ip("-n", namespace, "address", "add", f"10.213.0.{number}/24", "dev", "cable")
            _ip("-n", namespace, "link", "set", "cable", "up")
        yield made
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=60, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
