"""Descendants of a process, as the kernel lists them, and processes that are forked ahead of their sessions."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from starling.common.sandbox import processes
from starling.common.sandbox.inside import Sessions, settle
from starling.common.sandbox.processes import descendants, kill_all
from starling.common.sandbox.tasks import SPARE_TASKS, num_tasks_of_user
from starling.common.sandbox.usage import busy_s

LONG_S = 60.0
TREE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"])
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def trees() -> Iterator[list[int]]:
    """Two processes with a child each, one of them started by another thread; all four process ids."""
    reading, writing = os.pipe()
    started = list[subprocess.Popen[bytes]]()
    asked, ended = threading.Event(), threading.Event()

    def start() -> None:
        started.append(subprocess.Popen([sys.executable, "-c", TREE], stdout=writing))

    def start_and_live_on() -> None:
        start()
        asked.set()
        ended.wait(LONG_S)

    thread = threading.Thread(target=start_and_live_on)
    thread.start()
    asked.wait(LONG_S)
    start()
    ready = b""
    while ready.count(b"ready") < 2:
        ready += os.read(reading, 64)
    all_four = [pid for one in started for pid in (one.pid, *descendants(one.pid))]
    yield all_four
    kill_all(lambda: [pid for pid in all_four if is_running(pid)])  # no other child of this process: tests share some
    ended.set()
    thread.join()
    for one in started:
        one.wait(LONG_S)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("kernel_lists_children", [True, False])
def test_descendants_are_found_of_all_threads(
    trees: list[int], kernel_lists_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_lists_children:
        monkeypatch.setattr(processes, "_all_children", lambda: pytest.fail("it looked at every process"))
    else:
        monkeypatch.setattr("os.path.exists", lambda path: False)
    assert len(trees) == 4
    assert set(descendants(os.getpid())) >= set(trees)
    assert not set(descendants(os.getpid(), but=[trees[0]])) & set(trees[:2])
    assert set(descendants(os.getpid(), but=[trees[0]])) >= set(trees[2:])


FIRST_THREAD_ENDS = """
import ctypes, subprocess, sys, threading, time
started = threading.Event()

def go_on():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started.set()
    time.sleep(600)

threading.Thread(target=go_on).start()
started.wait()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("kernel_lists_children", [True, False])
def test_process_whose_first_thread_has_ended_is_a_descendant(
    kernel_lists_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_lists_children:
        monkeypatch.setattr("os.path.exists", lambda path: False)
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        deadline = time.monotonic() + LONG_S
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "its first thread has not ended"
            time.sleep(0.01)
        left = {process.pid, child.pid}
        try:
            assert left <= set(descendants(os.getpid()))
            assert kill_all(lambda: left & set(descendants(os.getpid())))
            assert process.wait(LONG_S) == -signal.SIGKILL
        finally:
            process.kill()
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent may now be one that reaps it
                child.kill()


def in_new_process(body: Callable[[socket.socket], None]) -> str:
    """Run `body` in a forked process with a socket; return what it sends."""
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            mine.close()
            body(theirs)
        finally:
            os._exit(0)
    theirs.close()
    answer = b""
    poller = select.poll()
    poller.register(mine, select.POLLIN)
    while poller.poll(LONG_S * 1000) and (data := mine.recv(1 << 12)):
        answer += data
    mine.close()
    os.waitpid(pid, 0)
    return answer.decode()


def answer_pid(descriptors: list[int]) -> None:
    with socket.socket(fileno=descriptors[0]) as line:
        line.sendall(b"%d " % os.getpid())


def one_session(sessions: Sessions) -> int:
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            pid = sessions.start([theirs.fileno()])
        answered = b""
        while data := mine.recv(64):
            answered += data
        sessions.kill(pid)
    assert int(answered) == pid
    return pid


def test_processors_of_the_machine_are_busy_while_a_process_computes() -> None:
    before_s, own_s = busy_s(unknown=0.0), time.process_time()
    assert before_s > 0
    while time.process_time() - own_s < 0.3:
        pass
    assert 0.2 <= busy_s(unknown=math.inf) - before_s < math.inf


def test_session_runs_in_process_forked_ahead() -> None:
    def body(line: socket.socket) -> None:
        sessions = Sessions("process", answer_pid)
        sessions.prepare()
        (ahead,) = psutil.Process().children()
        first = one_session(sessions)
        second = one_session(sessions)
        line.sendall(f"{first == ahead.pid} {second != first} {len(psutil.Process().children())}".encode())

    assert in_new_process(body) == "True True 0"


def test_session_begins_although_process_forked_ahead_was_killed() -> None:
    def body(line: socket.socket) -> None:
        sessions = Sessions("process", answer_pid)
        sessions.prepare()
        (ahead,) = psutil.Process().children()
        ahead.kill()
        os.waitid(os.P_PID, ahead.pid, os.WEXITED | os.WNOWAIT)
        first = one_session(sessions)
        line.sendall(f"{first != ahead.pid} {len(psutil.Process().children())}".encode())

    assert in_new_process(body) == "True 0"


def test_process_forked_ahead_ends_with_the_sessions() -> None:
    def body(line: socket.socket) -> None:
        sessions = Sessions("process", answer_pid)
        sessions.prepare()
        sessions.kill_all()
        line.sendall(str(len(psutil.Process().children())).encode())

    assert in_new_process(body) == "0"


def test_tasks_of_user_include_threads() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(40)]
    for one in threads:
        one.start()
    assert num_tasks_of_user(os.getuid()) > 40
    end.set()
    for one in threads:
        one.join()


def test_user_of_code_has_a_limit_on_tasks_without_namespaces() -> None:
    """A far higher one than `max_tasks`: the kernel counts what the user does outside."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        if os.getuid() == 0:
            os.setresuid(65533, 65533, 65533)
        settle("process", max_tasks=16)
        os.write(writing, str(resource.getrlimit(resource.RLIMIT_NPROC)[0]).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as file:
        found = int(file.read())
    hard, least = resource.getrlimit(resource.RLIMIT_NPROC)[1], SPARE_TASKS + 16
    if 0 <= hard < least:
        assert found == hard
    else:
        assert least <= found
        assert found != hard
