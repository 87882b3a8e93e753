"""The scorer `code`: programs that a model wrote, honest and hostile ones, at every level that this machine offers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from code_judge import PATIENCE_S, Judge, Judges, pool_of
from sandbox_levels import ALL, STRONG
from scoring import settings_of

from starling.common.errors import ConfigError
from starling.common.sandbox import execution, launch, syscalls
from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import Status
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.registry import check_executor, resolve_scorer

SEARCH = Path(__file__).parents[1] / "memory_search.py"


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    with closing(Judges(timeout_s=2.0, partial=True)) as judges:
        yield judges


@pytest.fixture(params=ALL)
def judge(request: pytest.FixtureRequest, judges: Judges) -> Judge:
    return judges.of(request.param)


@pytest.mark.sample(1)
def test_program_is_judged_by_its_output(judge: Judge) -> None:
    tests = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1", "output": "2"}]
    right = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
    wrong = "```\nprint(7)\n```"
    exits = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)"
    scores = judge.score(right, wrong, exits, "1 / 0", "while True: pass", tests=tests)
    assert [score.value for score in scores] == [1.0, 0.5, 1.0, 0.0, 0.0], scores


def test_program_is_judged_by_assertions(judge: Judge) -> None:
    reference = "assert add(2, 3) == 5"
    right, wrong = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a"
    leaves = "import sys\ndef add(a, b):\n    sys.exit(0)"
    ends = "import os\ndef add(a, b):\n    os._exit(0)"
    assert judge.values(right, wrong, leaves, ends, "def add(", reference=reference) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.sample(1)
def test_hostile_program_harms_nothing(judge: Judge) -> None:
    """It ends nothing but itself, and what it leaves behind ends with it."""
    marker = f"left-{judge.pool.worker_pids()[0]}"
    daemon = (
        "import subprocess, sys\nsleep = 'import time; time.sleep(600)'\n"
        f"subprocess.Popen([sys.executable, '-c', sleep, {marker!r}], start_new_session=True)\n"
        "print('started')"
    )
    kills = "import os\nfor pid in range(1, 100):\n    try:\n        os.kill(pid, 9)\n    except OSError: pass"
    floods = "while True: print('x' * 100000)"
    devours = "x = bytearray(8 << 30)"
    garbage = "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'\\xff' * 100)\n    except OSError: pass"
    programs = [daemon, floods, devours, garbage, "def f(:"]
    if judge.level not in ("process", "landlock"):
        programs.append(kills)  # without namespaces it may reach its own sandbox
    before = judge.pool.worker_pids()
    scores = judge.score(*programs, tests=[{"input": "", "output": "started"}])
    assert [score.status for score in scores] == [Status.OK] * len(programs), scores
    assert [score.value for score in scores] == [1.0, *[0.0] * (len(programs) - 1)]
    assert judge.pool.worker_pids() == before
    deadline = time.monotonic() + PATIENCE_S
    while has_process(marker):
        assert time.monotonic() < deadline, "what it started lives on"
        time.sleep(0.05)


def has_process(marker: str) -> bool:
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if marker in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def test_program_knows_nothing_of_its_judge(judge: Judge) -> None:
    """Neither the expected output, nor the environment, nor the network, nor a file of the machine."""
    if judge.level == "process":
        pytest.skip("the level `process` hides nothing")
    look = """
        import gc, os, socket
        print(any("the-expected" in one for one in gc.get_objects() if isinstance(one, str)))
        print("STARLING_SECRET" in os.environ)
        try:
            socket.create_connection(("127.0.0.1", PORT), timeout=2)
            print(True)
        except OSError:
            print(False)
        print(os.path.exists("README.md") and os.access("README.md", os.R_OK) and bool(open("README.md").read()))
        """
    lines = [line[8:] for line in look.splitlines()]
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = "\n".join(lines).replace("PORT", str(server.getsockname()[1]))
        tests = [{"input": "", "output": "False\n" * 4}, {"input": "", "output": "the-expected"}]
        assert judge.values(program, tests=tests) == [0.5]


def test_program_finds_nothing_of_earlier_requests(judge: Judge) -> None:
    """Neither in frames and objects, nor in memory that its process was forked with, nor in open files."""
    marker = "earlier-request-"
    code, check = f"print('{marker}1111')\nright = 1", f"assert right == 1, '{marker}2222'"
    assert judge.values(code, reference=check) == [1.0]
    assert judge.values(code + "\nprint(input())", tests=[{"input": f"{marker}3333", "output": f"{marker}4444"}]) == [
        0.0
    ]
    search = SEARCH.read_text() + "\nfound = find_in_process(PATTERN + '[0-9]+')\n"
    search = search.replace("PATTERN", repr(marker)) + "print(found)\nkept = ['own-1234']\n"
    search += "own = sorted(one.split(':')[0] for one in find_in_process('own-[0-9]+'))\nprint(own)"
    (score,) = judge.values(search, tests=[{"input": "", "output": "[]\n['frames', 'memory', 'objects']"}])
    assert score == 1.0, "it found some of it, or not even what it has itself"


BURNER = """
import os
for _ in range(100):
    if os.fork() == 0:
        os.setsid()
        break
