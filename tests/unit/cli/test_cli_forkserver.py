"""The process from which services are forked, under the signals of a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 120.0
SCRIPT = """
import multiprocessing.forkserver
import os
import signal
import sys

import starling.cli.run.forkserver

number, to_server, delay_s = int(sys.argv[1]), sys.argv[2] == "server", float(sys.argv[3])


def strike(*_):
    # A number of multiprocessing's own, since there is no public way to its server.
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(pid, number) if to_server else os.killpg(0, number)


signal.signal(signal.SIGALRM, strike)
for terminal_signal in (signal.SIGINT, signal.SIGHUP):
    signal.signal(terminal_signal, lambda number, _: print("noted", number, flush=True))
forks = starling.cli.run.forkserver.Forks({"STARLING_TEST_OF_FORKS": "inherited"})
signal.setitimer(signal.ITIMER_REAL, delay_s)
child = forks.start("this", [], {})
print(child.stdout.read())
print("exit code", child.wait(60.0))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "target", "delay_s"),
    [
        pytest.param(2, "terminal", 0.001, marks=pytest.mark.campaign),
        (2, "terminal", 0.3),
        pytest.param(1, "terminal", 0.3, marks=pytest.mark.campaign),
        (9, "server", 0.3),
    ],
)
def test_signal_during_imports_costs_no_start(number: int, target: str, delay_s: float) -> None:
    command = [sys.executable, "-c", SCRIPT, str(number), target, str(delay_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert "Beautiful is better than ugly." in done.stdout
    assert "exit code 0" in done.stdout
    assert ("noted" in done.stdout) == (target == "terminal")


FAILED_START = """
import os
import starling.cli.run.forkserver

forks = starling.cli.run.forkserver.Forks({})
before = os.listdir("/proc/self/fd")
try:
    forks.start("this", [lambda: None], {})
except Exception as error:
    print("refused", os.listdir("/proc/self/fd") == before)
"""


def test_start_that_fails_leaves_no_pipe_open() -> None:
    command = [sys.executable, "-c", FAILED_START]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True)
    assert done.stdout == "refused True\n", done.stderr


THREADS = """
import sys
import starling.cli.run.forkserver

sys.path.insert(0, sys.argv[1])
forks = starling.cli.run.forkserver.Forks({"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.argv[1]})
for environment in ({}, {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}):
    child = forks.start("num_threads", [], environment)
    print(child.stdout.read(), end="")
    assert child.wait(60.0) == 0
"""
NUM_THREADS = """
import threading
import torch

print(torch.get_num_threads(), end=" ")
thread = threading.Thread(target=lambda: print(torch.get_num_threads()))
thread.start()
thread.join()
"""


@pytest.mark.campaign
def test_process_computes_with_the_threads_of_its_environment(tmp_path: Path) -> None:
    (tmp_path / "num_threads.py").write_text(NUM_THREADS)
    command = [sys.executable, "-c", THREADS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True)
    assert done.stdout == "1 1\n3 3\n", done.stderr


TITLE = """
import sys
import starling.cli.run.forkserver

sys.path.insert(0, sys.argv[1])
forks = starling.cli.run.forkserver.Forks({"PYTHONPATH": sys.argv[1]})
child = forks.start("titled", [], {"OMP_NUM_THREADS": "2"})
print(child.stdout.read(), end="")
assert child.wait(60.0) == 0
"""
TITLED = """
from pathlib import Path
from setproctitle import setproctitle

setproctitle("starling: policy-0")
print(Path("/proc/self/cmdline").read_text().rstrip(chr(0)))
"""


@pytest.mark.campaign
def test_process_has_a_title_when_the_first_variable_of_its_environment_changes(tmp_path: Path) -> None:
    (tmp_path / "titled.py").write_text(TITLED)
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", TITLE, str(tmp_path)]
    environment = {"OMP_NUM_THREADS": "1", **others}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True
    )
    assert done.stdout == "starling: policy-0\n", done.stderr
