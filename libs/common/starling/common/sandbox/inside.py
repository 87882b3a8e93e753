"""Inside a sandbox: the payload's first steps, and sessions, each of which is a sandbox in the sandbox.

A payload calls `settle` before it imports anything of a user. Then it either runs user code itself, after
`give_up_privileges`, or forks a process for each session with `Sessions`: with namespaces, such a process is the
first one of a PID namespace, so that its end is the end of everything that it has started, and it has its own `/proc`,
`/tmp`, `/dev/shm` and IPC. It imports only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, NoReturn

from starling.common.sandbox import syscalls
from starling.common.sandbox.processes import descendants, end_kept, kill_all, remove_tree
from starling.common.sandbox.tasks import SPARE_TASKS, num_tasks_of_user

INNER_UID: Final = 1000
"""User inside of a sandbox that root starts."""
_FILE_BYTES: Final = 1 << 30
_NUM_FILES: Final = 1024
_NUM_FILES_OF_SESSION: Final = 256
"""Limit on open files, and on what its user has sent and not received, above which a process can send no descriptor. It
is lower than that of the payloads of the same user, so that a session cannot keep them from sending."""
_CORE_BYTES: Final = 1
"""Limit on dumps of memory. It prevents all, as 0 does not for those that a program takes (`core_pattern` with `|`)."""
_NUM_SIGNALS: Final = 1 << 10
"""Limit on queued signals and timers. A user has some ten thousand on the whole machine."""
_MOST_DESCRIPTORS: Final = 8
SEND_S: Final = 2.0
"""How long other processes of the user may keep descriptors from being sent."""
SEND_AGAIN_S: Final = 0.005
_TMP_OPTIONS: Final = f"mode=1777,size={1 << 30}"
_COPIED_BYTES: Final = 4 << 20
"""Limit on what a session copies of the files of imports. It is memory, and many sessions run at once."""
_BLOCK_BYTES: Final = 4096
_of_view: Final = set[str]()
"""Names below `/tmp` that the view shows, as `settle` finds them before anything of a user runs."""


def settle(mechanism: str, *, memory_mb: int = 0, data_mb: int = 0, max_tasks: int = 0) -> None:
    """Become a user without privileges outside, and limit this process and its descendants.

    Args:
        mechanism: how the sandbox was made.
        memory_mb: limit on the address space of each process, in MiB; 0 for none.
        data_mb: limit on the private memory of each process, in MiB; 0 for none.
        max_tasks: limit on processes and threads; with namespaces, `Sessions` has each session limited by itself;
            without them, on those that the sandbox's user has on the machine besides the present ones and
            `SPARE_TASKS` (root has none).
    """
    isolated = mechanism in ("bubblewrap", "namespaces")
    syscalls.be_killed_first()
    if isolated:
        _make_view_read_only()
    if isolated and os.geteuid() == 0:
        with contextlib.suppress(OSError):  # EINVAL: the code is readable for root only, so no other user is mapped
            syscalls.become(INNER_UID, INNER_UID)
    syscalls.keep_capabilities(*(syscalls.INSIDE.values() if isolated else ()))
    syscalls.forbid_new_privileges()
    limits = [
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, _CORE_BYTES),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_SIGPENDING, _NUM_SIGNALS),
    ]
    if memory_mb:
        limits.append((resource.RLIMIT_AS, memory_mb << 20))
    if data_mb:
        limits.append((resource.RLIMIT_DATA, data_mb << 20))
    if max_tasks and isolated:
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        soft = max_tasks if most == resource.RLIM_INFINITY else min(max_tasks, most)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, most))
    elif max_tasks and os.getuid() != 0:
        limits.append((resource.RLIMIT_NPROC, num_tasks_of_user(os.getuid()) + max_tasks + SPARE_TASKS))
    syscalls.set_limits(limits)


def _make_view_read_only() -> None:
    """Make what the view consists of itself read-only: its user, who the code is without root outside, owns it.

    The code of one session could otherwise leave modules or `/etc/ld.so.preload` for others, and for the payload.
    """
    for place in ("/", "/etc", "/dev"):
        syscalls.make_read_only_alone(place)
    with os.scandir("/dev") as found:
        devices = [entry.path for entry in found if not entry.is_dir() and not entry.is_symlink()]
    for device in devices:  # one can be written nevertheless; only its permissions cannot be changed
        with contextlib.suppress(OSError):  # before Linux 5.12
            syscalls.make_read_only(device)
    if os.path.exists("/proc/self"):
        # Root may write the kernel's settings without any capability, and is the user here if no other one is mapped.
        syscalls.make_read_only_alone("/proc", syscalls.MS_NOEXEC)
    _of_view.update(os.listdir("/tmp"))


def give_up_privileges(mechanism: str, *, network: bool) -> None:
    """Give up what only the making of sessions needs, for ever: capabilities, namespaces, mounts, tracing, more tasks.

    Args:
        mechanism: how the sandbox was made.
        network: whether the code may reach the network.
    """
    num_tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (num_tasks, num_tasks))
    syscalls.keep_capabilities()
    with contextlib.suppress(OSError):  # a container may forbid further filters
        syscalls.forbid_kernel_interfaces(_surroundings(mechanism), network=network)


def try_session(mechanism: str) -> NoReturn:
    """Make one session that does nothing, and exit; with 1, and a sentence on stderr, if it cannot be made."""
    status, (reading, writing) = 1, os.pipe()
    try:
        settle(mechanism)
        sessions = Sessions(mechanism, lambda descriptors: _send_one_byte(descriptors[0]), network=False)
        sessions.start([writing])
        os.close(writing)
        status = 0 if os.read(reading, 1) else 1
        sessions.kill_all()
    except OSError as error:
        os.write(2, f"a session cannot be isolated: {error}\n".encode())
    finally:
        os._exit(status)


def _send_one_byte(descriptor: int) -> None:
    os.write(descriptor, b"1")


def send_descriptors(line: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send descriptors over a socket of Unix.

    The kernel limits how many a user has sent that are not received yet, on the whole machine: the code in one sandbox
    can use them up, and so keep others from being started, until it is killed.

    Raises:
        OSError: the other side has closed its end, or they cannot be sent within `SEND_S`.
    """
    until = time.monotonic() + SEND_S
    while True:
        try:
            socket.send_fds(line, [data], descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > until:
                raise
        time.sleep(SEND_AGAIN_S)


def _surroundings(mechanism: str) -> syscalls.Surroundings:
    if mechanism in ("bubblewrap", "namespaces"):
        return "own"
    return "landlocked" if mechanism == "landlock" else "shared"


class Sessions:
    """Forked processes of a payload, which can be killed with everything that they have started.

    One is forked ahead: it isolates itself while the payload is idle, and waits. A session then begins when the
    process has received its descriptors, some milliseconds earlier. It has run nothing of an earlier session. It is a
    copy of the payload, with freed memory: the payload passes requests on as descriptors, and never reads one.

    With `landlock`, the first process of a session keeps it: it is out of reach of the code, which runs in a child, and
    its end is the end of all that the code has started (`_keep`).

    Args:
        mechanism: how the sandbox was made.
        serve: serves a session with its descriptors, in its own process, which ends when this returns.
        leave: closes what a process must not have of the payload's; called in each of them before all else.
        network: keep the sandbox's network.
        writable: files and folders that a session may write, besides its own folder and what is in `/dev`.
        shows_imports: with namespaces, give each session what is in `/tmp` now, what imported modules have left there:
            a copy, or beyond `_COPIED_BYTES` all that read-only.
    """

    def __init__(
        self,
        mechanism: str,
        serve: Callable[[list[int]], None],
        *,
        leave: Callable[[], object] = lambda: None,
        network: bool = True,
        writable: Iterable[str] = (),
        shows_imports: bool = False,
    ) -> None:
        self._mechanism, self._serve, self._leave, self._network = mechanism, serve, leave, network
        self._writable = (*writable, "/dev")
        self._own_pids = -1
        if mechanism in ("bubblewrap", "namespaces"):
            with contextlib.suppress(OSError):  # without /proc, as in some containers
                self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        # The root of a user namespace cannot be mapped into another one without a further capability.
        self._counts_apart = self._own_pids >= 0 and os.geteuid() != 0
        left = set(os.listdir("/tmp")) - _of_view if shows_imports and self._own_pids >= 0 else set[str]()
        self._in_tmp = _InTmp(sorted(_of_view), sorted(left), is_copied=_is_small(left))
        self._folders: dict[int, str] = {}
        """Folder for the temporary files of each session, by the id of its process; empty with namespaces."""
        self._killed = set[int]()
        """Processes of sessions that are killed and not reaped yet."""
        self._ahead: tuple[int, socket.socket] | None = None
        self._max_tasks = _allow_tasks_of_sessions() if self._counts_apart else 0
        syscalls.adopt_orphans()
        version = syscalls.landlock_version() if mechanism == "landlock" else 0
        syscalls.filter_program(_surroundings(mechanism), version, network=network)

    def prepare(self) -> None:
        """Fork a process ahead, unless there is one or there can be no further process."""
        self._reap_killed(wait=False)
        if self._ahead is None:
            with contextlib.suppress(OSError):
                self._ahead = self._fork()

    def start(self, descriptors: Sequence[int]) -> int:
        """Start a session; return the id of its process, which gets copies of `descriptors`.

        Raises:
            OSError: no process can be made, or it ended at once.
        """
        if self._ahead is not None:
            (pid, line), self._ahead = self._ahead, None
            with line, contextlib.suppress(OSError):  # it has ended, for example for want of memory
                send_descriptors(line, b"s", descriptors)
                return pid
            self.kill(pid)
        pid, line = self._fork()
        try:
            with line:
                send_descriptors(line, b"s", descriptors)
        except OSError:
            self.kill(pid)
            raise
        return pid

    def _fork(self) -> tuple[int, socket.socket]:
        """Fork a process that waits for its descriptors; return its id and the socket that sends them."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, isolated = os.getpid(), self._own_pids >= 0
        folder = "" if isolated else _make_temporary_folder()
        with theirs:
            try:
                if isolated:
                    syscalls.unshare(syscalls.CLONE_NEWPID)
                try:
                    pid = os.fork()
                finally:
                    if isolated and os.getpid() == parent:
                        syscalls.set_pid_namespace(self._own_pids)
            except BaseException:  # raised again: the socket must not stay open
                mine.close()
                remove_tree(folder)
                raise
            if pid:
                self._folders[pid] = folder
                return pid, mine
            try:
                mine.close()
                _use_temporary_folder(folder)
                self._leave()
                self._run_session(theirs, parent, folder, isolated=isolated)
            finally:
                os._exit(1)  # runs no exit handler of the payload, and flushes nothing twice
        raise AssertionError("a forked process does not come back")

    def _run_session(self, line: socket.socket, parent: int, folder: str, *, isolated: bool) -> None:
        try:
            if self._mechanism == "landlock":
                _keep(parent)
                parent = os.getppid()
                syscalls.landlock_apart([*self._writable, folder])
            _enter_session(
                parent, self._mechanism, self._in_tmp, self._max_tasks, isolated=isolated, network=self._network
            )
            if isolated:
                _leave_to_child()
        except Exception as error:  # noqa: BLE001 - the edge of a process
            os.write(2, f"a session cannot be isolated: {error}\n".encode())
            return
        data, descriptors, _, _ = socket.recv_fds(line, 1, _MOST_DESCRIPTORS)
        line.close()
        if data:  # else the payload has ended
            self._serve(descriptors)
            os._exit(0)

    def kill(self, pid: int, *, wait: bool = True) -> None:
        """Kill a session and everything that it has started, and reap it.

        Without `wait`, and with namespaces, it may end a little later: much memory takes the kernel seconds.
        """
        folder = self._folders.pop(pid, "")
        if self._mechanism == "landlock":
            end_kept(pid)
        for kill in (os.killpg, os.kill):  # the process may not have called setsid yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        self._reap_killed(wait=wait or self._own_pids < 0)
        if self._own_pids < 0:
            self._kill_orphans()
        remove_tree(folder)

    def kill_all(self) -> None:
        """Kill all sessions."""
        for pid in tuple(self._folders):
            self.kill(pid, wait=False)
        self._reap_killed(wait=True)

    def _reap_killed(self, *, wait: bool) -> None:
        for pid in tuple(self._killed):
            try:
                ended, _ = os.waitpid(pid, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                ended = pid
            if ended:
                self._killed.discard(pid)

    def _kill_orphans(self) -> None:
        """Kill and reap the children that are no sessions: what ended sessions have left behind."""
        killed = set[int]()

        def orphans() -> set[int]:
            found = set(descendants(os.getpid(), but=self._folders))
            killed.update(found)
            return found

        kill_all(orphans)
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._reap_left()

    def _reap_left(self) -> None:
        """Reap children that had ended before: those of sessions, which did not reap them."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._folders:  # the kernel names it again until it is killed, and then the others
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)


