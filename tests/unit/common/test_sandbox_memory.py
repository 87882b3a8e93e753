"""Limits on the memory of sandboxes: which control group is this process's, and what a limit counts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from starling.common.sandbox.control_group import ControlGroup, delegated_group, num_kills, own_group
from starling.common.sandbox.memory import WatchedLimit, exceeds, limit_of_process_mb

UNIT = "0::/system.slice/rewards.service\n"
HOST = "25 21 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
HYBRID = "30 21 0:26 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw\n"
OTHERS = "24 21 0:21 / /proc rw - proc proc rw\n29 21 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        (UNIT, OTHERS + HOST, "/sys/fs/cgroup/system.slice/rewards.service"),
        ("4:memory:/jobs/1\n0::/\n", OTHERS + HYBRID, "/sys/fs/cgroup/unified"),
        ("4:memory:/jobs/1\n", OTHERS + HYBRID, None),
        (UNIT, OTHERS, None),
        (UNIT, HOST.replace(" / ", " /system.slice ", 1), "/sys/fs/cgroup/rewards.service"),
        (UNIT, HOST.replace(" / ", " /user.slice ", 1), None),
        ("0::/systematic\n", HOST.replace(" / ", " /system ", 1), None),
    ],
)
def test_own_group_is_found_below_its_mount(groups: str, mounts: str, expected: str | None) -> None:
    assert own_group(groups, mounts) == (None if expected is None else Path(expected))


def test_kills_are_read_from_the_events_of_a_group() -> None:
    assert num_kills("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 1\n") == 3
    assert num_kills("low 0\n") == 0


@pytest.mark.skipif(delegated_group() is None, reason="no control group is delegated to this process")
def test_group_kills_what_exceeds_its_limit() -> None:
    parent = delegated_group()
    assert parent is not None
    group = ControlGroup(parent, 64)
    command = [*group.entry, sys.executable, "-c", "bytearray(1 << 30)"]
    assert subprocess.run(command, check=False).returncode == -9
    assert group.has_killed()
    group.remove()
    assert not group.folder.exists()
    assert limit_of_process_mb(64) == 0


def test_memory_of_all_descendants_counts() -> None:
    takes = "import sys, time; kept = bytearray(96 << 20); print('x', flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {takes!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "x\n"
        assert exceeds(process.pid, 96 << 20)
        assert not exceeds(process.pid, 512 << 20)


def test_pages_that_processes_share_count_once() -> None:
    """Many copies of a process, which have written nothing, have little memory of their own."""
    code = (
        "import os, sys\nkept = bytearray(96 << 20)\n"
        "children = [pid for pid in [os.fork() for _ in range(1)] if pid]\n"
        "if children:\n    for _ in range(5):\n        pid = os.fork()\n        if not pid: break\n"
        "if os.getppid() != int(sys.argv[1]): sys.stdin.read(); os._exit(0)\n"
        "print('x', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "x\n"
        assert not exceeds(process.pid, 256 << 20), "seven times 96 MiB are mapped"
        assert exceeds(process.pid, 96 << 20)


PATIENCE_S = 30.0


def watched(kill: Callable[[], object]) -> WatchedLimit:
    """Return a limit that this process exceeds."""
    limit = WatchedLimit(1)
    limit.watch(os.getpid(), lambda: kill() and None)
    return limit


def test_limits_hold_after_the_thread_that_measures_could_once_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in a sandbox can take all tasks of its user for some seconds."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    killed = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("starling.common.sandbox.threads._START_S", 0.0)
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="no thread can be started"):
            watched(killed.set)
    watched(killed.set)
    assert killed.wait(PATIENCE_S)


def test_sandbox_that_cannot_be_killed_leaves_the_limits_of_others() -> None:
    def refuse() -> None:
        raise PermissionError("it is of another user")

    for _ in range(2):
        killed = threading.Event()
        watched(refuse)
        watched(killed.set)
        assert killed.wait(PATIENCE_S)
