"""Threads of a fetch: none of them writes the destination after the fetch has failed."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from puller_models import Model, publish, publishers

from starling.common.errors import WeightsError
from starling.weightsync.memory import jobs
from starling.weightsync.memory.arrays import Array
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.deadline import Deadline
from starling.weightsync.puller.fetch import BucketFetcher, FetchOptions
from starling.weightsync.puller.schedule import BucketRead, make_schedule
from starling.weightsync.puller.sources import SourceConnections

NUM_FAILING = 2
DEADLINE_S = 30.0
GRACE_S = 0.5
"""How long a thread keeps writing to see whether the fetch ends meanwhile."""


def test_failed_fetch_waits_for_each_writing_thread_though_several_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads fail and a third one still writes: `run` must not return before the third is done."""
    monkeypatch.setattr(jobs, "AT_ONCE_ARRAYS", -1)
    model = Model(random.Random(3), num_tensors=12, longest=60)
    source, destination = model.layout("policy-0", 1, copies=False), model.layout("rollout-0", 1)
    plan = make_plan(source, destination, bucket_bytes=256)
    schedule = make_schedule(plan, destination, 0, [None] * len(destination.ranks[0].shards))
    assert len(schedule.reads) > NUM_FAILING
    writing, ended = threading.Event(), threading.Event()
    order = iter(range(1 << 20))
    ended_while_writing: list[bool] = []

    def place(read: BucketRead, index: int, array: Array) -> None:
        if next(order) == 0:
            writing.set()
            ended_while_writing.append(ended.wait(GRACE_S))
        else:
            assert writing.wait(DEADLINE_S)
            raise WeightsError("the device is gone")

    with publishers(source, ["tcp"]) as sources, ThreadPoolExecutor(NUM_FAILING + 1) as pool:
        offer = publish(sources, source, 0, model.full(0))
        connections = SourceConnections(pool)
        fetcher = BucketFetcher(
            schedule,
            connections.connections({0: offer.ranks}),
            BufferPool(sum(read.buffer_bytes(scatters=False) for read in schedule.reads)),
            pool,
            FetchOptions(
                digests="full",
                version=0,
                rank=0,
                stall_s=DEADLINE_S,
                place=place,
                tensor=lambda *_: None,
                arrived=lambda *_: None,
                requested_whole=lambda _: None,
                delta_bytes=0,
            ),
            connections.numbers,
            [-1] * len(schedule.reads),
        )
        try:
            with pytest.raises(WeightsError, match="the device is gone"):
                fetcher.run(Deadline(DEADLINE_S))
        finally:
            ended.set()
            connections.close()
    assert ended_while_writing == [False]
