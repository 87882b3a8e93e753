"""The limit on processes and threads where the kernel does not hold it: which sessions are killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from starling.common.sandbox.processes import descendants
from starling.common.sandbox.tasks import TaskWatch
from starling.common.sandbox.threads import start_thread, started_thread

LIMIT, LARGE, GROWN = 20, 30, 30
OTHER_UID = 65533
LONG_S = 60.0


def start(body: Callable[[], object]) -> int:
    """Return the process id of a new child that runs `body`, and then sleeps."""
    pid = os.fork()
    if not pid:
        try:
            body()
            time.sleep(LONG_S)
        finally:
            os._exit(0)
    return pid


def multiply(number: int) -> None:
    for _ in range(number):
        start(lambda: None)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def grow_after(other: int) -> None:
    while runs(other):
        pass
    multiply(GROWN)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def hold_three_sessions(answer: socket.socket) -> None:
    """Look at a large session, one that grows as soon as the large one is killed, and one of a single process."""
    payload = start(lambda: None)
    large = start(lambda: (os.setsid(), multiply(LARGE)))
    wait_until(lambda: len(list(descendants(large))) == LARGE)
    growing, honest = start(lambda: (os.setsid(), grow_after(large))), start(os.setsid)
    wait_until(lambda: all(os.getsid(one) == one for one in (growing, honest)))
    watch = TaskWatch(payload, LIMIT, keeps_sessions=False)
    while runs(growing) and runs(payload):
        watch.look()
    answer.send(bytes(runs(one) for one in (payload, large, growing, honest)))


@pytest.mark.campaign
def test_session_that_grows_while_another_is_killed_costs_no_third_one() -> None:
    mine, theirs = socket.socketpair()
    parent = start(lambda: (os.setsid(), hold_three_sessions(theirs)))
    mine.settimeout(LONG_S)
    try:
        assert list(mine.recv(4)) == [True, False, False, True]
    finally:
        for pid in (*descendants(parent), parent):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(parent, 0)
        mine.close()
        theirs.close()


def take_all_tasks(answer: socket.socket) -> None:
    """Let the limit on tasks be that there are, start a thread, and raise the limit while it waits."""
    ready = started_thread("ready")
    os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))

    def free() -> None:
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))

    freed, ran = ready.submit(free), threading.Event()
    start_thread(threading.Thread(target=ran.set))
    answer.send(bytes([freed.done(), ran.wait(LONG_S)]))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user, for whom the limit holds")
def test_thread_starts_as_soon_as_there_is_a_task_for_it() -> None:
    mine, theirs = socket.socketpair()
    child = start(lambda: take_all_tasks(theirs))
    mine.settimeout(LONG_S)
    try:
        assert list(mine.recv(2)) == [True, True]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        mine.close()
        theirs.close()
