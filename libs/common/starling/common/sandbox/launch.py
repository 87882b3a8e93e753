"""Start of processes in sandboxes, by the strongest means that the machine offers and the settings allow.

    bubblewrap    all namespaces, made by `bwrap`
    namespaces    the same ones, made by `starling.common.sandbox.enter`
    landlock      no namespaces: the kernel's Landlock limits files, tracing, signals and TCP
    process       neither: a process of its own with limits and a scrubbed environment

The payload, which is always one of our own modules, calls `starling.common.sandbox.inside.settle` first.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

import structlog

from starling.common.errors import ConfigError
from starling.common.sandbox import enter, syscalls
from starling.common.sandbox.inside import INNER_UID
from starling.common.sandbox.interpreter import Interpreter
from starling.common.sandbox.memory import limit_memory
from starling.common.sandbox.output import OutputAllowance, relay_output
from starling.common.sandbox.processes import descendants, kill_all, remove_tree
from starling.common.sandbox.settings import SandboxLevel, SandboxNeeds
from starling.common.sandbox.view import TMP_BYTES, Kind, View, view_of
from starling.common.settings import environment_variables

log = structlog.get_logger(__name__)

Mechanism = Literal["bubblewrap", "namespaces", "landlock", "process"]
MECHANISMS: Final[tuple[Mechanism, ...]] = ("bubblewrap", "namespaces", "landlock", "process")
OWN_UID: Final = 65533
"""User outside of a sandbox that root starts."""
_START_S: Final = 20.0
_KILLED_S: Final = 5.0
_PRINTED_S: Final = 1.0
"""How long the last lines of a killed process may take to be logged."""
_SINCE_LANDLOCK: Final = {
    4: "TCP connection (Linux 6.7 does)",
    6: "signal and no abstract socket (Linux 6.12 does)",
}
"""What the level `landlock` holds off from a version of Landlock on."""
_GPU_VARIABLES: Final = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_")
_ROOT: Final = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True, slots=True)
class Sandboxing:
    """How the sandboxes of one part are made."""

    mechanism: Mechanism
    missing: str = ""
    """Why it is not a stronger one; empty for namespaces."""
    is_chosen: bool = False
    """Whether the settings name it."""

    @property
    def isolates(self) -> bool:
        """Whether the processes have namespaces of their own."""
        return self.mechanism in ("bubblewrap", "namespaces")


def choose(level: SandboxLevel) -> Sandboxing:
    """Return how to make sandboxes at `level`.

    Raises:
        ConfigError: `level` demands what this machine does not offer.
    """
    if level == "process":
        return Sandboxing("process", "the setting is `process`", is_chosen=True)
    if level in ("bubblewrap", "namespaces", "landlock"):
        if problem := problem_of(level):
            raise ConfigError(f"The sandbox level {level!r} cannot be had on this machine: {problem}.")
        return Sandboxing(level, "the setting is `landlock`" if level == "landlock" else "", is_chosen=True)
    for mechanism in ("bubblewrap", "namespaces"):
        if problem_of(mechanism) is None:
            return Sandboxing(mechanism)
    missing = problem_of("namespaces") or ""
    if level == "required":
        raise ConfigError(
            f"The sandbox level 'required' needs namespaces, which this machine forbids ({missing}): install "
            "bubblewrap, allow user namespaces (in a container: by its seccomp profile), or set the level to 'auto'."
        )
    return Sandboxing("landlock" if problem_of("landlock") is None else "process", missing)


def report(sandboxing: Sandboxing, what: str) -> None:
    """Log how strong the sandboxes of `what` are; a warning names what is missing."""
    missing = "" if sandboxing.isolates else sandboxing.missing
    if shared := _shared_user(isolates=sandboxing.isolates):
        missing = f"{missing}; {shared}" if missing else shared
    if sandboxing.mechanism == "landlock" and (gaps := landlock_gaps(syscalls.landlock_version())):
        missing = f"{missing}; {gaps}" if missing else gaps
    if missing or not sandboxing.isolates:
        log.warning("sandbox_weak", of=what, mechanism=sandboxing.mechanism, missing=missing)
    else:
        log.info("sandbox", of=what, mechanism=sandboxing.mechanism)


def _shared_user(*, isolates: bool) -> str:
    """Return what is missing where the code is the service's user outside; empty if it has one of its own."""
    taken = "can use up what the kernel allows a user on this machine, as watches of epoll, without which services end"
    if user := os.getuid():
        return (
            f"a user of the code's own: it is user {user}, as this service, and {taken} (start this service by root, "
            "or give the other services of this machine other users)"
        )
    if closed := _closed_to_others(isolates=isolates):
        unlimited = ", so that their number is not limited" if isolates else ""
        return (
            f"another user than root, for whom {closed} cannot be read (`chmod -R o+rX` it): root owns the code's "
            f"processes{unlimited}; it {taken}"
        )
    return ""