def _allow_tasks_of_sessions() -> int:
    """Let this process start as many tasks as its user may, and return its limit before, in resource.RLIMIT_NPROC.

    The kernel counts the tasks of all sessions as those of this process, too. Its limit would be that of all.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    return limit


def _enter_session(
    parent: int, mechanism: str, in_tmp: _InTmp, max_tasks: int, *, isolated: bool, network: bool
) -> None:
    """Isolate this process, which `parent` has just forked; with `max_tasks`, in a user namespace with that limit."""
    if mechanism != "landlock":
        os.setsid()
    if isolated:
        syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | (0 if network else syscalls.CLONE_NEWNET))
        if not network:
            syscalls.bring_loopback_up()
        proc = _make_private_folders(in_tmp)
        if proc >= 0 and max_tasks:
            syscalls.unshare_user(proc)  # last: it has no right to mount then
        if proc >= 0:
            os.close(proc)
        if max_tasks:
            resource.setrlimit(resource.RLIMIT_NPROC, (max_tasks, max_tasks))
    else:
        syscalls.adopt_orphans()
    give_up_privileges(mechanism, network=network)
    syscalls.set_limits([(resource.RLIMIT_NOFILE, _NUM_FILES_OF_SESSION)])
    syscalls.die_with_parent()
    if not isolated and os.getppid() != parent:  # it ended before the prctl; with namespaces all end with it
        os._exit(0)


def _keep(parent: int) -> None:
    """Go on in a child, in a session of its own, whose parent process this one stays.

    The child, and all that it starts, is in a Landlock domain below the parent's. So it cannot signal the parent
    (Linux 6.12), which in turn kills the whole domain at once, at SIGTERM or when the child or `parent` has ended.
    """
    os.setsid()
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    syscalls.landlock_apart(["/"])
    syscalls.adopt_orphans()
    syscalls.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the prctl
        os._exit(0)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    os.closerange(3, _NUM_FILES)
    while signal.sigwait(awaited) == signal.SIGCHLD and not _reap(child):
        pass
    syscalls.kill_domain()
    kill_all(lambda: descendants(os.getpid()))
    os._exit(0)


def _reap(awaited: int) -> bool:
    """Reap the children that have ended; return whether `awaited` was one, or there is none."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid == awaited:
                return True
        return False
    return True


