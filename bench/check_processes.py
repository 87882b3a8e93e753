"""What the processes of a run cost: their processor time, and how long they waited for a core.

The second is the run delay of the kernel's scheduler (Documentation/scheduler/sched-stats.rst, `/proc/<pid>/task/<tid>/
schedstat`): the time in which a thread could have run while others ran in its place.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

Delays = dict[int, dict[int, int]]
"""Nanoseconds of run delay of each thread, by process."""


def cpu_of_process(pid: int) -> float:
    """Return the processor seconds of a process, with the resolution of the scheduler (`clock_getcpuclockid`)."""
    return time.clock_gettime(~pid << 3 | 2)


def cpu_of_tree(root: int) -> float:
    """Return the processor seconds of a process and its descendants; of those that have ended, if they were awaited."""
    spent = 0.0
    for pid in descendants(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += cpu_of_process(pid) + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has ended
            continue
    return spent


def descendants(root: int) -> list[int]:
    """Return a process and its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    return [pid for pid in parents if descends(pid, root, parents)]


def descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    """Say whether `root` is the process or one of its ancestors."""
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root


def run_delays(pids: list[int]) -> Delays:
    """Return the run delays of the threads of some processes; none where the kernel does not count them."""
    found: Delays = {}
    for pid in pids:
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:  # it has ended
            continue
        for task in tasks:
            try:
                delay = int((task / "schedstat").read_text().split()[1])
            except OSError:
                continue
            found.setdefault(pid, {})[int(task.name)] = delay
    return found


def delay_s(before: Delays, after: Delays) -> float:
    """Return the seconds by which processes that work one after the other were delayed between two readings.

    Of the threads of a process the one counts that waited longest, the one that works: the others waited meanwhile.
    """
    longest = 0
    for pid, threads in after.items():
        known = before.get(pid, {})
        longest += max((delay - known[tid] for tid, delay in threads.items() if tid in known), default=0)
    return longest / 1e9