while True:
    pass
"""
BUSY = """
import time
while time.process_time() < 0.6:
    pass
print('done')
"""

IN_THREAD = """
import threading, time
def solve():
    while time.thread_time() < 0.6:
        pass
    print('done')
threading.stack_size(1 << 26)  # as for a deep recursion
thread = threading.Thread(target=solve)
thread.start()
thread.join()
"""
IN_PROCESSES = """
import os, time
num = min(2, len(os.sched_getaffinity(0)))
for _ in range(num):
    if os.fork() == 0:
        while time.process_time() < 0.7:
            pass
        os._exit(0)
for _ in range(num):
    os.wait()
print('done')
"""
IN_SHORT_PROCESSES = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        while time.process_time() < 0.03:
            pass
        os._exit(0)
    os.wait()
print('done')
"""
IN_SHORT_THREADS = """
import threading, time
def solve():
    while time.thread_time() < 0.03:
        pass
for _ in range(20):
    thread = threading.Thread(target=solve)
    thread.start()
    thread.join()
print('done')
"""
IN_UNCOUNTED_PROCESSES = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(20):
    if os.fork() == 0:
        while time.process_time() < 0.03:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
print('done')
"""
HONEST = {
    "main": BUSY,
    "thread": IN_THREAD,
    "processes": IN_PROCESSES,
    "short-processes": IN_SHORT_PROCESSES,
    "short-threads": IN_SHORT_THREADS,
    "uncounted": IN_UNCOUNTED_PROCESSES,
}


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("level", STRONG)
def test_program_that_takes_all_processors_fails_no_other(level: Mechanism, honest: str) -> None:
    """A completion could otherwise lower the rewards of all that are scored at the same time."""
    with pool_of(level, num_workers=2, timeout_s=1.0) as pool:
        judge, tests = Judge(pool), [{"input": "", "output": "done"}]
        judge.values(BUSY, BUSY, tests=tests)  # both workers have started
        assert judge.values(BURNER, honest, tests=tests) == [0.0, 1.0]


SLEEPER = """
import threading, time
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
time.sleep(1000)
"""


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("level", STRONG)
def test_program_that_sleeps_ends_at_its_limit_although_others_take_all_processors(level: Mechanism) -> None:
    with pool_of(level, num_workers=2, timeout_s=1.0) as pool:
        judge, tests = Judge(pool), [{"input": "", "output": "done"}]
        judge.values(BUSY, BUSY, tests=tests)  # both workers have started
        assert judge.values(BURNER, SLEEPER, tests=tests) == [0.0, 0.0]


IN_FLIGHT = """
import array, socket, time
left, right = socket.socketpair()
try:
    while True:
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 253))])
except OSError:
    time.sleep(3)
"""


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("level", STRONG)
def test_program_that_sends_all_descriptors_of_its_user_fails_no_other(level: Mechanism) -> None:
    """The kernel counts those that nobody has received yet by user, over all sandboxes."""
    with pool_of(level, num_workers=2) as pool:
        judge = Judge(pool)
        judge.values("", "", tests=[{"input": "", "output": ""}])  # both workers have started
        assert judge.values(IN_FLIGHT, "print('done')", tests=[{"input": "", "output": "done"}] * 40) == [0.0, 1.0]


TAKE_PIPES = """
import fcntl, os, sys
os.setgroups([])
os.setresgid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
usual = int(open("/proc/sys/fs/pipe-max-size").read())
taken = []
while not taken or fcntl.fcntl(taken[-1], fcntl.F_GETPIPE_SZ) >= 1 << 16:
    taken += os.pipe()
    try:
        fcntl.fcntl(taken[-1], fcntl.F_SETPIPE_SZ, usual)
    except PermissionError:
        pass