class _InTmp(NamedTuple):
    """Names in the `/tmp` of the payload that a session has in its own."""

    of_view: Sequence[str]
    of_imports: Sequence[str]
    """Left by modules that were imported."""
    is_copied: bool
    """Whether each session has a copy of the latter; else they are read-only."""


def _is_small(names: Iterable[str]) -> bool:
    """Return whether what has these names in `/tmp` is small enough for a copy in each session."""
    total, pending = 0, [f"/tmp/{name}" for name in names]
    while pending and total <= _COPIED_BYTES:
        path = pending.pop()
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            total += max(_BLOCK_BYTES, found.st_size)
            if stat.S_ISDIR(found.st_mode):
                pending += [f"{path}/{name}" for name in os.listdir(path)]
    return total <= _COPIED_BYTES


def _copy(source: str, target: str) -> None:
    """Copy a file, a link, or a folder with what is in it; sockets, FIFOs and what has been removed are left out."""
    with contextlib.suppress(OSError):
        found = os.lstat(source)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(found.st_mode):
            os.mkdir(target)
            for name in os.listdir(source):
                _copy(f"{source}/{name}", f"{target}/{name}")
            os.chmod(target, stat.S_IMODE(found.st_mode))
        elif stat.S_ISREG(found.st_mode):
            with open(source, "rb") as file, open(target, "xb") as copy:
                copy.write(file.read(_COPIED_BYTES))
                os.chmod(copy.fileno(), stat.S_IMODE(found.st_mode))