def landlock_gaps(version: int) -> str:
    """Return what the level `landlock` does not hold off with a version of Landlock, and which kernel does."""
    gaps = [what for first, what in _SINCE_LANDLOCK.items() if version < first]
    return f"this kernel has version {version} of Landlock, which limits no {' and no '.join(gaps)}" if gaps else ""


@cache
def problem_of(mechanism: Mechanism) -> str | None:
    """Return why sandboxes cannot be made in this way here; None if they can.

    Tries it once, with a session inside, in some tens of milliseconds.
    """
    if sys.platform != "linux":
        return None if mechanism == "process" else "it needs Linux"
    if mechanism == "process":
        return None
    if mechanism == "landlock":
        return None if syscalls.landlock_version() else "the kernel has no Landlock, or it is not enabled"
    if mechanism == "bubblewrap" and shutil.which("bwrap") is None:
        return "there is no program `bwrap`"
    printed = os.memfd_create("starling-sandbox-test", 0)
    try:
        view = view_of(SandboxNeeds(), ())
        code = f"import sys; sys.path.append({_ROOT!r}); from starling.common.sandbox.inside import try_session; "
        command = [sys.executable, "-I", "-S", "-c", f"{code}try_session({mechanism!r})"]
        process = BoxProcess(command, Sandboxing(mechanism), SandboxNeeds(), view, output=printed)
        with contextlib.closing(process):
            if process.wait(_START_S) == 0:
                return None
        os.lseek(printed, 0, os.SEEK_SET)
        lines = os.read(printed, 4096).decode("utf-8", "replace").split("\n")
        return next((line for line in lines if line), process.problem or "its test failed")
    except (OSError, ConfigError) as error:
        return str(error)
    finally:
        os.close(printed)


