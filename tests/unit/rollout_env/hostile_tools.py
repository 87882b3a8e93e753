"""Tools that try to get out of their sandbox. Each returns what it reached; an exception is a failed attempt."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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


def leave_daemon_without_first_thread(marker: str) -> bool:
    """Start a process in a session of its own whose first thread ends, and whose second one has the name `marker`."""
    libc = ctypes.CDLL(None)

    def sleep() -> None:
        libc.prctl(15, marker.encode(), 0, 0, 0)  # PR_SET_NAME
        time.sleep(600)

    if os.fork() == 0:
        os.setsid()
        threading.Thread(target=sleep).start()
        libc.pthread_exit(None)
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


def multiply(limit: int, wait_s: float = 0.0) -> int:
    """Start processes until it fails, and keep them for a while; return how many there were."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    children = []
    try:
        while len(children) < limit:
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
                os._exit(0)
            children.append(pid)
        time.sleep(wait_s)
    except OSError as error:
        raise OSError(error.errno, f"after {len(children)} processes") from None
    finally:
        for pid in children:
            os.kill(pid, 9)
    return len(children)


def scatter(limit: int, wait_s: float) -> int:
    """Start processes, each in a session of its own and not below this one; return how many there were."""
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # its orphans are no longer its own
    for _ in range(limit):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.waitpid(pid, 0)
    time.sleep(wait_s)
    return limit


def bomb(kind: str) -> None:
    """Start processes or threads, each of which does the same, without end."""
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) <= 4000, "never on a machine itself"
    threading.stack_size(1 << 16)

    def start_threads() -> None:
        while True:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=start_threads).start()

    if kind == "threads":
        start_threads()
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0 and kind == "sessions":
                os.setsid()


def multiply_threads(limit: int, wait_s: float) -> int:
    """Start threads, and keep them for a while; return how many there were."""
    threading.stack_size(1 << 16)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(limit)]
    try:
        for one in threads:
            one.start()
        time.sleep(wait_s)
    finally:
        end.set()
    return len(threads)


def multiply_threads_alone(limit: int, wait_s: float) -> int:
    """Start threads, and end the one that has started them; the process then appears as a dead one."""
    threading.stack_size(1 << 16)
    for _ in range(limit):
        threading.Thread(target=time.sleep, args=(wait_s,)).start()
    ctypes.CDLL(None).pthread_exit(None)
    return limit


def keep_threads(limit: int) -> int:
    """Start threads until it fails, and keep them until the session ends; return how many there are."""
    threading.stack_size(1 << 16)
    for num in range(limit):
        try:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        except RuntimeError:
            return num
    return limit


def leave_dead(limit: int, wait_s: float) -> int:
    """Start processes that end at once, and do not reap them; return how many there were."""
    for _ in range(limit):
        if os.fork() == 0:
            os._exit(0)
    time.sleep(wait_s)
    return limit


def num_dead_beside() -> int:
    """Return the number of dead processes that the parent of this one has not reaped."""
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            found += fields[:2] == ["Z", str(os.getppid())]
    return found


def fill_disk() -> bool:
    """Make a file larger than a sandbox may."""
    with tempfile.TemporaryFile() as file:
        file.truncate((1 << 30) + 1)
    return True


def leave_note(path: str) -> bool:
    Path(path).write_text("a note")
    time.sleep(1.0)
    return True


def is_alive() -> bool:
    return True


def limits() -> int:
    """Return the limit on the size of a dump of memory."""
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
    lists = b"\x92\xa8returned\xdd" + (60 << 20).to_bytes(4, "big") + b"\x90" * (60 << 20) if kind == "lists" else b""
    body = {
        "noise": b"\xff\xff\xff\xff noise",
        "deep": len(deep).to_bytes(4, "little") + deep,
        "lists": len(lists).to_bytes(4, "little") + lists,
        "empty": b"\x00\x00\x00\x00",
        "other type": b"\x01\x00\x00\x00\xc0",
        "keys": b"\x10\x00\x00\x00\x92\xa8returned\x81\x91\x01\x02\x00\x00",
    }[kind]
    own_line().sendall(body)
    time.sleep(600)


def open_memories() -> list[str]:
    """Open the memory of any other process."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open(f"/proc/{name}/mem", "rb"):
                    found.append(name)
        except OSError:
            continue
    return found


def limit_process(pid: int) -> bool:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return True


def slow_process(pid: int) -> bool:
    os.sched_setaffinity(pid, {0})
    return True


def change_file(path: str) -> bool:
    """Change permissions and times of a file, by each way that the C library has."""
    for change in (
        lambda: os.chmod(path, 0),
        lambda: os.utime(path, (0, 0)),
        lambda: os.setxattr(path, "user.a", b"1"),
    ):
        try:
            change()
        except OSError:
            continue
    return True


def send_datagram(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.sendto(b"a secret", ("127.0.0.1", port))
    return True


def send_netlink(address: int) -> bool:
    """Send a datagram to a socket of netlink in another process."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_USERSOCK) as line:
        line.sendto(b"a secret", (address, 0))
    return True


