"""Use of processors: what counts, also of threads and processes that have ended, and how long a program has waited."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from starling.common.sandbox import usage
from starling.common.sandbox.usage import Usage, waited_s

LONG_S = 60.0
BEGIN = """
import json, os, signal, threading, time
from starling.common.sandbox.usage import Meter
meter = Meter(os.getpid())

def compute(seconds=0.1):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def child(reap=True):
    pid = os.fork()
    if not pid:
        compute()
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if reap:
        os.waitpid(pid, 0)

def thread():
    one = threading.Thread(target=compute)
    one.start()
    one.join()
    while len(os.listdir("/proc/self/task")) > 1:  # the kernel ends it a little later
        time.sleep(0.001)

"""
END = "\nprint(json.dumps(meter.usage()))\n"


def measured(program: str) -> Usage:
    """Run a program that measures itself."""
    command = [sys.executable, "-c", BEGIN + program + END]
    return Usage(*json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=LONG_S, check=True).stdout))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "is_whole"),
    [
        ("compute()", True),
        ("child()", False),
        ("child(reap=False)", False),
        ("thread()", False),
        ("compute(); child(); thread(); meter.begin(); compute()", True),
        ("meter.begin(); child()", False),
        ("meter.begin(); child(reap=False)", False),
        ("meter.begin(); thread()", False),
    ],
)
def test_ended_threads_and_processes_are_noticed(program: str, is_whole: bool) -> None:
    """The kernel has forgotten how long they have waited for a processor."""
    found = measured(program)
    assert found.is_whole == is_whole
    assert found.processor_s >= 0.08, "it counts what all of them have used"


def test_children_in_no_count_are_noticed() -> None:
    ignores = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nif not os.fork():\n    os._exit(0)"
    assert not measured(ignores).is_whole


WAITS_IN_TURN = """
os.sched_setaffinity(0, {PROCESSOR})
begin, begun, end = threading.Event(), threading.Event(), threading.Event()

def second():
    begun.set()
    begin.wait()
    compute(0.2)
    begun.set()
    end.wait()

other = threading.Thread(target=second)
other.start()
begun.wait()
begun.clear()
compute(1.0)
meter.begin()
begin.set()
begun.wait()
usage = meter.usage()
end.set()
print(json.dumps(usage))
raise SystemExit
"""


@pytest.mark.campaign
def test_delay_of_one_thread_does_not_hide_that_of_another() -> None:
    """Threads of a session wait in turn, the one before the measured time, and for longer."""
    processor = min(os.sched_getaffinity(0))
    hog = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True:\n    pass"]
    others = [subprocess.Popen(hog, start_new_session=True) for _ in range(2)]
    try:
        assert measured(WAITS_IN_TURN.replace("PROCESSOR", str(processor))).delay_s > 0.05
    finally:
        for other in others:
            other.kill()
            other.wait(LONG_S)


@pytest.mark.parametrize(
    ("used", "busy", "expected"),
    [
        (Usage(0.5, 3.0), 8.0, 3.0),
        (Usage(0.5, 3.0), 2.0, 1.5),  # others have had no more
        (Usage(2.0, 3.0), 8.0, 0.0),  # it has had as much as all processors give
        (Usage(0.5, 0.0, False), 8.0, 3.75),  # all but what it has had
        (Usage(0.5, 0.0, False), 3.0, 1.5),  # a processor was idle half of the time
        (Usage(0.5, 3.9, False), 8.0, 3.9),
        (Usage(0.0, 0.0, False), math.inf, 4.0),
    ],
)
def test_time_for_which_a_program_has_waited(
    used: Usage, busy: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def processors(_: int) -> set[int]:
        return {0, 1}

    def busy_s(**_: Any) -> float:
        return 10.0 + busy

    monkeypatch.setattr(os, "sched_getaffinity", processors)
    monkeypatch.setattr(usage, "busy_s", busy_s)
    assert waited_s(used, limit_s=1.0, wall_s=4.0, busy_before_s=10.0) == pytest.approx(expected)
