"""Device memory of a CPU: it has the rules of a GPU, and pages of the host can be locked."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from starling.weightsync.memory.arrays import allocate
from starling.weightsync.memory.device_memory import CpuAllocator
from starling.weightsync.memory.protected_pages import ProtectedMemory

SIZE = 3 * 4096 + 17


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def locked_bytes() -> int:
    (kib,) = re.findall(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) << 10


@pytest.mark.parametrize("size", [0, 1, 4096, SIZE])
def test_device_memory_is_copied_to_the_host(size: int) -> None:
    memory, wanted = CpuAllocator().allocate(size), np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with memory.opened() as flat:
        assert flat.nbytes == size
        flat[:] = wanted
    host = np.zeros(size, np.uint8)
    memory.copy_to(host)
    assert np.array_equal(host, wanted)
    memory.copy_to(host[: size // 2])
    memory.free()


@pytest.mark.parametrize("touch", ["print(kept[0])", "kept[0] = 1", "memory.copy_to(host); print(kept[0])"])
def test_device_memory_touched_as_memory_of_the_host_ends_the_process(touch: str) -> None:
    done = run_python(
        "import numpy as np\n"
        "from starling.weightsync.memory.protected_pages import ProtectedMemory\n"
        "memory, host = ProtectedMemory(8192), np.zeros(8192, np.uint8)\n"
        "with memory.opened() as flat: flat[:] = 7; kept = flat\n"
        f"{touch}"
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "")


def test_freed_device_memory_is_unmapped() -> None:
    def mapped() -> int:
        (kib,) = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kib) << 10

    before = mapped()
    memory = ProtectedMemory(256 << 20)
    assert mapped() - before >= 256 << 20
    memory.free()
    assert mapped() - before < 128 << 20


def test_pinned_pages_are_locked_until_they_are_unpinned() -> None:
    allocator, memory, before = CpuAllocator(), allocate(1 << 20), locked_bytes()
    allocator.pin(memory)
    assert locked_bytes() - before >= 1 << 20
    allocator.unpin(memory)
    assert locked_bytes() == before
    allocator.pin(allocate(0))


def test_pages_that_cannot_be_locked_name_the_remedy() -> None:
    done = run_python(
        "import os, resource\n"
        "from starling.common.errors import WeightsError\n"
        "from starling.weightsync.memory.arrays import allocate\n"
        "from starling.weightsync.memory.device_memory import CpuAllocator\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"  # root may lock anything
        "try: CpuAllocator().pin(allocate(1 << 20))\n"
        "except WeightsError as error: print(error)"
    )
    assert re.match(r"1048576 bytes cannot be locked into memory \(.+\): raise the limit \(ulimit -l\)", done.stdout)
