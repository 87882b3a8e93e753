"""Attempts to get out of a sandbox, at every level that this machine offers; the table in the docs says what holds."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from sandbox_levels import offered_first

from starling.common.errors import ConfigError
from starling.common.sandbox import syscalls
from starling.common.sandbox.launch import MECHANISMS, Mechanism, Sandboxing, choose, problem_of, report
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.sandbox.syscalls import landlock_version
from starling.rollout.env.base import AgentTask
from starling.rollout.env.registry import make_environment
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError
from starling.rollout.settings import EnvironmentSettings

HERE = Path(__file__).with_name("hostile_tools.py")
SEARCH = Path(__file__).parents[1] / "memory_search.py"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "sandboxes.md"
NAMES = [
    "leave_daemon", "read_environments", "read_file", "write_file", "list_folder", "signal_process", "open_descriptor",
    "read_memory", "trace", "connect", "connect_abstract", "connect_path", "new_user_namespace", "gain_privileges",
    "multiply", "keep_threads", "fill_disk", "leave_note", "limits", "send_garbage", "keep", "find_in_process",
    "open_memories", "limit_process", "slow_process", "change_file", "send_datagram", "connect_otherwise",
    "open_family", "share_memory", "temporary_folder", "fill_with_files", "nest_folders", "open_kernel_settings",
    "attack_log", "read_terminal", "print_without_end", "add_files", "change_devices", "multiply_threads",
    "leave_dead", "num_dead_beside", "scatter", "leave_daemon_without_first_thread", "multiply_threads_alone",
    "send_netlink", "take_of_user", "lease_file", "is_alive",
]  # fmt: skip
TARGETS = [f"{SEARCH if name in ('keep', 'find_in_process') else HERE}:{name}" for name in NAMES]
LONG_S = 60.0
ALL: tuple[Mechanism, ...] = MECHANISMS
NAMESPACES: tuple[Mechanism, ...] = ("bubblewrap", "namespaces")
NO_PROCESS: tuple[Mechanism, ...] = ("bubblewrap", "namespaces", "landlock")
HOLDS: dict[str, tuple[Mechanism, ...]] = {
    "A process that it leaves behind lives on": ALL,
    "It reads the environment of the service": NO_PROCESS,
    "It reads or traces the memory of the service": NO_PROCESS,
    "It opens a descriptor of the service, as that of a snapshot": NO_PROCESS,
    "It signals the service": NO_PROCESS,
    "It changes limits or processors of the service": ALL,
    "It reads keys and other files that are not declared": NO_PROCESS,
    "It writes files that are not declared": NO_PROCESS,
    "It changes permissions or times of files that are not declared": NO_PROCESS,
    "It connects to a port of this machine": NO_PROCESS,
    "It sends datagrams, or connects otherwise than by TCP": NO_PROCESS,
    "It reaches the host of a virtual machine": ALL,
    "It connects to an abstract socket": NO_PROCESS,
    "It connects to a socket in the file system": NO_PROCESS,
    "It sees files of another session": NAMESPACES,
    "It adds files where other code looks for modules and libraries": NO_PROCESS,
    "It finds temporary files of an earlier session": ALL,
    "It reads the memory of another session, or of the process that starts sessions": NO_PROCESS,
    "It finds in its own process what another session was given": ALL,
    "It leaves shared memory behind": ALL,
    "It starts more processes than `max_tasks`": ALL,
    "It keeps other sessions from starting processes": ALL,
    "It makes namespaces of its own": ALL,
    "It changes settings of the kernel": NO_PROCESS,
    "It gains privileges": ALL,
    "It sends something that is no answer": ALL,
    "It sends lists that take more memory than their bytes": ALL,
    "It fills the disk": ALL,
    "It fills the log": ALL,
    "It takes all watches of files or queued signals of its user, or leases a file": ALL,
    "It reads or changes the service's log, or reads from its terminal": NO_PROCESS,
}
"""Which levels hold off what."""
SINCE_LANDLOCK: dict[str, int] = {
    "It connects to a port of this machine": 4,
    "It connects to an abstract socket": 6,
    "It signals the service": 6,
}
"""Version of Landlock that an attempt's failure needs."""


