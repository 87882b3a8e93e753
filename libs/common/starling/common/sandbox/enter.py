"""Start of a sandbox without bubblewrap: makes the namespaces and the view, and executes the payload inside.

    python -I -S -c 'import ...; main(FD)'

FD holds the order, marshalled, since importing `json` would take as long as the start of the interpreter. With
namespaces it is the parent of the first process of a PID namespace, whose end is the end of everything inside; without
them it adopts what the payload leaves behind, and kills it at the end.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from starling.common.sandbox import syscalls
from starling.common.sandbox.disk import num_bytes_in
from starling.common.sandbox.processes import descendants, kill_all
from starling.common.sandbox.tasks import LOOK_EVERY_S, TaskWatch

_FLAGS = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC
_FLAGS |= syscalls.CLONE_NEWUTS
_LOOK_EVERY_S = 1.0
FAILED = 125
"""Exit status when the sandbox cannot be made."""


def main(descriptor: int) -> NoReturn:
    """Carry out the order in the file `descriptor`, and exit as the payload does."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        order: dict[str, Any] = marshal.load(file)  # written by `launch` into a file that has no name
    syscalls.be_killed_first()
    try:
        status = _in_namespaces(order) if order["namespaces"] else _supervise(order)
    except OSError as error:
        print(f"the sandbox cannot be made: {error}", file=sys.stderr, flush=True)
        status = FAILED
    os._exit(status)


def _in_namespaces(order: dict[str, Any]) -> int:
    _die_with_service(order["dies_with"])
    uid, gid = os.getuid(), os.getgid()
    syscalls.unshare(_FLAGS | (0 if order["network"] else syscalls.CLONE_NEWNET))
    if order["go_fd"] >= 0:  # root outside maps two users
        _report(order["info_fd"], os.getpid())
        if not os.read(order["go_fd"], 1):
            raise OSError(0, "the service has gone")
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    pid, life = _fork_bound()
    if pid:
        _report(order["info_fd"], pid)
        _close(order["info_fd"], order["go_fd"], *order["pass_fds"])
        return _exit_status(pid)
    _close(order["info_fd"], order["go_fd"])
    if order["network"] is False:
        syscalls.bring_loopback_up()
    _make_view(order)
    syscalls.die_with_parent()
    _exit_if_ended(life)
    payload = os.fork()
    if not payload:
        syscalls.raise_ambient(*syscalls.INSIDE.values())
        _execute(order)
    _close(*order["pass_fds"])
    return _reap_until(payload)


def _supervise(order: dict[str, Any]) -> int:
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # they stay pending then
    _die_with_service(order["dies_with"], signal.SIGTERM)
    syscalls.adopt_orphans()
    if order["landlock"]:
        syscalls.forbid_new_privileges()
        syscalls.landlock_apart(["/"])
    payload, life = _fork_bound()
    if not payload:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        if order["uid"] is not None:
            syscalls.become(order["uid"], order["uid"])
            syscalls.keep_capabilities()
        syscalls.die_with_parent()
        _exit_if_ended(life)
        if order["landlock"]:
            readable, writable, listable = order["readable"], order["writable"], order["listable"]
            syscalls.landlock(readable, writable, listable, network=order["network"], ports=order["ports"])
        _execute(order)
    _close(*order["pass_fds"])
    tasks = TaskWatch(payload, order["max_tasks"], keeps_sessions=order["landlock"])
    status = _watch(payload, tasks, order["environment"]["TMPDIR"], order["tmp_bytes"])
    if order["landlock"]:
        syscalls.kill_domain()
    while not kill_all(lambda: descendants(os.getpid())):  # after its own end they would be the machine's
        pass
    return status


def _watch(payload: int, tasks: TaskWatch, folder: str, limit: int) -> int:
    """Reap all children until the payload ends or SIGTERM asks for its end, and watch what it takes; return its status.

    The temporary files are on the machine's disk, and the kernel limits the size of each only, not their number. When
    they take more than `limit` bytes, everything inside is killed.
    """
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    look_at = time.monotonic() + LOOK_EVERY_S
    disk_at = time.monotonic() + _LOOK_EVERY_S
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == payload:
            return _status(status)
        now = time.monotonic()
        if now < look_at:  # also while one child after another ends
            if not pid and (found := signal.sigtimedwait(awaited, look_at - now)) and found.si_signo == signal.SIGTERM:
                os.kill(payload, signal.SIGKILL)
            continue
        with contextlib.suppress(OSError):
            tasks.look()
        now = time.monotonic()
        if now >= disk_at:
            with contextlib.suppress(OSError):
                _check_disk(payload, folder, limit)
            disk_at = time.monotonic() + max(_LOOK_EVERY_S, 10 * (time.monotonic() - now))
        look_at = time.monotonic() + LOOK_EVERY_S


