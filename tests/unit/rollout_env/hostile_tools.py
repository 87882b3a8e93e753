"""Tools that try to get out of their sandbox. Each returns what it reached; an exception is a failed attempt."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLEEP = "import time; time.sleep(600)"


def leave_daemon(marker: str) -> bool:
    """Start two processes in sessions of their own, whose parents end at once."""
    start = f"[sys.executable, '-c', {SLEEP!r}, {marker!r}], start_new_session=True"
    again = f"import subprocess, sys; subprocess.Popen({start})"
    subprocess.run([sys.executable, "-c", again], start_new_session=True, check=True)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # its orphans are no longer its own
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", SLEEP, marker])
        os._exit(0)
    time.sleep(0.3)
    return True


def read_environments(marker: str) -> list[str]:
    """Find `marker` in the environment of any process."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if marker.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(name)
        except OSError:
            continue
    return found


def read_file(path: str) -> str:
    return Path(path).read_text()


def write_file(path: str) -> bool:
    with open(path, "a") as file:
        file.write("# written\n")
    return True


def list_folder(path: str) -> list[str]:
    return os.listdir(path)


def signal_process(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def open_descriptor(pid: int, descriptor: int) -> bool:
    os.close(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR))
    return True


def read_memory(pid: int) -> bool:
    with open(f"/proc/{pid}/mem", "rb"):
        return True


def trace(pid: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, 0, 0) != 0:  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "ptrace")
    return True


def connect(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return True


def connect_abstract(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0{address}")
    return True


def connect_path(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
    return True


def new_user_namespace() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    return True


def gain_privileges() -> str:
    """Try to become root by a setuid program."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    if fields["NoNewPrivs"] == "1" and int(fields["CapEff"], 16) == 0:
        raise PermissionError("no new privileges")
    return fields["CapEff"]


def multiply(limit: int) -> int:
    """Start processes until it fails; return how many there were."""
    children = []
    try:
        while len(children) < limit:
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
                os._exit(0)
            children.append(pid)
    except OSError as error:
        raise OSError(error.errno, f"after {len(children)} processes") from None
    finally:
        for pid in children:
            os.kill(pid, 9)
    return len(children)


def fill_disk() -> bool:
    """Make a file larger than a sandbox may."""
    with tempfile.TemporaryFile() as file:
        file.truncate((1 << 30) + 1)
    return True


def leave_note(path: str) -> bool:
    Path(path).write_text("a note")
    time.sleep(1.0)
    return True


def limits() -> int:
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


def own_line() -> socket.socket:
    for descriptor in range(3, 200):
        try:
            return socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
    raise AssertionError("no socket")


def send_garbage(kind: str) -> None:
    """Write something that is no answer into the sandbox's own socket."""
    deep = b"\x92\xa8returned" + b"\x91" * 200_000 + b"\xc0"
    body = {
        "noise": b"\xff\xff\xff\xff noise",
        "deep": len(deep).to_bytes(4, "little") + deep,
        "empty": b"\x00\x00\x00\x00",
        "other type": b"\x01\x00\x00\x00\xc0",
        "keys": b"\x10\x00\x00\x00\x92\xa8returned\x81\x91\x01\x02\x00\x00",
    }[kind]
    own_line().sendall(body)
    time.sleep(600)
