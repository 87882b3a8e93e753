"""A text that rank 0 makes for all ranks, such as the digest of base weights."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed import distributed_c10d

from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.parallel.mesh import Mesh

TIMEOUT_S = 4.0
"""Of an operation of the ranks."""


def make_slowly(seconds: float) -> str:
    time.sleep(seconds)
    return f"of rank {dist.get_rank()}"


def text_of_rank(_: int, seconds: float) -> str:
    mesh = Mesh(ParallelSettings(dp_shard=2))
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
    return mesh.from_first(partial(make_slowly, seconds), interval_s=0.2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [0.0, TIMEOUT_S + 2.0])
def test_text_of_the_first_rank_may_take_longer_than_an_operation(seconds: float) -> None:
    assert run_ranks(2, text_of_rank, seconds) == ["of rank 0"] * 2


def fail_to_make() -> str:
    raise ValueError("the file cannot be read")


def failed_text_of_rank(_: int) -> str:
    return Mesh(ParallelSettings(dp_shard=2)).from_first(fail_to_make)


def test_failure_of_the_first_rank_is_raised() -> None:
    with pytest.raises(AssertionError, match=r"the file cannot be read|Connection closed by peer"):
        run_ranks(2, failed_text_of_rank)
