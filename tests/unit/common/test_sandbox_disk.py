"""Disk space of files without a name, by each way in which a process can hold them."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from starling.common.sandbox.disk import num_bytes_in

LIMIT = 8 << 20
NUM_FILES = 20
OTHER_UID = 65533
LONG_S = 60.0


def unnamed_file(folder: str, num_bytes: int = 1 << 20) -> int:
    """Return the descriptor of a file with this size that has no name."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(num_bytes))
        file.flush()
        return os.dup(file.fileno())


def hold_open(folder: str) -> None:
    for _ in range(NUM_FILES):
        unnamed_file(folder)


def hold_mapped(folder: str) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for _ in range(NUM_FILES):
        file = unnamed_file(folder)
        mapped = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0)
        assert mapped != ctypes.c_void_p(-1).value
        os.close(file)


def hold_open_in_a_thread_alone(folder: str) -> None:
    done = threading.Event()

    def hold() -> None:
        assert ctypes.CDLL(None).syscall(436, 1 << 20, 1 << 20, 2) == 0  # close_range with CLOSE_RANGE_UNSHARE
        hold_open(folder)
        done.set()
        time.sleep(LONG_S)

    threading.Thread(target=hold).start()
    assert done.wait(LONG_S)


def hold_after_the_first_thread(folder: str, hold: Callable[[str], None], ready: int) -> None:
    def hold_on() -> None:
        while Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
            time.sleep(0.01)
        hold(folder)
        os.write(ready, b"1")
        time.sleep(LONG_S)

    threading.Thread(target=hold_on).start()
    ctypes.CDLL(None).pthread_exit(None)


def run_program(folder: str) -> None:
    program = Path(folder, "program")
    shutil.copy("/bin/sleep", program)
    with program.open("ab") as file:
        file.write(bytes(2 * LIMIT))
    if os.fork() == 0:
        os.execv(program, ["sleep", "600"])
    while os.readlink(f"/proc/{os.getpid()}/exe") == os.readlink(f"/proc/{only_child()}/exe"):
        time.sleep(0.01)
    program.unlink()


def only_child() -> int:
    return int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text())


WAYS: dict[str, Callable[[str, int], None]] = {
    "open": lambda folder, _: hold_open(folder),
    "mapped": lambda folder, _: hold_mapped(folder),
    "open in a thread alone": lambda folder, _: hold_open_in_a_thread_alone(folder),
    "open, first thread ended": lambda folder, ready: hold_after_the_first_thread(folder, hold_open, ready),
    "mapped, first thread ended": lambda folder, ready: hold_after_the_first_thread(folder, hold_mapped, ready),
    "program": lambda folder, _: run_program(folder),
}


@pytest.fixture(params=["root", "other user"])
def folder(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of the user who counts, who can see sizes of mapped files if that is root."""
    if os.getuid() != 0 and request.param == "root":
        pytest.skip("only root can see the size of a file that is only mapped")
    made = tempfile.mkdtemp()
    if os.getuid() == 0 and request.param == "other user":
        os.chown(made, OTHER_UID, OTHER_UID)
    yield made
    shutil.rmtree(made)


def become_owner(folder: str) -> None:
    owner = os.stat(folder).st_uid
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its user may look at it


def counted(folder: str, way: str) -> int:
    """Return what the owner of the folder counts while a child of another one of its processes holds files."""
    reading, writing = os.pipe()
    answer, answering = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            if os.getuid() == 0:
                become_owner(folder)
            if not os.fork():
                os.close(answering)
                WAYS[way](folder, writing)
                os.write(writing, b"1")
                time.sleep(LONG_S)
                os._exit(0)
            os.close(writing)
            assert os.read(reading, 1) == b"1", "it has ended"
            os.write(answering, str(num_bytes_in(folder, os.getpid(), LIMIT)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.close(answering)
    with os.fdopen(answer) as file, os.fdopen(reading):
        found = file.read()
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return int(found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_files_without_a_name_are_counted(folder: str, way: str) -> None:
    assert counted(folder, way) > LIMIT
    assert os.listdir(folder) == []


def counted_beside_a_child(folder: Path) -> int:
    """Return what is counted while this process has one more child, which inherits all that is open here."""
    pid = os.fork()
    if not pid:
        time.sleep(LONG_S)
        os._exit(0)
    try:
        return num_bytes_in(str(folder), os.getpid(), 1 << 40)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_file_that_is_open_and_mapped_counts_once(tmp_path: Path) -> None:
    before = counted_beside_a_child(tmp_path)  # files of the test runner, and those that other tests have left open
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(1 << 20))
        file.flush()
        with mmap.mmap(file.fileno(), 0), mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            found = counted_beside_a_child(tmp_path)
    assert 1 << 20 <= found - before <= (1 << 20) + (64 << 10)