def take_of_user() -> list[str]:
    """Take what the kernel counts for a user on the whole machine; return what there was of it."""
    libc, found = ctypes.CDLL(None), []
    for make in (lambda: libc.inotify_init(), lambda: libc.inotify_init1(0), lambda: libc.fanotify_init(0x200, 0)):
        if (made := make()) >= 0:
            os.close(made)
            found.append("watches")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    num, none = 0, ctypes.c_void_p(None)
    while num <= 1024 and libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), none) == 0:
        num += 1
    if num > 1024:
        found.append("signals")
    return found


def lease_file() -> bool:
    """Keep others from opening a file until the kernel ends the lease."""
    with tempfile.NamedTemporaryFile() as file, open(file.name) as reading:
        fcntl.fcntl(reading, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return True


def connect_otherwise(port: int, way: str) -> bool:
    """Connect by Multipath TCP, or by data that opens a connection."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262 if way == "multipath" else 0) as line:
        line.settimeout(5)
        if way == "multipath":
            line.connect(("127.0.0.1", port))
        elif way == "sendto":
            line.sendto(b"a secret", 0x20000000, ("127.0.0.1", port))
        else:
            line.sendmsg([b"a secret"], (), 0x20000000, ("127.0.0.1", port))
    return True


def open_family(family: int) -> bool:
    socket.socket(family, socket.SOCK_STREAM).close()
    return True


def share_memory(key: int) -> int:
    """Make shared memory of System V, which outlives the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = int(libc.shmget(key, 1 << 20, 0o1666))
    if made < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return made


def temporary_folder(text: str) -> list[str]:
    """Leave a file in the folder for temporary files; return what was there."""
    folder = tempfile.gettempdir()
    found = os.listdir(folder)
    Path(folder, "left").write_text(text)
    return found


def fill_with_files(num_bytes: int, kept: str) -> bool:
    """Write many small files, which keep their name or are only open or mapped, and wait."""
    files = []
    for index in range(num_bytes >> 20):
        path = Path(tempfile.gettempdir(), f"part-{index}")
        files.append(path.open("wb+"))
        files[-1].write(bytes(1 << 20))
        files[-1].flush()
        if kept != "named":
            path.unlink()
        if kept == "mapped":
            map_page(files[-1].fileno())
            files.pop().close()
    time.sleep(600)
    return True


def map_page(descriptor: int) -> None:
    """Map the first page of a file; the module `mmap` would keep it open, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    if libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")


def nest_folders(depth: int) -> bool:
    """Make folders in each other, deeper than a stack or a path."""
    os.chdir(tempfile.gettempdir())
    for _ in range(depth):
        os.mkdir("a-folder")
        os.chdir("a-folder")
    return True


def open_kernel_settings() -> list[str]:
    """Open each setting of the kernel for writing, and write nothing."""
    found = []
    places = [Path(place, name) for place, _, names in os.walk("/proc/sys") for name in names]
    for path in (*places, *map(Path, ("/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/scsi/scsi"))):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            continue
        found.append(str(path))
    return found


def add_files(folders: list[str]) -> list[str]:
    """Return the folders in which a file can be made."""
    found = []
    for folder in folders:
        try:
            with open(os.path.join(folder, "left_behind.py"), "w") as file:
                file.write("raise SystemExit")
        except OSError:
            continue
        found.append(folder)
    return found


def change_devices() -> list[str]:
    """Change the permissions of each device to what they are."""
    found = []
    for name in ("null", "zero", "full", "random", "urandom"):
        try:
            os.chmod(f"/dev/{name}", os.stat(f"/dev/{name}").st_mode & 0o777)
        except OSError:
            continue
        found.append(name)
    with open("/dev/null", "w") as file:
        file.write("it can still be written")
    return found


def attack_log(text: str) -> list[str]:
    """Read `text` from what it prints to, truncate that and overwrite it."""
    found = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
            if text.encode() in os.read(reading, 1 << 20):
                found.append("read")
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # not O_APPEND
            os.pwrite(descriptor, b"forged", 0)
            found.append("overwritten")
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            found.append("truncated")
    return found


def read_terminal(wait_s: float) -> str:
    """Read what is typed into the terminal that it prints to."""
    if not select.select([2], [], [], wait_s)[0]:
        raise TimeoutError("nothing was typed")
    return os.read(2, 100).decode()


def print_without_end(num_bytes: int) -> bool:
    for _ in range(num_bytes >> 16):
        os.write(2, b"x" * (1 << 16))
    os.write(2, b"\nthe last line\n")
    return True