class BoxProcess:
    """One process in a sandbox of its own, with everything that it starts.

    Args:
        command: the program and its arguments.
        sandboxing: from `choose`.
        needs: what the code inside may reach.
        view: from `view_of`.
        pass_fds: descriptors that the process inherits, at the same numbers.
        dies_with_thread: let the kernel kill the process when the thread that calls this ends.
        inherits_path: let Python find modules where this process does, and not only where the environment says.
        ports: TCP ports to which Landlock lets it connect.
        what: what it is, for the log lines with what it prints.
        output: descriptor for what the process, and what makes the sandbox, print; None for the log.
        allowance: how much of that the log takes; sandboxes may share one.
        memory_mb: limit on the memory of the process with all that it starts, in MiB; 0 for none.
        interpreter: of the Python environment that it uses; None for that of this process.
        variables: further variables of its environment.
        nice: how much lower than its own the kernel's priority for its session is; where the kernel does not group
            processes by sessions, the payload lowers that of its processes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        sandboxing: Sandboxing,
        needs: SandboxNeeds,
        view: View,
        *,
        pass_fds: Iterable[int] = (),
        dies_with_thread: bool = False,
        inherits_path: bool = False,
        ports: tuple[int, ...] = (),
        what: str = "sandbox",
        output: int | None = None,
        allowance: OutputAllowance | None = None,
        memory_mb: int = 0,
        interpreter: Interpreter | None = None,
        variables: Mapping[str, str] = {},
        nice: int = 0,
    ) -> None:
        self.sandboxing = sandboxing
        self.problem = ""
        self.status: int | None = None
        """Exit status of the process; 128 and the signal's number if one killed it; None while it runs."""
        self._life = -1
        maps_users = os.getuid() == 0 and not _closed_to_others(isolates=sandboxing.isolates, prefixes=view.prefixes)
        self._folder = None if sandboxing.isolates else _own_folder(maps_users=maps_users)
        environment = scrubbed_environment(
            needs, self._folder or "/tmp", inherits_path=inherits_path, interpreter=interpreter
        )
        environment.update(variables)
        self._relay: threading.Thread | None = None
        printed = output
        if printed is None:
            printed, self._relay = relay_output(what, allowance)
        self._memory = limit_memory(memory_mb)
        order = _Order(
            list(command),
            sandboxing,
            needs,
            view,
            tuple(pass_fds),
            dies_with_thread,
            maps_users,
            environment,
            ports,
            printed,
            self._memory.entry,
        )
        first = self._start(order, printed if output is None else -1)
        self.pid = self._child.pid
        """Process id of the outermost process."""
        self._watch(order, first, nice)

    def _start(self, order: _Order, printed: int) -> int | None:
        """Start the process, and close the descriptor `printed` unless it is -1; return the id of the first inside."""
        try:
            self._child, first = order.start()
        except BaseException:  # raised again; nothing else closes the watch of the memory
            self._memory.close()
            raise
        finally:
            if printed >= 0:
                os.close(printed)
        return first

    def _watch(self, order: _Order, first: int | None, nice: int) -> None:
        """Set the priority of the process that was started, and watch its life and memory."""
        if nice:
            with contextlib.suppress(OSError):  # the kernel does not group, or has done it for this user just now
                Path(f"/proc/{self.pid}/autogroup").write_text(str(nice))
        if self.sandboxing.isolates and first is None:
            self._child.kill()
            self.status = self._child.wait(_KILLED_S)
            self.problem = order.problem or "it ended at once"
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._life = os.pidfd_open(self._child.pid if first is None else first)
            self._memory.watch(self._child.pid if first is None else first, self._kill_first)

    @property
    def exceeded_memory(self) -> bool:
        """Whether it was killed at its limit on memory."""
        return self._memory.is_exceeded

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the status, or None if it runs on."""
        if self.status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(timeout_s)
                self.status = code if code >= 0 else 128 - code
        return self.status

    def _kill_first(self) -> None:
        """Have everything that it has started killed; does not wait."""
        if self.sandboxing.isolates:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._life, signal.SIGKILL)
        else:
            self._child.terminate()  # it kills all that it has started, also what a look from here misses

    def kill(self) -> None:
        """Kill the process and everything that it has started, and wait until they are gone."""
        if self.sandboxing.isolates:
            if self._life >= 0:
                self._kill_first()
                poller = select.poll()
                poller.register(self._life, select.POLLIN)
                poller.poll(_KILLED_S * 1000)
        elif self._child.poll() is None:
            self._kill_first()
            if self.wait(_KILLED_S) is None:
                kill_all(lambda: descendants(self._child.pid))
        with contextlib.suppress(ProcessLookupError):
            if self.wait(0.5) is None:
                self._child.kill()
        self.wait(_KILLED_S)

    def close(self) -> None:
        """Kill, and give up all descriptors."""
        self._memory.leave()  # it kills by a descriptor that is closed here
        self.kill()
        self._memory.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        if self._folder is not None:
            remove_tree(self._folder)
        if self._relay is not None:
            self._relay.join(_PRINTED_S)


def scrubbed_environment(
    needs: SandboxNeeds, folder: str, *, inherits_path: bool, interpreter: Interpreter | None = None
) -> dict[str, str]:
    """Return the whole environment of user code: enough to find modules and programs, and what is declared.

    `folder` is for its temporary files. Code of another interpreter gets no `PYTHONPATH`: that is for this one.
    """
    prefixes = _GPU_VARIABLES if needs.devices else ()
    for_all = ("LD_LIBRARY_PATH",) if interpreter else ("LD_LIBRARY_PATH", "PYTHONPATH")
    program = interpreter.path if interpreter else sys.executable
    return {
        "PATH": os.pathsep.join((str(Path(program).parent), os.defpath)),
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        **environment_variables((*needs.variables, *for_all), prefixes),
        **({"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)} if inherits_path else {}),
    }


@dataclass(slots=True)
class _Order:
    """One start."""

    command: list[str]
    sandboxing: Sandboxing
    needs: SandboxNeeds
    view: View
    pass_fds: tuple[int, ...]
    dies_with_thread: bool
    maps_users: bool
    environment: dict[str, str]
    ports: tuple[int, ...]
    output: int
    entry: tuple[str, ...]
    """Command that enters what limits memory, before the command that follows."""
    problem: str = ""

    def start(self) -> tuple[subprocess.Popen[bytes], int | None]:
        """Start it; return the process and, with namespaces, the id of the first one inside."""
        info, info_write = os.pipe()
        go, go_write = os.pipe()
        arguments = os.memfd_create("starling-sandbox", 0)
        try:
            if not (self.sandboxing.isolates and self.maps_users):
                os.close(go)
                go = -1
            passed = [fd for fd in (info_write, go, arguments, *self.pass_fds) if fd >= 0]
            command = self._write(arguments, info_write, go)
            child = subprocess.Popen(
                [*self.entry, *command],
                stdin=subprocess.DEVNULL,
                stdout=self.output,  # user code may print
                stderr=self.output,
                pass_fds=passed,
                start_new_session=True,
                env=self.environment,
                cwd="/" if self.sandboxing.isolates else None,
            )
            os.close(info_write)
            info_write = -1
            return child, self._admit(info, go_write) if self.sandboxing.isolates else None
        finally:
            for fd in (info, info_write, go, go_write, arguments):
                if fd >= 0:
                    os.close(fd)

    def _write(self, arguments: int, info: int, go: int) -> list[str]:
        if self.sandboxing.mechanism == "bubblewrap":
            listed = [*self._bubblewrap(info, go), "--", *self.command]
            os.write(arguments, b"\0".join(os.fsencode(one) for one in listed[: -len(self.command) - 1]) + b"\0")
            os.lseek(arguments, 0, os.SEEK_SET)
            return [str(shutil.which("bwrap")), "--args", str(arguments), "--", *self.command]
        order = {
            "namespaces": self.sandboxing.isolates,
            "landlock": self.sandboxing.mechanism == "landlock",
            "network": self.needs.network,
            "ports": self.ports,
            "dies_with": os.getpid() if self.dies_with_thread else 0,
            "info_fd": info,
            "go_fd": go,
            "pass_fds": self.pass_fds,
            "entries": [tuple(entry) for entry in self.view.entries],
            "folder": self.view.folder,
            "tmp_bytes": TMP_BYTES,
            "max_tasks": self.needs.max_tasks,
            "readable": [*self.view.readable(), "/proc"],
            "listable": self.view.folders,
            "writable": [*self.view.writable(), self.environment["TMPDIR"]],
            "uid": OWN_UID if self.maps_users else None,
            "command": self.command,
            "environment": self.environment,
        }
        os.write(arguments, marshal.dumps(order))
        return list(enter.command_line(sys.executable, _ROOT, arguments))

    def _bubblewrap(self, info: int, go: int) -> list[str]:
        """Return the options of bwrap."""
        options = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += [] if self.needs.network else ["--unshare-net"]
        options += ["--info-fd", str(info), "--cap-drop", "ALL"]
        for capability in syscalls.INSIDE:
            options += ["--cap-add", capability]
        options += ["--userns-block-fd", str(go)] if go >= 0 else []
        options += ["--die-with-parent"] if self.dies_with_thread else []
        shown, made = set[Path](), {Path("/")}
        for kind, source, target in self.view.entries:
            parents = Path(target).parents
            if shown.isdisjoint(parents):
                for parent in reversed([parent for parent in parents if parent not in made]):
                    options += ["--perms", "0755", "--dir", str(parent)]  # it makes them for their owner only
                    made.add(parent)
            options += _bubblewrap_entry(kind, source, target)
            (made if kind == "tmpfs" else shown).add(Path(target))
        return [*options, "--dir", self.view.folder, "--chdir", self.view.folder]

    def _admit(self, info: int, go: int) -> int | None:
        """Map the users of the new namespace, where that is for root to do; return the first process inside."""
        until, text = time.monotonic() + _START_S, ""
        poller = select.poll()
        poller.register(info, select.POLLIN)
        mapped = not self.maps_users
        while True:
            pid, text = _next_pid(text)
            if pid is not None and mapped:
                return pid
            if pid is not None:
                try:
                    for name in ("uid_map", "gid_map"):
                        Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{INNER_UID} {OWN_UID} 1\n")
                    os.write(go, b"1")
                except OSError as error:
                    self.problem = f"its users cannot be mapped ({error.strerror})"
                    return None
                if self.sandboxing.mechanism == "bubblewrap":
                    return pid
                mapped = True
                continue
            if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
                self.problem = f"it did not start within {_START_S:g} s"
                return None
            data = os.read(info, 4096)
            if not data:
                return None
            text += data.decode()


def _next_pid(text: str) -> tuple[int | None, str]:
    """Take the first object from `text`; return its process id and the rest."""
    try:
        found, end = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return None, text
    return int(found["child-pid"]), text.lstrip()[end:]


def _bubblewrap_entry(kind: Kind, source: str, target: str) -> list[str]:
    match kind:
        case "read_only":
            return ["--ro-bind", source, target]
        case "writable":
            return ["--bind", source, target]
        case "device":
            return ["--dev-bind", source, target]
        case "link":
            return ["--symlink", source, target]
        case "proc":
            return ["--proc", target]
        case "tmpfs":
            mode = "1777" if target in ("/tmp", "/dev/shm") else "0755"
            return ["--perms", mode, "--size", str(TMP_BYTES), "--tmpfs", target]


def _own_folder(*, maps_users: bool) -> str:
    """Make a temporary folder for a process that sees those of all, and return it."""
    folder = tempfile.mkdtemp(prefix="starling-sandbox-")
    if maps_users:
        os.chown(folder, OWN_UID, OWN_UID)
    return folder


def _closed_to_others(*, isolates: bool, prefixes: Iterable[str] = ()) -> str:
    """Return a folder of the code that no other user than root can read, at its place or, with namespaces, in a view.

    It is empty when there is none: the code then runs as another user. `prefixes` are of its interpreter.
    """
    paths = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, _ROOT, *prefixes)]
    needed = (path for one in paths for path in ((one,) if isolates else (one, *one.parents)))
    return next((str(path) for path in needed if path.stat().st_mode & 0o005 != 0o005), "")