REPEATED: Mechanism | None = "namespaces" if problem_of("bubblewrap") is None else None
"""Level whose sessions are made by the code of another one that is tested: its attempts are in the campaign."""


def held(title: str) -> Any:
    """Parametrise a test by the levels that hold off the attempt."""
    since = SINCE_LANDLOCK.get(title, 1)
    skip = pytest.mark.skipif(landlock_version() < since, reason=f"it needs version {since} of Landlock")
    marks = {"landlock": [skip], REPEATED: [pytest.mark.campaign]}
    levels = [pytest.param(level, marks=marks.get(level, [])) for level in offered_first(HOLDS[title])]
    return pytest.mark.parametrize("hostile", levels, indirect=True)


def each_in_campaign(first: str, *others: str) -> list[Any]:
    """Return the values of a parameter of which all but the first are in the campaign."""
    return [first, *(pytest.param(other, marks=pytest.mark.campaign) for other in others)]


class Hostile:
    """A sandbox with the hostile tools."""

    def __init__(self, level: Mechanism) -> None:
        self.level = level
        self.sandbox = Sandbox(TARGETS, what="Tool", level=level, needs=SandboxNeeds(max_tasks=60))

    async def call(self, name: str, timeout_s: float = LONG_S, **named: Any) -> Any:
        async with self.sandbox.session() as session:
            return await session.call(NAMES.index(name), named, timeout_s=timeout_s)

    def attempt(self, name: str, **named: Any) -> Any:
        return asyncio.run(self.call(name, **named))

    def fails(self, tool: str, problem: str = ".", **named: Any) -> None:
        with pytest.raises(SandboxError, match=problem):  # noqa: PT012 - a success names what it reached
            reached = self.attempt(tool, **named)
            pytest.fail(f"{tool} reached {reached!r} at level {self.level}")


MADE: dict[Mechanism, Hostile] = {}


@pytest.fixture(scope="module", autouse=True)
def all_levels() -> Iterator[None]:
    yield
    for hostile in MADE.values():
        hostile.sandbox.close()
    MADE.clear()


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Hostile:
    level: Mechanism = request.param
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    if level not in MADE:
        MADE[level] = Hostile(level)
    return MADE[level]


@contextlib.contextmanager
def without_other_user(level: Mechanism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """A sandbox in which the code's user is the service's, also where root starts it."""
    (tmp_path / "closed").mkdir(mode=0o700)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "closed"))
    made = Hostile(level)
    try:
        yield made
    finally:
        made.sandbox.close()


