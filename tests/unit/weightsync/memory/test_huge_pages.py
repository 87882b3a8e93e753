"""Huge pages: the content stays in place, and no mapping is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from starling.weightsync.memory.huge_pages import CHUNK_BYTES, HUGE_BYTES, collapse, map_shared

NAME = "starling-huge-test"


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


@pytest.mark.parametrize("size", [1, 4096, HUGE_BYTES, CHUNK_BYTES + HUGE_BYTES + 4097])
def test_collapse_keeps_the_content_and_the_last_view_unmaps(size: int) -> None:
    descriptor = os.memfd_create(NAME)
    os.posix_fallocate(descriptor, 0, size)
    memory = map_shared(descriptor, size, writable=True)
    assert memory.nbytes == size
    assert memory.ctypes.data % HUGE_BYTES == 0
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory[:] = content
    done = collapse(memory, lambda: False)
    assert done in (0, size // HUGE_BYTES * HUGE_BYTES)  # kernels without support change nothing
    np.testing.assert_array_equal(memory, content)
    assert os.pread(descriptor, size, 0) == content.tobytes()
    view = memory[size // 2 :]
    del memory
    assert view.tobytes() == content[size // 2 :].tobytes()
    del view
    os.close(descriptor)
    assert not mappings()


def test_collapse_ends_when_stopped() -> None:
    descriptor = os.memfd_create(NAME)
    os.posix_fallocate(descriptor, 0, 2 * CHUNK_BYTES)
    answers: list[bool] = []

    def stopped() -> bool:
        answers.append(len(answers) > 0)
        return answers[-1]

    memory = map_shared(descriptor, 2 * CHUNK_BYTES, writable=True)
    os.close(descriptor)
    assert collapse(memory, stopped) in (0, CHUNK_BYTES)


def test_map_shared_without_memory_raises() -> None:
    descriptor = os.memfd_create(NAME)
    try:
        with pytest.raises(OSError, match="memory"):
            map_shared(descriptor, 1 << 60, writable=True)
    finally:
        os.close(descriptor)