print("taken", flush=True)
sys.stdin.read()
"""
WRITES_BEFORE_IT_READS = """
import os
reading, writing = os.pipe()
os.write(writing, bytes(30000))
print(len(os.read(reading, 30000)))
"""


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ALL)
def test_program_that_fails_for_want_of_pipes_has_no_reward(level: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sandboxes of a user share its pages for pipes; those of this test have a user of their own."""
    if os.getuid() != 0 or launch._closed_to_others(isolates=level in ("bubblewrap", "namespaces")):
        pytest.skip("only root can have the code run as another user, who can read it")
    user = 1 << 15 | os.getpid() & 0x3FFF
    monkeypatch.setattr(launch, "OWN_UID", user)
    tests = [{"input": "", "output": "30000"}]
    with pool_of(level, timeout_s=3.0) as pool:
        judge = Judge(pool)
        assert judge.values(WRITES_BEFORE_IT_READS, tests=tests) == [1.0]
        command = [sys.executable, "-c", TAKE_PIPES, str(user)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
            assert taker.stdout is not None
            assert taker.stdout.readline() == b"taken\n"
            blocked, raised, right = judge.score(WRITES_BEFORE_IT_READS, "1 / 0", "print(30000)", tests=tests)
        for score in (blocked, raised):
            assert (score.value, score.status) == (None, Status.REWARD_ERROR), score
            assert "pipes held 8 KiB, and not 64" in score.problem
        assert right.value == 1.0, right
        assert judge.values(WRITES_BEFORE_IT_READS, "1 / 0", tests=tests) == [1.0, 0.0]


def test_time_limit_holds_while_there_is_output_to_read() -> None:
    """Several processes of a program can print faster than it is read."""
    output, (report, writing) = os.open("/dev/zero", os.O_RDONLY), os.pipe()
    try:
        os.write(writing, b"b")
        printed, reported, in_time = execution._collect(output, report, 0.1, lambda: 0.0)
        assert (len(printed) > execution.OUTPUT_BYTES, reported, in_time) == (True, b"b", False)
    finally:
        for descriptor in (output, report, writing):
            os.close(descriptor)


def test_time_limit_begins_with_the_program_and_ends_no_earlier_than_its_delay_was_measured() -> None:
    """Where others take all processors, its process starts late, and what was measured arrives late."""
    (output, printing), (report, writing) = os.pipe(), os.pipe()

    begun: list[float] = []

    def begin() -> None:
        time.sleep(0.3)
        begun.append(time.monotonic())
        os.write(writing, b"b")

    def measure() -> float:
        """It has waited all the time so far, and ends while the answer is on its way."""
        delay_s = time.monotonic() - begun[0]
        time.sleep(0.6)
        os.write(writing, bytes(17))
        return delay_s

    begins = threading.Thread(target=begin)
    begins.start()
    try:
        _, reported, in_time = execution._collect(output, report, 0.2, measure)
        assert (bytes(reported), in_time) == (b"b" + bytes(17), True)
    finally:
        begins.join()
        for descriptor in (output, printing, report, writing):
            os.close(descriptor)


def test_worker_without_its_executor_is_replaced() -> None:
    """At a level that does not limit signals, and where the kernel ends it for want of memory."""
    kills = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)"
    with pool_of("process") as pool:
        judge, tests = Judge(pool), [{"input": "", "output": "done"}]
        (score,) = judge.score(kills, tests=tests)
        assert score.status is Status.REWARD_ERROR, score
        assert judge.values("print('done')", "print('done')", tests=tests) == [1.0, 1.0]


LEAVES_FILE = """
import os
try:
    with open(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "left"), "w") as file:
        file.write("for a later one")
except OSError:
    print("refused")
"""
FINDS_FILE = """
import os
print(os.path.exists(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "left")))
"""


def test_program_leaves_no_file_outside_of_its_folder() -> None:
    """With namespaces, each session has its own `/tmp`."""
    with pool_of("landlock") as pool:
        judge = Judge(pool)
        assert judge.values(LEAVES_FILE, tests=[{"input": "", "output": "refused"}]) == [1.0]
        assert judge.values(FINDS_FILE, tests=[{"input": "", "output": "False"}]) == [1.0]


CHAINS = """
import ctypes, os, time
end = time.time() + 20
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(15, b"MARKER", 0, 0, 0)
        os.closerange(0, 100)
        while time.time() < end:
            until = time.perf_counter() + 5e-4
            while time.perf_counter() < until:
                pass
            if os.fork():
                os._exit(0)
        os._exit(0)
print("done", flush=True)
"""


