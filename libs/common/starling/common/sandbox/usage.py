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

from starling.common.sandbox.processes import descendants, is_dead

MEASURED_EVERY_S: Final = 0.05
"""A program that waits for a processor after its time limit is measured no more often: each takes a look at `/proc`."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_FAULTS, _FAULTS_OF_CHILDREN = 7, 8
"""Of the fields of `/proc/<pid>/stat` after the name: page faults. `_OF_CHILDREN`: of those that have ended and were
waited for."""
_OWN_TIMES: Final = slice(11, 13)
"""User and system time."""
_TIMES_OF_CHILDREN: Final = slice(13, 15)
_ENDED_S: Final = 3 / _TICKS_PER_S
"""Less may be due to the ticks in which the kernel shows processor time."""
_SIGCHLD_BIT: Final = 1 << (signal.SIGCHLD - 1)


class Usage(NamedTuple):
    """Use of processors by a process and what it has started."""

    processor_s: float = 0.0
    """Processor time of all of them."""
    delay_s: float = 0.0
    """The longest time in which one of their threads was ready to run, and others ran."""
    is_whole: bool = True
    """Whether `delay_s` is of all of them: the kernel forgets how long ended threads and processes have waited, and
    what those have used that nobody waits for."""


UNKNOWN: Final = Usage(is_whole=False)
"""Of processes that cannot be measured."""


class _Counts:
    """What the kernel shows of some processes, as sums since their starts."""

    def __init__(self, pid: int) -> None:
        self.processor_s = self.ended_s = 0.0
        """Processor time: of all, and of ended threads and processes."""
        self.ended_faults = 0
        """Page faults of ended processes: each has some, although its processor time may be less than a tick."""
        self.is_hidden = False
        """Whether a process cannot be read, or lets the kernel reap its children, which then appear in no count."""
        self.delay_s: dict[str, float] = {}
        """By thread."""
        for one in (pid, *descendants(pid, dead=True)):
            try:
                self._add(f"/proc/{one}")
            except (OSError, ValueError, IndexError):  # it has ended meanwhile, or the kernel does not show it
                self.is_hidden = True

    def _add(self, process: str) -> None:
        with open(f"{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        own, of_children = (sum(map(int, fields[times])) / _TICKS_PER_S for times in (_OWN_TIMES, _TIMES_OF_CHILDREN))
        run_s, delays = 0.0, dict[str, float]()
        for thread in os.listdir(f"{process}/task"):
            with open(f"{process}/task/{thread}/schedstat", "rb") as file:
                run, delay = (int(field) / 1e9 for field in file.read().split()[:2])
            run_s, delays[thread] = run_s + run, delay
        self.processor_s += own + of_children
        self.ended_s += of_children + max(0.0, own - run_s)
        self.ended_faults += int(fields[_FAULTS_OF_CHILDREN]) + (int(fields[_FAULTS]) if is_dead(fields) else 0)
        self.is_hidden |= _ignores_children(process)
        self.delay_s |= delays


def _ignores_children(process: str) -> bool:
    """Return whether a process lets the kernel reap its children."""
    with open(f"{process}/status", "rb") as file:
        ignored = file.read().partition(b"\nSigIgn:")[2].split(None, 1)[0]
    return bool(int(ignored, 16) & _SIGCHLD_BIT)


class Meter:
    """Measures how a process and its descendants use processors, since they started or since `begin`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: _Counts | None = None

    def begin(self) -> None:
        """Count from now on."""
        self._before = _Counts(self._pid)

    def usage(self) -> Usage:
        """Return the use of processors, as far as the kernel shows it."""
        now, before = _Counts(self._pid), self._before
        if before is None:
            is_whole = now.ended_s < _ENDED_S and not now.ended_faults
            return Usage(now.processor_s, max(now.delay_s.values(), default=0.0), is_whole and not now.is_hidden)
        delays = (delay - before.delay_s.get(thread, 0.0) for thread, delay in now.delay_s.items())
        is_whole = now.ended_s - before.ended_s < _ENDED_S and now.ended_faults <= before.ended_faults
        processor_s = max(0.0, now.processor_s - before.processor_s)
        return Usage(processor_s, max(delays, default=0.0), is_whole and not now.is_hidden)


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