@pytest.fixture
def service() -> Iterator[int]:
    """A process of the same user as the service, with a secret in its environment and an open memfd at 9."""
    code = "import os, sys, time; os.dup2(os.memfd_create('snapshot'), 9); print('ready', flush=True); time.sleep(600)"
    environment = {**os.environ, "STARLING_SECRET": "the-secret-of-the-service"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def marked(marker: str) -> list[int]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if marker in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


@pytest.mark.sample(1)
@held("A process that it leaves behind lives on")
def test_daemon_is_killed_with_its_session(hostile: Hostile) -> None:
    marker = f"daemon-{hostile.level}-{os.getpid()}"

    async def run() -> None:
        async with hostile.sandbox.session() as session:
            await session.call(NAMES.index("leave_daemon"), {"marker": marker}, timeout_s=LONG_S)
            deadline = time.monotonic() + LONG_S
            while len(marked(marker)) < 2:
                assert time.monotonic() < deadline, "they did not start"
                await asyncio.sleep(0.02)

    asyncio.run(run())
    deadline = time.monotonic() + LONG_S
    while marked(marker):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def named(name: str) -> list[int]:
    """Return the processes of which a living thread has a name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        with contextlib.suppress(OSError):
            own, _, fields = path.read_bytes().partition(b"(")[2].rpartition(b")")
            if own.decode(errors="replace") == name and fields.split()[0] not in b"ZX":
                found.append(int(path.parts[2]))
    return found


@held("A process that it leaves behind lives on")
def test_process_whose_first_thread_has_ended_is_killed_with_its_session(hostile: Hostile) -> None:
    name = f"{hostile.level[:4]}-{os.getpid()}"
    leave = NAMES.index("leave_daemon_without_first_thread")

    async def run() -> None:
        async with hostile.sandbox.session() as session:
            await session.call(leave, {"marker": name}, timeout_s=LONG_S)
            deadline = time.monotonic() + LONG_S
            while not any(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in named(name)):
                assert time.monotonic() < deadline, "its first thread has not ended"
                await asyncio.sleep(0.02)

    asyncio.run(run())
    deadline = time.monotonic() + LONG_S
    while left := named(name):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail("it lives on")
        time.sleep(0.05)


@held("It reads the environment of the service")
def test_environment_of_service_is_hidden(hostile: Hostile, service: int) -> None:
    assert hostile.attempt("read_environments", marker="the-secret-of-the-service") == []


@held("It reads or traces the memory of the service")
def test_memory_of_service_is_hidden(hostile: Hostile, service: int) -> None:
    hostile.fails("read_memory", pid=service)
    hostile.fails("trace", pid=service)


@held("It opens a descriptor of the service, as that of a snapshot")
def test_descriptors_of_service_are_hidden(hostile: Hostile, service: int) -> None:
    hostile.fails("open_descriptor", pid=service, descriptor=9)


@held("It signals the service")
def test_service_cannot_be_signalled(hostile: Hostile, service: int) -> None:
    hostile.fails("signal_process", pid=service)


@held("It changes limits or processors of the service")
def test_service_cannot_be_limited(hostile: Hostile, service: int) -> None:
    before = psutil.Process(service).rlimit(psutil.RLIMIT_FSIZE), os.sched_getaffinity(service)
    hostile.fails("limit_process", "ProcessLookupError|PermissionError", pid=service)
    hostile.fails("slow_process", "ProcessLookupError|PermissionError", pid=service)
    assert (psutil.Process(service).rlimit(psutil.RLIMIT_FSIZE), os.sched_getaffinity(service)) == before


@held("It reads keys and other files that are not declared")
def test_keys_are_hidden(hostile: Hostile, tmp_path: Path) -> None:
    key = tmp_path / "rollout-0.json"
    key.write_text("the key")
    key.chmod(0o600)
    hostile.fails("read_file", path=str(key))
    hostile.fails("list_folder", path=str(tmp_path))
    hostile.fails("read_file", path=str(Path(__file__).parents[3] / "README.md"))


@held("It writes files that are not declared")
def test_files_cannot_be_written(hostile: Hostile, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("")
    target.chmod(0o666)
    hostile.fails("write_file", path=str(target))
    hostile.fails("write_file", path=str(HERE))
    hostile.fails("write_file", path=os.__file__)
    assert target.read_text() == ""


@held("It changes permissions or times of files that are not declared")
def test_files_cannot_be_changed(hostile: Hostile, tmp_path: Path) -> None:
    target = tmp_path / "journal.db"
    target.write_text("")
    target.chmod(0o666)
    before = target.stat()
    hostile.attempt("change_file", path=str(target))
    assert target.stat() == before
    assert os.listxattr(target) == []


@held("It connects to a port of this machine")
def test_ports_of_machine_are_closed(hostile: Hostile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hostile.fails("connect", port=server.getsockname()[1])


@held("It sends datagrams, or connects otherwise than by TCP")
def test_network_is_closed_to_other_protocols(hostile: Hostile) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with contextlib.suppress(SandboxError):  # in a network of its own it only reaches itself
            hostile.attempt("send_datagram", port=receiver.getsockname()[1])
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for way in ("multipath", "sendto", "sendmsg"):
            with contextlib.suppress(SandboxError):
                hostile.attempt("connect_otherwise", port=server.getsockname()[1], way=way)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@held("It sends datagrams, or connects otherwise than by TCP")
def test_netlink_reaches_no_other_process(hostile: Hostile) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_USERSOCK) as receiver:
        receiver.bind((0, 0))
        with contextlib.suppress(SandboxError):
            hostile.attempt("send_netlink", address=receiver.getsockname()[0])
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


@held("It reaches the host of a virtual machine")
def test_other_families_of_sockets_are_refused(hostile: Hostile) -> None:
    hostile.fails("open_family", "Address family not supported", family=40)  # AF_VSOCK


@held("It connects to an abstract socket")
def test_abstract_sockets_are_hidden(hostile: Hostile) -> None:
    name = f"starling-escape-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        hostile.fails("connect_abstract", address=name)


@held("It connects to a socket in the file system")
def test_sockets_in_file_system_are_hidden(hostile: Hostile, tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        hostile.fails("connect_path", path=str(path))


@held("It sees files of another session")
def test_sessions_share_no_files(hostile: Hostile) -> None:
    async def run() -> None:
        note = asyncio.create_task(hostile.call("leave_note", path="/tmp/note"))
        await asyncio.sleep(0.5)
        for path in ("/tmp/note", "/dev/shm/note"):
            with pytest.raises(SandboxError, match="No such file"):
                await hostile.call("read_file", path=path)
        await note

    asyncio.run(run())


@held("It adds files where other code looks for modules and libraries")
def test_files_cannot_be_added_to_the_view(hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders are its user's, who the code is; only with root outside, it is another one."""
    folders = ["/", "/etc", "/dev", "/dev/shm/..", os.getcwd(), *map(str, HERE.parents), *map(str, tmp_path.parents)]
    folders = [folder for folder in folders if folder != "/tmp"]
    assert hostile.attempt("add_files", folders=folders) == []
    with without_other_user(hostile.level, tmp_path, monkeypatch) as as_owner:
        assert as_owner.attempt("add_files", folders=folders) == []


@pytest.mark.parametrize("hostile", NAMESPACES, indirect=True)
def test_permissions_of_devices_cannot_be_changed(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_other_user(hostile.level, tmp_path, monkeypatch) as as_owner:
        assert as_owner.attempt("change_devices") == []


@held("It finds temporary files of an earlier session")
def test_temporary_files_end_with_their_session(hostile: Hostile) -> None:
    own = hostile.attempt("temporary_folder", text="a note")
    assert "left" not in own
    assert hostile.attempt("temporary_folder", text="another") == own


@held("It reads the memory of another session, or of the process that starts sessions")
def test_memory_of_other_sessions_is_hidden(hostile: Hostile) -> None:
    async def run() -> Any:
        async with hostile.sandbox.session() as other:
            await other.call(NAMES.index("is_alive"), {}, timeout_s=LONG_S)
            return await hostile.call("open_memories")

    assert asyncio.run(run()) == []


@held("It leaves shared memory behind")
def test_shared_memory_ends_with_its_session(hostile: Hostile) -> None:
    key = os.getpid()
    with contextlib.suppress(SandboxError):
        hostile.attempt("share_memory", key=key)
    found = ctypes.CDLL(None).shmget(key, 0, 0)
    if found >= 0:
        ctypes.CDLL(None).shmctl(found, 0, None)  # IPC_RMID
    assert found < 0


@held("It finds in its own process what another session was given")
def test_sessions_find_nothing_of_earlier_ones(hostile: Hostile) -> None:
    async def play(text: str) -> Any:
        task = AgentTask("http://127.0.0.1", "earlier-2222", "model", [], reference="earlier-3333")
        async with hostile.sandbox.session() as session:
            assert await session.play(NAMES.index("keep"), task, {"text": text}) == 2

    async def find_all() -> list[list[str]]:
        """Search in the session that was forked before the other one began, and in one that was forked meanwhile."""
        async with hostile.sandbox.session() as kept:
            await kept.call(NAMES.index("keep"), {"text": "earlier-4444"}, timeout_s=LONG_S)
            searches = [await hostile.call("find_in_process", pattern="earlier-[0-9]+") for _ in range(2)]
            pattern = {"pattern": "earlier-[4]+"}
            own = await kept.call(NAMES.index("find_in_process"), pattern, timeout_s=LONG_S)
            assert own, "a session finds what it was given itself"
        return searches

    assert hostile.attempt("keep", text="earlier-1111") == 1
    asyncio.run(play("earlier-5555"))
    assert asyncio.run(find_all()) == [[], []]


@pytest.mark.sample(1)
@held("It starts more processes than `max_tasks`")
def test_number_of_processes_is_limited(hostile: Hostile) -> None:
    if hostile.level in NAMESPACES:
        hostile.fails("multiply", r"after \d\d processes", limit=500)
    else:
        hostile.fails("multiply", "it ended its process", limit=100, wait_s=LONG_S)
    assert hostile.attempt("is_alive"), "and it costs no other session"


@pytest.mark.sample(1)
@held("It keeps other sessions from starting processes")
def test_tasks_of_one_session_cost_no_other(hostile: Hostile) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as kept:
            other = await kept.enter_async_context(hostile.sandbox.session())
            assert await other.call(NAMES.index("keep"), {"text": "before"}, timeout_s=LONG_S) == 1
            for _ in range(3):
                session = await kept.enter_async_context(hostile.sandbox.session())
                limit = 500 if hostile.level in NAMESPACES else 50  # at which the session alone would be killed
                with contextlib.suppress(SandboxError):  # without namespaces it is killed when others need more
                    await session.call(NAMES.index("keep_threads"), {"limit": limit}, timeout_s=LONG_S)
                assert await hostile.call("multiply", limit=10, wait_s=0.5) == 10
            assert await other.call(NAMES.index("keep"), {"text": "after"}, timeout_s=LONG_S) == 2

    asyncio.run(run())


TOO_MANY = each_in_campaign("multiply_threads", "multiply_threads_alone", "multiply", "leave_dead")


@pytest.mark.parametrize("tool", TOO_MANY)
@pytest.mark.parametrize("level", ["landlock", "process"])
def test_only_the_session_with_too_many_tasks_is_killed(level: Mechanism, tool: str) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    hostile = Hostile(level)

    async def run() -> None:
        async with hostile.sandbox.session() as other:
            keep = NAMES.index("keep")
            assert await other.call(keep, {"text": "before"}, timeout_s=LONG_S) == 1
            with pytest.raises(SandboxError, match="it ended its process"):
                await hostile.call(tool, limit=100, wait_s=LONG_S)
            assert await other.call(keep, {"text": "after"}, timeout_s=LONG_S) == 2

    try:
        asyncio.run(run())
    finally:
        hostile.sandbox.close()


@pytest.mark.parametrize("level", ["landlock", "process"])
def test_sandbox_is_killed_when_no_session_has_the_tasks(level: Mechanism) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    hostile = Hostile(level)
    try:
        hostile.fails("scatter", "it ended its process", limit=100, wait_s=LONG_S)
        assert hostile.attempt("is_alive"), "the sandbox starts again"
    finally:
        hostile.sandbox.close()


IN_NAMESPACES = 'echo 4000 > /proc/sys/kernel/pid_max && exec timeout -s KILL 120 $0 -c "$1" $2 $3 $4'
BOMB = """
import asyncio, sys
from starling.common.sandbox.settings import SandboxNeeds
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError

async def call(target, **named):
    async with sandbox.session() as session:
        return await session.call(target, named, timeout_s=60.0)

tools, level, kind = sys.argv[1:]
names = [f"{tools}:bomb", f"{tools}:is_alive"]
sandbox = Sandbox(names, what="Tool", level=level, needs=SandboxNeeds(max_tasks=60))
try:
    asyncio.run(call(0, kind=kind))
except SandboxError as error:
    print("ended:", error, file=sys.stderr)
print("next:", asyncio.run(call(1)), file=sys.stderr)
sandbox.close()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", each_in_campaign("forks", "sessions", "threads"))
@pytest.mark.parametrize("level", ["landlock", "process"])
def test_bomb_is_ended(level: Mechanism, kind: str) -> None:
    """In a PID namespace of its own, which has 4,000 process ids: before Linux 6.14 that number is the machine's."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if os.getuid() != 0 or release < (6, 14):
        pytest.skip("only root can limit the process ids of a namespace, since Linux 6.14")
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no PID namespace")
    command = [*apart, "sh", "-c", IN_NAMESPACES, sys.executable, BOMB, str(HERE), level, kind]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    found = [line for line in ran.stderr.splitlines() if line.startswith(("ended:", "next:"))]
    assert found == ["ended: it ended its process", "next: True"], ran


@pytest.mark.parametrize("level", ["landlock", "process"])
def test_dead_processes_of_sessions_are_reaped(level: Mechanism) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    hostile = Hostile(level)
    try:
        for _ in range(3):
            assert hostile.attempt("leave_dead", limit=10, wait_s=0) == 10
        deadline = time.monotonic() + LONG_S
        while hostile.attempt("num_dead_beside") >= 10:
            assert time.monotonic() < deadline, "they are left"
    finally:
        hostile.sandbox.close()


@held("It makes namespaces of its own")
def test_no_namespace_can_be_made(hostile: Hostile) -> None:
    hostile.fails("new_user_namespace", "PermissionError")


@held("It changes settings of the kernel")
def test_settings_of_kernel_cannot_be_written(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by root whose packages no other user can read, the code's user is root, which owns these settings."""
    assert hostile.attempt("open_kernel_settings") == []
    with without_other_user(hostile.level, tmp_path, monkeypatch) as as_root:
        assert as_root.attempt("open_kernel_settings") == []


def test_sandbox_whose_user_is_root_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start it")
    if not (sandboxing := choose("auto")).isolates:
        pytest.skip(f"this machine offers no namespaces: {sandboxing.missing}")
    with structlog.testing.capture_logs() as logged:
        report(sandboxing, "tool")
        (tmp_path / "closed").mkdir(mode=0o700)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "closed"))
        report(sandboxing, "tool")
    assert [line["event"] for line in logged] == ["sandbox", "sandbox_weak"]
    assert f"for whom {tmp_path / 'closed'} cannot be read" in logged[1]["missing"]


@pytest.mark.parametrize("level", MECHANISMS)
def test_sandbox_that_shares_its_user_with_the_service_is_reported(
    level: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with structlog.testing.capture_logs() as logged:
        report(Sandboxing(level, "" if level in NAMESPACES else "no namespaces here"), "tool")
    (line,) = logged
    assert (line["event"], line["mechanism"]) == ("sandbox_weak", level)
    assert "a user of the code's own: it is user 4321, as this service" in line["missing"]
    assert "start this service by root, or give the other services of this machine other users" in line["missing"]


@pytest.mark.parametrize(
    ("version", "gaps"),
    [
        (7, ""),
        (5, "version 5 of Landlock, which limits no signal and no abstract socket (Linux 6.12 does)"),
        (
            3,
            "3 of Landlock, which limits no TCP connection (Linux 6.7 does) and no signal and no abstract socket (",
        ),
    ],
)
def test_level_of_an_old_landlock_is_reported_with_its_gaps(
    version: int, gaps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "landlock_version", lambda: version)
    with structlog.testing.capture_logs() as logged:
        report(Sandboxing("landlock", "no namespaces here"), "tool")
    (line,) = logged
    assert line["event"] == "sandbox_weak"
    assert line["missing"].startswith("no namespaces here")
    assert gaps in line["missing"]
    assert ("Landlock" in line["missing"]) == bool(gaps)


@held("It gains privileges")
def test_no_privilege_can_be_gained(hostile: Hostile) -> None:
    hostile.fails("gain_privileges", "no new privileges")


@pytest.mark.parametrize("kind", each_in_campaign("deep", "noise", "empty", "other type", "keys"))
@held("It sends something that is no answer")
def test_garbage_costs_one_call(hostile: Hostile, kind: str) -> None:
    hostile.fails("send_garbage", kind=kind)
    assert hostile.attempt("is_alive")


@held("It sends lists that take more memory than their bytes")
def test_small_values_cannot_take_large_memory(hostile: Hostile) -> None:
    """60 million empty lists would take 4 GiB of the rollout, which does not make them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hostile.fails("send_garbage", "60 MiB that are not one text", kind="lists")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB"


@held("It fills the disk")
def test_files_are_limited(hostile: Hostile) -> None:
    hostile.fails("fill_disk", "File too large|No space left")


@contextlib.contextmanager
def stderr_is(descriptor: int) -> Iterator[None]:
    """Let this process, as a service, print its log to `descriptor`."""
    saved = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@held("It reads or changes the service's log, or reads from its terminal")
def test_log_of_service_is_out_of_reach(hostile: Hostile, tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    log.write_text("a line of the service\n")
    log.chmod(0o666)
    with log.open("a") as file, stderr_is(file.fileno()):
        printing = Hostile(hostile.level)
        try:
            assert printing.attempt("attack_log", text="a line of the service") == []
        finally:
            printing.sandbox.close()
    assert "a line of the service\n" in log.read_text()


@pytest.mark.sample(1)
@held("It reads or changes the service's log, or reads from its terminal")
def test_terminal_of_service_is_out_of_reach(hostile: Hostile) -> None:
    ours, terminal = pty.openpty()
    os.write(ours, b"a password\n")
    try:
        with stderr_is(terminal):
            printing = Hostile(hostile.level)
            try:
                printing.fails("read_terminal", "TimeoutError|Bad file descriptor", wait_s=0.5)
            finally:
                printing.sandbox.close()
    finally:
        os.close(ours)
        os.close(terminal)


@held("It fills the log")
def test_output_is_bounded(hostile: Hostile, capfd: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs() as logged:
        printing = Hostile(hostile.level)
        try:
            assert printing.attempt("print_without_end", num_bytes=64 << 20)
        finally:
            printing.sandbox.close()
    lines = [line for line in logged if line["event"] == "sandbox_output"]
    assert lines
    assert sum(len(line["text"]) for line in lines) <= 1 << 20
    assert max(len(line["text"]) for line in lines) <= 1000
    assert capfd.readouterr().err == ""


@held("It takes all watches of files or queued signals of its user, or leases a file")
def test_what_a_user_may_have_on_the_machine_is_left_to_others(hostile: Hostile) -> None:
    assert hostile.attempt("take_of_user") == []
    hostile.fails("lease_file", "PermissionError")


@held("It fills the disk")
def test_crash_writes_no_memory_to_disk(hostile: Hostile) -> None:
    """A limit of 0 would not do: for a program that takes the dump (`core_pattern` with `|`), only 1 prevents one."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    assert hostile.attempt("limits") == (0 if most == 0 else 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", ["named", "open", "mapped"])
@pytest.mark.parametrize("level", ["landlock", "process"])
def test_sandbox_with_too_many_files_on_disk_is_killed(
    level: Mechanism, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    monkeypatch.setattr("starling.common.sandbox.launch.TMP_BYTES", 8 << 20)
    hostile = Hostile(level)
    try:
        hostile.fails("fill_with_files", "it ended its process", num_bytes=16 << 20, kept=kept)
        assert hostile.attempt("is_alive"), "the sandbox starts again"
    finally:
        hostile.sandbox.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", MECHANISMS)
def test_deep_folders_are_removed(level: Mechanism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    hostile = Hostile(level)
    try:
        assert hostile.attempt("nest_folders", depth=2000)
        assert hostile.attempt("temporary_folder", text="") is not None
    finally:
        hostile.sandbox.close()
    assert os.listdir(tmp_path) == []


def test_declared_things_are_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("cat dog")
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    needs = SandboxNeeds(network=True, paths=(tmp_path / "data",), writable_paths=(tmp_path / "out",))
    made = Sandbox(TARGETS, what="Tool", needs=needs)

    async def call(name: str, **named: Any) -> Any:
        async with made.session() as session:
            return await session.call(NAMES.index(name), named, timeout_s=LONG_S)

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert asyncio.run(call("connect", port=server.getsockname()[1]))
        assert asyncio.run(call("read_file", path=str(tmp_path / "data" / "words.txt"))) == "cat dog"
        assert asyncio.run(call("write_file", path=str(tmp_path / "out" / "new.txt")))
        if made.sandboxing.mechanism != "process":
            with pytest.raises(SandboxError, match=r"Read-only file system|Permission denied"):
                asyncio.run(call("write_file", path=str(tmp_path / "data" / "words.txt")))
    finally:
        made.close()
    assert (tmp_path / "out" / "new.txt").read_text() == "# written\n"


def test_tool_gets_what_it_needs_and_no_other_does(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "words.txt").write_text("cat dog")
    tools = [
        {"function": f"{HERE}:read_file", "needs": {"paths": [str(tmp_path / "words.txt")]}},
        {"function": f"{HERE}:read_file", "name": "read_other"},
    ]
    environment = make_environment(EnvironmentSettings(kind="tools", options={"tools": tools}))
    assert environment is not None
    tool_of = environment.environment.keywords["tools"]  # type: ignore[attr-defined]

    async def read(name: str) -> Any:
        async with tool_of[name].sandbox.session() as session:
            path = str(tmp_path / "words.txt")
            return await session.call(tool_of[name].target, {"path": path}, timeout_s=LONG_S)

    try:
        assert asyncio.run(read("read_file")) == "cat dog"
        if choose("auto").mechanism != "process":
            with pytest.raises(SandboxError, match=r"No such file|Permission denied"):
                asyncio.run(read("read_other"))
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("needs", "problem"),
    [
        ({"paths": ["/nowhere/at/all"]}, "paths has '/nowhere/at/all', which does not exist"),
        ({"devices": ["/dev/no_such_device"]}, "devices has '/dev/no_such_device', which does not exist"),
    ],
)
def test_missing_needs_are_named(needs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Sandbox([f"{HERE}:limits"], what="Tool", needs=SandboxNeeds.model_validate(needs))


def test_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it has read its setup, which resets the connection."""
    monkeypatch.setenv("PYTHONHASHSEED", "none")
    with pytest.raises(ConfigError, match="importing ended the process"):
        Sandbox([f"{HERE}:limits"], what="Tool", level="process", needs=SandboxNeeds(variables=("PYTHONHASHSEED",)))


def test_auto_takes_strongest_level() -> None:
    offered = [mechanism for mechanism in MECHANISMS if problem_of(mechanism) is None]
    assert choose("auto").mechanism == offered[0]


WITHOUT_CAPABILITIES = """#!/bin/sh
exec {bwrap} "$1" "$2" --cap-drop ALL "$3" "$4" "$5" "$6" "$7" "$8"
"""
"""bubblewrap where a security module takes all capabilities from what it starts, as Ubuntu's AppArmor profile does."""


def test_bubblewrap_whose_payload_can_make_no_sessions_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := problem_of("bubblewrap"):
        pytest.skip(f"this machine does not offer the level bubblewrap: {problem}")
    program = tmp_path / "bwrap"
    program.write_text(WITHOUT_CAPABILITIES.format(bwrap=shutil.which("bwrap")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    problem_of.cache_clear()
    try:
        assert "Operation not permitted" in str(problem_of("bubblewrap"))
        assert choose("auto").mechanism != "bubblewrap"
    finally:
        problem_of.cache_clear()


WITHOUT_NAMESPACES = """
from starling.common.errors import ConfigError
from starling.common.sandbox import syscalls
from starling.common.sandbox.launch import choose

syscalls.forbid_new_privileges()
assert syscalls.forbid_kernel_interfaces()
chosen = choose("auto")
print(chosen.mechanism)
print(chosen.missing)
for level in ("required", "bubblewrap"):
    try:
        choose(level)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_machine_that_forbids_namespaces_falls_back_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NAMESPACES], capture_output=True, text=True, check=True)
    mechanism, missing, required, bubblewrap = done.stdout.splitlines()
    assert mechanism == ("landlock" if landlock_version() else "process")
    assert "Operation not permitted" in missing
    assert "'required' needs namespaces, which this machine forbids" in required
    assert "install bubblewrap" in required
    assert "'bubblewrap' cannot be had on this machine: " in bubblewrap


def test_documentation_says_what_each_level_holds_off() -> None:
    rows = {cells[0]: cells[1:] for cells in map(table_row, PAGE.read_text().splitlines()) if len(cells) == 5}
    documented = {
        title: tuple(level for level, cell in zip(MECHANISMS, cells, strict=True) if cell == "yes")
        for title, cells in rows.items()
        if set(cells) <= {"yes", "no"}
    }
    assert documented == HOLDS


def table_row(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
