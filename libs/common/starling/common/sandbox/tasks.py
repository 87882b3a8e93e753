"""Limit on the processes and threads of a sandbox that has no user namespace, in which the kernel would count them.

The parent of the payload counts them, several times a second while the machine's number of tasks grows, and kills the
sessions that have the most. Between two counts the kernel's limit for the user holds, which must be far higher: it
counts all tasks of the user on the machine. It imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Final, NamedTuple

from starling.common.sandbox.processes import descendants, end_kept, is_dead, kill_all

LOOK_EVERY_S: Final = 0.1
_COUNT_EVERY_S: Final = 1.0
_SHARE: Final = 16
"""As many sessions are killed at most, each of which has this part of the limit or more, before all are."""
SPARE_TASKS: Final = 1 << 14
"""Tasks that a user may start outside a sandbox after its start before forks in the sandbox fail."""


class _Task(NamedTuple):
    """One process."""

    parent: int
    session: int
    num_threads: int
    is_dead: bool


class TaskWatch:
    """Counts the tasks of a payload and of all that it has started, on behalf of its parent.

    Args:
        payload: process id of the payload, a child of this process; the others that it has left behind count, too.
        limit: maximum number of processes and threads.
        keeps_sessions: whether each session has a parent process that kills it.
    """

    def __init__(self, payload: int, limit: int, *, keeps_sessions: bool) -> None:
        self._payload, self._limit, self._keeps_sessions = payload, limit, keeps_sessions
        self._num_before, self._count_at, self._count_not_before = _num_of_machine(), 0.0, 0.0

    def look(self) -> None:
        """Count the tasks if that is due, and kill the largest sessions, or everything, if there are too many."""
        now = time.monotonic()
        has_grown = _num_of_machine() - self._num_before >= self._limit // 2
        if now < (self._count_not_before if has_grown else self._count_at):
            return
        begun_s = time.thread_time()
        if has_grown:  # among a thousand busy processes a count would take seconds
            _take_precedence()
        if self._enforce():
            _give_precedence_up()
        now = time.monotonic()
        self._num_before, self._count_at = _num_of_machine(), now + _COUNT_EVERY_S
        self._count_not_before = now + 10 * (time.thread_time() - begun_s)

    def _enforce(self) -> bool:
        """Return whether the payload lives on.

        Sessions may grow while others are killed, so the rest is counted again.
        """
        num_left = _SHARE
        while True:
            own, of_sessions = _count(os.getpid())
            total = own + sum(of_sessions.values())
            if total <= self._limit:
                return True
            _take_precedence()
            at_least = max(own, self._limit // _SHARE)
            victims = _largest(of_sessions, total - self._limit, at_least=at_least, at_most=num_left)
            self._report(total, len(victims))
            if not victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._payload, signal.SIGKILL)
                return False
            for session in victims:
                _kill_session(session, is_kept=self._keeps_sessions)
            num_left -= len(victims)

    def _report(self, total: int, num_victims: int) -> None:
        victim = ("it is", "the largest session is")[num_victims] if num_victims <= 1 else "the largest ones are"
        text = f"the sandbox has {total} processes and threads, and max_tasks of its needs is {self._limit}: {victim} "
        print(f"{text}killed; raise max_tasks if the code needs more", file=sys.stderr, flush=True)


def _largest(of_sessions: dict[int, int], excess: int, *, at_least: int, at_most: int) -> list[int]:
    """Return the largest sessions that have `excess` tasks together, or as many of them as may be killed.

    Args:
        of_sessions: number of tasks of each.
        excess: number of tasks that there are too many.
        at_least: number of tasks of the smallest session that may be killed.
        at_most: number of sessions that may be killed.
    """
    found = list[int]()
    for pid in sorted(of_sessions, key=lambda pid: of_sessions[pid], reverse=True)[:at_most]:
        if excess <= 0 or of_sessions[pid] < at_least:
            break
        found.append(pid)
        excess -= of_sessions[pid]
    return found


def num_tasks_of_user(uid: int) -> int:
    """Return the number of processes and threads of a user that can be seen."""
    total, line = 0, f"Uid:\t{uid}\t"
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
                if line in text:
                    total += int(text.partition("\nThreads:")[2].split(None, 1)[0])
    return total


def _num_of_machine() -> int:
    """Return the number of processes and threads of the machine; 0 if it cannot be read."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _count(pid: int) -> tuple[int, dict[int, int]]:
    """Return the number of tasks below a process: outside of sessions, and of each session.

    A session is a process that has called setsid, with everything below it; its dead that are not reaped take process
    ids, and count. Others await the payload, which reaps when it has time.
    """
    children = _children_below(pid)
    own, of_sessions = 0, dict[int, int]()
    pending = [(child, task, 0) for child, task in children.get(pid, [])]
    while pending:
        one, task, session = pending.pop()
        if not session and task.session == one and not task.is_dead:
            session = one
        if session:
            of_sessions[session] = of_sessions.get(session, 0) + max(1, task.num_threads)
        elif not task.is_dead:
            own += task.num_threads
        pending += [(child, below, session) for child, below in children.get(one, [])]
    return own, of_sessions


def _children_below(pid: int) -> dict[int, list[tuple[int, _Task]]]:
    """Return the children of a process and of all below it, the dead included; of all processes where that is quick."""
    children: dict[int, list[tuple[int, _Task]]] = {}
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        for name in os.listdir("/proc"):
            if name.isdigit() and (task := _read(int(name))) is not None:
                children.setdefault(task.parent, []).append((int(name), task))
        return children
    pending = [pid]
    while pending:
        parent = pending.pop()
        children[parent] = [(child, task) for child in _listed(parent) if (task := _read(child)) is not None]
        pending += [child for child, _ in children[parent]]
    return children


def _listed(pid: int) -> list[int]:
    found = list[int]()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(name) for name in file.read().split()]
    return found


def _read(pid: int) -> _Task | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Task(int(fields[1]), int(fields[3]), int(fields[17]), is_dead(fields))


def _kill_session(pid: int, *, is_kept: bool) -> None:
    """Kill a session: its first process last, since the others would get another parent."""
    if not is_kept:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    kill_all(lambda: descendants(pid))
    if is_kept:
        end_kept(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill_all(lambda: [pid] if (task := _read(pid)) is not None and not task.is_dead else [])


def _take_precedence() -> None:
    """Run before all ordinary processes, where root started this one. A nice value would not do: it counts within a
    session only, where the kernel groups processes by sessions."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _give_precedence_up() -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