@pytest.mark.parametrize("level", STRONG)
def test_processes_that_fork_and_end_all_the_time_end_with_their_session(level: Mechanism) -> None:
    """Each has ended before a list of processes, in which it is, has been read."""
    if level == "landlock" and syscalls.landlock_version() < 6:
        pytest.skip("this kernel's Landlock limits no signals, so that they cannot be killed at once")
    marker = f"chain{os.getpid()}"[:15]
    with pool_of(level) as pool:
        judge = Judge(pool)
        program = CHAINS.replace("MARKER", marker)
        assert judge.values(program, tests=[{"input": "", "output": "done"}]) == [1.0]
        assert not any(is_named(marker) for _ in range(10)), "they live on"


def is_named(name: str) -> bool:
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if one.name() == name and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


DAEMON = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "MARKER"], start_new_session=True)
time.sleep(600)
"""
SERVICE = """
import sys
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, group_task
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.settings import RewardSettings

level, program = sys.argv[1:]
scorer = {"name": "code", "timeout_s": 500.0, "options": {"timeout_s": 400.0}}
with ScoringPool(RewardSettings.model_validate({"scorers": [scorer], "sandbox": level})) as pool:
    completion = CompletionText(text=program, status=Status.OK, num_tokens=1)
    tests = [{"input": "", "output": ""}]
    pool.submit(group_task("one", ((0, completion),), PromptText("", "", {"tests": tests}), (0,)))
    pool.poll(500.0)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ALL)
def test_programs_end_with_a_service_that_is_killed(level: Mechanism) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    marker = f"of-killed-service-{level}-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", SERVICE, level, DAEMON.replace("MARKER", marker)]) as service:
        deadline = time.monotonic() + PATIENCE_S
        while not has_process(marker):
            assert time.monotonic() < deadline, "it did not start"
            time.sleep(0.05)
        service.kill()
    while has_process(marker):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


HUNGRY = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"MARKER", 0, 0, 0)
while "starling-test" not in open("/proc/self/cgroup").read():
    time.sleep(0.02)
taken = bytearray(128 << 20)
print("done")
"""


def memory_group(name: str) -> Path | None:
    """Make a control group with 32 MiB of memory, where this machine permits it."""
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(parent, name)
        with suppress(OSError):
            folder.mkdir()
            with suppress(OSError):
                Path(folder, limit).write_text(str(32 << 20))
                return folder
            folder.rmdir()
    return None


def test_program_that_the_kernel_ends_for_want_of_memory_has_no_reward() -> None:
    """It ends the largest one, although another may have taken the memory."""
    marker = f"hungry{os.getpid()}"[:15]
    if (group := memory_group(f"starling-test-{os.getpid()}")) is None:
        pytest.skip("no control group with a limit on memory can be made")

    def move() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for one in psutil.process_iter():
                with suppress(psutil.NoSuchProcess, OSError):
                    if one.name() == marker:
                        Path(group, "cgroup.procs").write_text(str(one.pid))
                        return
            time.sleep(0.05)

    mover = threading.Thread(target=move)
    try:
        with pool_of("process", timeout_s=40.0) as pool:
            mover.start()
            program = HUNGRY.replace("MARKER", marker)
            (score,) = Judge(pool).score(program, tests=[{"input": "", "output": "done"}])
            assert score.status is Status.REWARD_ERROR, score
            assert "for want of memory" in score.problem
    finally:
        mover.join()
        group.rmdir()


def test_programs_need_a_worker() -> None:
    with pytest.raises(ConfigError, match="no sandbox for them: install bubblewrap"):
        check_executor("code")
    check_executor("math")


def test_code_is_resolved_outside_of_a_worker() -> None:  # as the dry run does
    resolve_scorer("code", {"partial": True})
    with pytest.raises(ConfigError, match="'code': timeout_s must be a number above 0"):
        resolve_scorer("code", {"timeout_s": 0})


NOTES = """
import tempfile

from starling.common.sandbox.execution import run_python


def find_notes(completion, reference, prompt_text, metadata):
    with tempfile.NamedTemporaryFile("w", prefix="expected-") as notes:
        notes.write("the expected output")
        notes.flush()
        for _ in range(2):  # the session of the second one is made while there are notes
            result = run_python(completion, timeout_s=20.0)
        assert result.status == 0, result.output
        return float(result.output)
"""


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
def test_program_finds_no_temporary_file_of_its_scorer(
    level: Mechanism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.py").write_text(NOTES)
    scorer = {"name": "notes.py:find_notes", "timeout_s": 200.0}
    with ScoringPool(settings_of(scorer, sandbox=level)) as pool:
        program = "import glob\nprint(len(glob.glob('/tmp/expected-*')))"
        assert Judge(pool).values(program) == [0.0]