def _check_disk(payload: int, folder: str, limit: int) -> None:
    if num_bytes_in(folder, os.getpid(), limit) > limit:
        problem = f"files take more than {limit >> 20} MiB, or its processes have more mappings than can be counted"
        print(f"the sandbox's {problem}: it is killed", file=sys.stderr, flush=True)
        os.kill(payload, signal.SIGKILL)


def _execute(order: dict[str, Any]) -> NoReturn:
    command: list[str] = order["command"]
    for descriptor in order["pass_fds"]:
        os.set_inheritable(descriptor, True)
    os.chdir(order["folder"])
    os.execve(command[0], command, order["environment"])


# --- the view ----------------------------------------------------------------------------------------------------


def _make_view(order: dict[str, Any]) -> None:
    """Make the view's file system the root."""
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    base = "/tmp"
    syscalls.mount("tmpfs", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    syscalls.mount(f"{base}/new", f"{base}/new", None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.pivot_root(base, f"{base}/old")
    os.chdir("/")
    for kind, source, target in order["entries"]:
        _make_entry(kind, source, f"/new{target}", order["tmp_bytes"])
    os.makedirs(f"/new{order['folder']}", exist_ok=True)
    syscalls.unmount("/old")
    os.chdir("/new")
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".")
    os.chdir("/")


def _make_entry(kind: str, source: str, target: str, tmp_bytes: int) -> None:
    if kind == "link":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source, target)
    elif kind == "tmpfs":
        os.makedirs(target, exist_ok=True)
        mode = "1777" if target in ("/new/tmp", "/new/dev/shm") else "0755"
        flags = syscalls.MS_NOSUID | (0 if target == "/new/dev" else syscalls.MS_NODEV)
        syscalls.mount("tmpfs", target, "tmpfs", flags, f"mode={mode},size={tmp_bytes}")
    elif kind == "proc":
        os.makedirs(target, exist_ok=True)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        with contextlib.suppress(OSError):  # in a container whose own /proc is covered in part; it stays empty
            syscalls.mount("proc", target, "proc", flags)
    else:
        _bind(f"/old{source}", target)
        if kind == "read_only":
            syscalls.make_read_only(target)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)


# --- processes ---------------------------------------------------------------------------------------------------


def _die_with_service(pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    if pid:
        syscalls.die_with_parent(by)
        if os.getppid() != pid:  # it ended before the prctl
            os._exit(FAILED)


def _fork_bound() -> tuple[int, int]:
    """Fork; the child gets a descriptor that hangs up when the parent ends, the parent keeps the other end."""
    reading, writing = os.pipe()
    pid = os.fork()
    os.close(reading if pid else writing)
    return pid, writing if pid else reading


def _exit_if_ended(life: int) -> None:
    """Exit if the parent ended before the kernel was asked to kill this process with it."""
    poller = select.poll()
    poller.register(life, select.POLLHUP)
    if poller.poll(0):
        os._exit(FAILED)
    os.close(life)


def _reap_until(payload: int) -> int:
    """Reap all children until the payload ends; return its exit status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == payload:
            return _status(status)


def _exit_status(pid: int) -> int:
    return _status(os.waitpid(pid, 0)[1])


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _report(descriptor: int, pid: int) -> None:
    """Report a process id as bubblewrap does."""
    os.write(descriptor, b'{"child-pid": %d}' % pid)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def command_line(python: str, root: str, descriptor: int) -> Sequence[str]:
    """Return the command that carries out the order in `descriptor`, with this package below the folder `root`."""
    code = f"import sys; sys.path.append({root!r}); from starling.common.sandbox.enter import main; main({descriptor})"
    return (python, "-I", "-S", "-c", code)
