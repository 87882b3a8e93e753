"""Buffer pools: blocks never overlap, never exceed the limit, and are reused."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import WeightsError
from starling.weightsync.memory.pools import BufferPool, GrowingBufferPool, SharedBufferPool

TOO_MUCH = 1 << 60


def test_blocks_of_a_pool_are_disjoint_and_within_its_size() -> None:
    draw = random.Random(0)
    pool = BufferPool(4096)
    blocks: list[np.ndarray] = []
    for _ in range(2000):
        size = draw.randint(0, 1500)
        block = pool.acquire(size)
        if block is None:
            pool.release(blocks.pop(draw.randrange(len(blocks))))
            continue
        assert block.nbytes >= size
        block[:] = len(blocks)
        blocks.append(block)
        spans = sorted((b.ctypes.data, b.nbytes) for b in blocks if b.nbytes)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert sum(n for _, n in spans) <= pool.size_bytes == 4096
    for block in blocks:
        pool.release(block)
    assert pool.acquire(4096) is not None
    assert pool.acquire(1) is None


def test_failed_allocation_of_a_pool_marks_nothing_as_used() -> None:
    pool = BufferPool(TOO_MUCH)
    for _ in range(2):
        with pytest.raises(WeightsError, match=f"No {TOO_MUCH} bytes of memory"):
            pool.acquire(TOO_MUCH)


def test_failed_allocation_of_a_growing_pool_marks_nothing_as_used() -> None:
    pool = GrowingBufferPool(1000)
    with pytest.raises(WeightsError, match=f"No {TOO_MUCH} bytes of memory"):
        pool.acquire(TOO_MUCH)
    assert pool.acquire(1000) is not None


def test_growing_pool_reuses_blocks_and_is_limited() -> None:
    pool = GrowingBufferPool(1000)
    first = pool.acquire(600)
    assert first is not None
    assert pool.acquire(600) is None
    second = pool.acquire(400)
    assert second is not None
    pool.release(first)
    again = pool.acquire(500)
    assert again is first
    pool.release(first)
    pool.release(second)
    large = pool.acquire(5000)
    assert large is not None
    assert large.nbytes == 5000
    assert pool.acquire(1) is None


@given(st.lists(st.one_of(st.integers(1, 5000), st.none()), max_size=60))
def test_growing_pool_holds_no_more_blocks_than_were_used_at_once(steps: list[int | None]) -> None:
    pool = GrowingBufferPool(12_000)
    used: list[tuple[int, np.ndarray]] = []
    most = largest = 0
    for size in steps:
        if size is None:
            if used:
                pool.release(used.pop(0)[1])
        elif (block := pool.acquire(size)) is not None:
            assert block.nbytes >= size
            used.append((size, block))
        elif used:
            pool.release(used.pop()[1])
        most, largest = max(most, len(used)), max(largest, size or 0)
        total = pool.free_bytes + sum(block.nbytes for _, block in used)
        assert total <= min(most * largest, 12_000)


def test_shared_pool_waits_for_a_block_until_it_is_cancelled() -> None:
    pool = SharedBufferPool(4096)
    asked = iter([False, False, True])
    with pool.block(4096, lambda: False) as held:
        assert held is not None
        with pool.block(1, lambda: next(asked)) as other:
            assert other is None
    with pytest.raises(KeyError), pool.block(4096, lambda: True):
        raise KeyError
    with pool.block(4096, lambda: True) as again:
        assert again is not None
    assert next(asked, None) is None