def _make_temporary_folder() -> str:
    """Make a folder for the temporary files of one session; return its path, or nothing where it cannot be made."""
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"session-{os.urandom(8).hex()}")
    try:
        os.mkdir(folder, 0o700)
    except OSError:  # the disk is full: the session has the folder of all
        return ""
    return folder


def _use_temporary_folder(folder: str) -> None:
    """Let this process and its descendants make temporary files in `folder`, if there is one."""
    if not folder:
        return
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if "tempfile" in sys.modules:  # which remembers the folder; the import here would cost each start
        import tempfile

        tempfile.tempdir = None


def _leave_to_child() -> None:
    """Go on in a child; this process, the first one of its PID namespace, reaps, since the kernel spares it signals."""
    child = os.fork()
    if not child:
        return
    os.closerange(3, _NUM_FILES)
    while os.waitpid(-1, 0)[0] != child:
        pass
    os._exit(0)


def _make_private_folders(in_tmp: _InTmp) -> int:
    """Mount a `/proc`, `/tmp` and `/dev/shm` that no other session sees; nothing in `/proc` can be written.

    Nothing can be added to the folders that the view consists of. Return a descriptor of a `/proc` that is mounted
    nowhere and can be written, or -1 where there is none.
    """
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    plain = syscalls.MS_NOSUID | syscalls.MS_NODEV
    try:
        syscalls.mount("proc", "/proc", "proc", plain | syscalls.MS_NOEXEC)
    except OSError:  # a container that covers parts of its own /proc may have none
        syscalls.mount("tmpfs", "/proc", "tmpfs", plain, "mode=0555,size=4096")
        return -1
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    syscalls.unmount("/proc")
    syscalls.mount("proc", "/proc", "proc", plain | syscalls.MS_NOEXEC | syscalls.MS_RDONLY)
    device = os.stat("/tmp").st_dev
    shown = list[tuple[str, int]]()
    for name in (*in_tmp.of_view, *(() if in_tmp.is_copied else in_tmp.of_imports)):
        with contextlib.suppress(OSError):  # removed meanwhile, or a link that leads nowhere
            shown.append((name, os.open(f"/tmp/{name}", os.O_PATH | os.O_CLOEXEC)))
    shared = os.open("/tmp", os.O_PATH | os.O_CLOEXEC)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", plain, _TMP_OPTIONS)
    if in_tmp.is_copied:
        for name in in_tmp.of_imports:
            _copy(f"/proc/self/fd/{shared}/{name}", f"/tmp/{name}")
    os.close(shared)
    for name, descriptor in shown:
        source, target = f"/proc/self/fd/{descriptor}", f"/tmp/{name}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
        if os.stat(source).st_dev == device:  # else a mount, and writable if that is declared
            syscalls.make_read_only_alone(target)
        os.close(descriptor)
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", plain, _TMP_OPTIONS)
    return proc
