"""Use of processors by a sandboxed program, and the time for which it has waited for them.

Time limits of programs do not count that time: the program of another completion or episode could otherwise make them
fail, by processes that take all processors.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Final, NamedTuple

from starling.common.sandbox.processes import descendants

MEASURED_EVERY_S: Final = 0.05
"""A program that waits for a processor after its time limit is measured no more often: each takes a look at `/proc`."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_FAULTS_OF_CHILDREN: Final = 8
"""Of the fields of `/proc/<pid>/stat` after the name: page faults of children that have ended and were waited for."""
_OWN_TIMES: Final = slice(11, 13)
"""The user and system time of a process."""
_TIMES_OF_CHILDREN: Final = slice(13, 15)
"""Those of children that have ended and were waited for."""
_ENDED_S: Final = 3 / _TICKS_PER_S
"""Less may be due to the ticks in which the kernel shows processor time."""
_SIGCHLD_BIT: Final = 1 << (signal.SIGCHLD - 1)


class Usage(NamedTuple):
    """Use of processors by a process and what it has started."""

    processor_s: float = 0.0
    """Processor time of all of them."""
    delay_s: float = 0.0
    """The longest time in which one of their living threads was ready to run, and others ran."""
    ended_s: float = 0.0
    """Processor time of threads and processes that have ended: the kernel has forgotten how long these have waited."""
    num_ended_faults: int = 0
    """Page faults of processes that have ended: each has some, although its processor time may be less than a tick."""
    hides_ended: bool = False
    """Whether one of them lets the kernel reap its children, which then appear in no count."""

    @property
    def is_whole(self) -> bool:
        """Whether `delay_s` is of all threads that there have been."""
        return self.ended_s < _ENDED_S and not self.num_ended_faults and not self.hides_ended

    def since(self, before: Usage) -> Usage:
        """Return the use after an earlier one."""
        return Usage(
            max(0.0, self.processor_s - before.processor_s),
            max(0.0, self.delay_s - before.delay_s),
            max(0.0, self.ended_s - before.ended_s),
            max(0, self.num_ended_faults - before.num_ended_faults),
            self.hides_ended,
        )


def usage_of(pid: int) -> Usage:
    """Return how a process and its descendants have used processors, as far as the kernel shows it."""
    ticks, ended_ticks, delay_ns, faults, hides_ended = 0, 0.0, 0, 0, False
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{one}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            own, of_children = (sum(map(int, fields[times])) for times in (_OWN_TIMES, _TIMES_OF_CHILDREN))
            run_ns = 0
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/schedstat", "rb") as file:
                    run, delay = map(int, file.read().split()[:2])
                run_ns, delay_ns = run_ns + run, max(delay_ns, delay)
            ticks += own + of_children
            ended_ticks += of_children + max(0.0, own - run_ns * _TICKS_PER_S / 1e9)
            faults += int(fields[_FAULTS_OF_CHILDREN])
            hides_ended |= _ignores_children(one)
    return Usage(ticks / _TICKS_PER_S, delay_ns / 1e9, ended_ticks / _TICKS_PER_S, faults, hides_ended)


def _ignores_children(pid: int) -> bool:
    """Return whether a process lets the kernel reap its children."""
    with open(f"/proc/{pid}/status", "rb") as file:
        ignored = file.read().partition(b"\nSigIgn:")[2].split(None, 1)[0]
    return bool(int(ignored, 16) & _SIGCHLD_BIT)


def busy_s(*, unknown: float) -> float:
    """Return how long the processors of the machine have worked since its start, in seconds of one; or `unknown`."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", "rb") as file:
        user, nice, system, _, _, interrupts, deferred = map(int, file.readline().split()[1:8])
        return (user + nice + system + interrupts + deferred) / _TICKS_PER_S or unknown
    return unknown


def waited_s(usage: Usage, *, limit_s: float, wall_s: float, busy_before_s: float) -> float:
    """Return for how many seconds a program has waited for a processor that others had.

    That is no longer than others have had any, and 0 if its own processes have had as much as all processors give
    within the time limit. Where the kernel has forgotten how long some of them have waited, it is all the time in which
    none of them ran, as long as no processor was idle.

    Args:
        usage: of its processes.
        limit_s: its time limit.
        wall_s: time since it began.
        busy_before_s: `busy_s(unknown=0.0)` when it began.
    """
    num_processors = len(os.sched_getaffinity(0))
    if usage.processor_s >= limit_s * num_processors:
        return 0.0
    busy = busy_s(unknown=math.inf) - busy_before_s
    shown_s = min(usage.delay_s, max(0.0, busy - usage.processor_s))
    if usage.is_whole:
        return shown_s
    return max(shown_s, min(wall_s - usage.processor_s / num_processors, busy / num_processors))
