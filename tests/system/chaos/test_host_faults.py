"""The injected host faults take effect; tests that inject them would otherwise prove nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_faults import HOUR_S, Network, WallClock, network
from small_disk import disk

pytestmark = pytest.mark.system

PRINT_TIMES = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
CONNECT = """
import socket
line = socket.socket()
line.settimeout(2.0)
print(line.connect_ex(("10.213.0.2", 9)))
"""


def test_wall_clock_changes_only_for_preloading_process(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    environment = {**os.environ, **clock.environment}
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_TIMES], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seconds, sum_s in ((0.0, 0.0), (HOUR_S, HOUR_S), (-3 * HOUR_S, -2 * HOUR_S)):
            clock.jump(seconds)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            assert abs(wall - time.time() - sum_s) < HOUR_S / 2
            assert abs(monotonic - time.monotonic()) < HOUR_S / 2
        process.stdin.close()


def test_full_disk_is_full_until_freed(tmp_path: Path) -> None:
    with disk(tmp_path / "small", size_mb=2) as small:
        small.fill()
        with pytest.raises(OSError, match="No space left on device") as error:
            (small.folder / "more").write_text("x")
        assert error.value.errno == errno.ENOSPC
        small.free()
        (small.folder / "more").write_text("x")
        assert os.path.ismount(small.folder)
    assert not os.path.ismount(tmp_path / "small")


def connects(cable: Network) -> bool:
    """Whether a packet from `near` reaches `far`, which refuses the connection."""
    command = [*cable.command_prefix(cable.near), sys.executable, "-c", CONNECT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout) == errno.ECONNREFUSED


def test_network_is_cut_and_restored() -> None:
    with network() as cable:
        assert connects(cable)
        cable.cut()
        assert not connects(cable)
        cable.restore()
        assert connects(cable)
    assert cable.near not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
