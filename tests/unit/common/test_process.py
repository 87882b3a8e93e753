"""End of a process: hanging code does not prevent it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import disk

from starling.common.observe.process import EXIT_RESTART

STUCK = """
import sys, threading
from starling.common.observe.process import StopSignal, run_service

def stuck_thread():
    threading.Event().wait()

def body():
    stop = StopSignal({deadline})
    stop.install()
    thread = threading.Thread(target=stuck_thread, daemon=True)
    thread.start()
    print("ready", flush=True)
    stop.event.wait()
    print(stop.name, flush=True)
    {then}

code = run_service("replica-0", body)
threading.Event().wait({after})
sys.exit(code)
"""


def run(deadline: str, then: str, after: float) -> subprocess.CompletedProcess[str]:
    """Start a process, send it SIGTERM when it is ready, and return its result."""
    text = STUCK.format(deadline=deadline, then=then, after=after)
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            output, errors = process.communicate(timeout=60.0)
        finally:
            process.kill()
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def test_hanging_process_exits_after_its_deadline_with_tracebacks() -> None:
    done = run("0.3", "thread.join()", 0.0)
    assert (done.returncode, done.stdout) == (1, "SIGTERM\n")
    assert "Timeout" in done.stderr
    assert "stuck_thread" in done.stderr


def test_process_that_exits_in_time_is_not_killed() -> None:
    done = run("0.3", "pass", 0.8)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGTERM\n", "")


def test_without_a_deadline_the_process_is_not_killed() -> None:
    done = run("None", "threading.Event().wait(0.8)", 0.0)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTIBLE = """
import threading
from starling.common.observe.process import ServiceStopped, StopSignal, run_service

def body():
    stop = StopSignal(60.0)
    stop.install()
    try:
        with stop.interruptible():
            print("ready", flush=True)
            threading.Event().wait(600.0)
    except ServiceStopped as stopped:
        print("broken off by", stopped, flush=True)
    try:
        with stop.interruptible():
            print("begun", flush=True)
    except ServiceStopped:
        print("not begun", flush=True)

raise SystemExit(run_service("replica-0", body))
"""


def test_interruptible_block_is_interrupted_by_the_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            output, _ = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "broken off by SIGTERM\nnot begun\n")


SIGNALLED_AGAIN = """
import signal
from starling.common.observe.process import REPEATABLE_STOP_SIGNAL, StopSignal

stop = StopSignal()
stop.install()
for number in {numbers}:
    signal.raise_signal(number)
    print(stop.name, flush=True)
"""


@pytest.mark.parametrize(
    ("numbers", "first", "count", "code"),
    [
        ("(15, REPEATABLE_STOP_SIGNAL, REPEATABLE_STOP_SIGNAL)", "SIGTERM", 3, 0),
        ("(REPEATABLE_STOP_SIGNAL, 15, REPEATABLE_STOP_SIGNAL)", "SIGUSR2", 3, 0),
        ("(15, REPEATABLE_STOP_SIGNAL, 15)", "SIGTERM", 2, 128 + 15),
        ("(15, 2)", "SIGTERM", 1, 128 + 2),
    ],
)
def test_second_signal_ends_the_process_unless_a_supervisor_sent_it(
    numbers: str, first: str, count: int, code: int
) -> None:
    script = SIGNALLED_AGAIN.replace("{numbers}", numbers)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, f"{first}\n" * count), done.stderr


RECEIVED_ELSEWHERE = """
import os, signal, sys, threading
from pathlib import Path
from starling.common.observe.process import ServiceStopped, StopSignal

def waits_on_a_lock():
    frame = sys._current_frames()[threading.main_thread().ident]
    state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
    return frame.f_code is threading.Condition.wait.__code__ and state == "S"

def receive():
    while not waits_on_a_lock():
        os.sched_yield()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

stop = StopSignal(60.0)
stop.install()
try:
    with stop.interruptible():
        threading.Thread(target=receive, daemon=True).start()
        threading.Event().wait()
except ServiceStopped as stopped:
    print("interrupted by", stopped, flush=True)
os._exit(0)
"""


def test_signal_that_another_thread_receives_interrupts_the_main_thread() -> None:
    done = subprocess.run([sys.executable, "-c", RECEIVED_ELSEWHERE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted by SIGTERM\n"), done.stderr


FAILED_CLEANUP = """
import signal
from starling.common.observe.process import ServiceStopped, StopSignal

stop = StopSignal(60.0)
stop.install()
try:
    with stop.interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise RuntimeError("release unlocked lock")
except ServiceStopped as stopped:
    print("interrupted by", stopped)
"""


def test_cleanup_that_fails_does_not_hide_the_interruption() -> None:
    """A `Condition.wait` that is interrupted at the wrong instruction ends with this error."""
    done = subprocess.run([sys.executable, "-c", FAILED_CLEANUP], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted by SIGTERM\n"), done.stderr


FORKED = """
import os, signal
from starling.common.observe.process import StopSignal

stop = StopSignal()
stop.install()
child = os.fork()
if child == 0:
    os._exit(signal.set_wakeup_fd(-1) != -1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(signal.set_wakeup_fd(-1) >= 0)
"""


def test_forked_process_does_not_report_its_signals_to_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


IN_NATIVE_CODE = """
import ctypes
from starling.common.observe.process import StopSignal

StopSignal(0.3).install()
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
"""


def test_process_that_hangs_in_native_code_exits_after_its_deadline() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IN_NATIVE_CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            _, errors = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "Timeout" in errors


@pytest.mark.parametrize(("name", "short"), [("rollout-0", "rollout-0"), ("my rollout", "my-rollout")])
def test_short_name_of_the_process_has_no_space(name: str, short: str) -> None:
    """Slurm's proctrack/linuxproc reads /proc/PID/stat by fields, and signals no process whose name has a space."""
    code = f"""
from pathlib import Path
from starling.common.observe.process import run_service

def body():
    print(Path("/proc/self/cmdline").read_text().strip("\\0 "))
    print(Path("/proc/self/comm").read_text(), end="")

raise SystemExit(run_service({name!r}, body))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"starling: {name}\n{short}\n", done.stderr


def test_name_that_is_no_text_is_no_obstacle_to_the_title() -> None:
    """The command line's own check then names it."""
    code = "from starling.common.observe.process import run_service as run; raise SystemExit(run('a-\\udcff', print))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


WRITING = """
import sys
from starling.common.observe.process import run_service

def body():
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(b"x")

raise SystemExit(run_service("replica-0", body))
"""


def test_service_on_a_full_or_read_only_disk_ends_with_one_sentence(tmp_path: Path) -> None:
    with disk(tmp_path / "small", size_mb=1) as small:
        small.fill()
        full = [sys.executable, "-c", WRITING, str(small.folder / "new")]
        ended = subprocess.run(full, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == EXIT_RESTART
        assert ended.stderr == (
            "starling replica-0: a file cannot be written (No space left on device); free some space, or make its "
            "volume writable, and start it again\n"
        )
        subprocess.run(["mount", "-o", "remount,ro", str(small.folder)], timeout=60, check=True)
        ended = subprocess.run(full, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == EXIT_RESTART
        assert ended.stderr.startswith(
            f"starling replica-0: {small.folder}/new cannot be written (Read-only file system);"
        )
