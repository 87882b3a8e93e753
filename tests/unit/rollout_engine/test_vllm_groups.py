"""What is remembered of the requests that stand for a group, and of the pull that several workers make together."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import WeightsError
from starling.common.wire.messages import Sampling, Status
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult, PartialCompletion
from starling.rollout.engine.vllm.groups import VllmGroup, completion_seed, sampling_arguments, token_versions
from starling.rollout.engine.vllm.pull_progress import (
    PullMessage,
    PullMessageReceiver,
    PullMessageSender,
    await_workers,
)
from starling.weightsync.puller.fetch import PullProgress
from starling.weightsync.puller.puller import PullReport


@dataclass
class Span:
    """As vLLM's."""

    version: str
    start: int
    end: int


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6), st.integers(0, 5))
def test_every_token_has_the_version_of_its_span(runs: list[tuple[int, int]], late: int) -> None:
    spans, expected = [], []
    for version, length in runs:
        spans.append(Span(str(version), len(expected), len(expected) + length))
        expected += [version] * length
    expected += [runs[-1][0] if runs else -1] * late
    found = token_versions(spans, len(expected))
    assert found.dtype == np.int32
    assert found.tolist() == expected


def some(num: int, version: int = 4, status: Status | None = None) -> PartialCompletion:
    return PartialCompletion(
        np.arange(num, dtype=np.int32), -np.ones(num, np.float32), np.full(num, version, np.int32), status
    )


def group(*partial: PartialCompletion, count: int = 3, max_tokens: int = 10, context: int = 32) -> VllmGroup:
    asked = GroupRequest("g", [5, 6], count, Sampling(max_tokens=max_tokens), partial=partial)
    return VllmGroup(0, asked, context)


def test_what_there_was_counts_into_the_budget() -> None:
    made = group(some(3), some(10), some(2, status=Status.OK))
    assert made.rows[0].budget == 7
    assert [row.index for row in made.unfinished] == [0]
    assert made.prompt_of(made.rows[0]) == [5, 6, 0, 1, 2]
    made.rows[0].token_ids, made.rows[0].logprobs = [9], [-0.5]
    made.rows[0].spans, made.rows[0].status = [Span("7", 0, 1)], Status.OK
    result = made.result()
    assert isinstance(result, GroupResult)
    first, second, third = result.completions
    assert first.token_ids.tolist() == [0, 1, 2, 9]
    assert first.versions.tolist() == [4, 4, 4, 7]
    assert first.logprobs.tolist() == [-1.0, -1.0, -1.0, -0.5]
    assert (len(second.token_ids), second.status) == (10, Status.TRUNCATED)
    assert third.status is Status.OK


def test_a_request_that_is_made_again_asks_for_what_is_missing() -> None:
    row = group(count=1).rows[0]
    row.token_ids, row.logprobs, row.spans = [7, 8], [-1.0, -2.0], [Span("3", 0, 2)]
    row.begin_again()
    assert (row.budget, row.num_before, row.token_ids) == (8, 2, [])
    assert row.partial().versions.tolist() == [3, 3]


def test_the_context_bounds_a_completion() -> None:
    assert [row.budget for row in group(max_tokens=100, context=20).rows] == [18, 18, 18]


def test_logits_that_are_no_numbers_fail_the_group() -> None:
    made = group(count=1)
    row = made.rows[0]
    row.token_ids, row.logprobs, row.spans, row.status = [1], [float("nan")], [Span("2", 0, 1)], Status.OK
    result = made.result()
    assert isinstance(result, GroupFailed)
    assert "not finite at weight version 2" in result.reason


def test_seeds_differ_by_completion_and_by_where_it_goes_on() -> None:
    sampling = Sampling(max_tokens=4, seed=3)
    rows = [*group().rows, *group(some(1), some(2), some(3)).rows]
    seeds = [completion_seed(sampling, row) for row in rows]
    assert len({*seeds}) == len(rows)
    assert seeds == [completion_seed(sampling, row) for row in rows]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_stop_token_is_named() -> None:
    asked = GroupRequest("g", [1], 1, Sampling(max_tokens=4, stop_token_ids=(9, 2)))
    made = VllmGroup(0, asked, 32)
    found = sampling_arguments(made, made.rows[0], (2, 3))
    assert found["stop_token_ids"] == [2, 3, 9]
    assert (found["max_tokens"], found["logprobs"]) == (4, 0)


def report(seconds: float, size: int, address: str) -> PullReport:
    rest = dict.fromkeys(("prepare_s", "read_s", "unpack_s", "digest_s", "wait_s", "confirm_s"), 0.0)
    counts: dict[str, Any] = {"num_buckets": 1, "num_retries": 0, "num_deltas": 0, "scratch_bytes": 5}
    return PullReport(
        version=1,
        transport="tcp",
        lanes=("a",),
        size_bytes=size,
        bytes_by_source={address: size},
        seconds=seconds,
        **counts,
        **rest,
    )


def tell(listener: PullMessageReceiver, *news: PullMessage) -> None:
    teller = PullMessageSender(listener.path)
    for one in news:
        teller.tell(one)
    teller.close()


def test_workers_that_pull_side_by_side_are_one_pull(tmp_path: Path) -> None:
    listener = PullMessageReceiver(tmp_path)
    half = PullProgress(bytes_done=5, bytes_total=10, seconds_left=1.0)
    tell(
        listener,
        PullMessage(pull=1, rank=0, problem="of a pull before"),
        PullMessage(pull=2, rank=0, progress=half),
        PullMessage(pull=2, rank=1, progress=half),
        PullMessage(pull=2, rank=1, report=report(2.0, 30, "x")),
        PullMessage(pull=2, rank=0, report=report(1.0, 10, "x")),
    )
    heard: list[PullProgress] = []
    joined = await_workers(listener, 2, 2, 5.0, lambda: False, heard.append)
    listener.close()
    assert [(p.bytes_done, p.bytes_total) for p in heard] == [(5, 10), (10, 20)]
    assert (joined.seconds, joined.size_bytes, joined.bytes_by_source) == (2.0, 40, {"x": 40})


def test_one_worker_that_fails_fails_the_pull(tmp_path: Path) -> None:
    listener = PullMessageReceiver(tmp_path)
    tell(
        listener,
        PullMessage(pull=1, rank=0, report=report(1.0, 1, "x")),
        PullMessage(pull=1, rank=1, problem="WeightsError: torn"),
    )
    with pytest.raises(WeightsError, match="Worker 1: WeightsError: torn"):
        await_workers(listener, 1, 2, 5.0, lambda: False, lambda _: None)
    listener.close()


def test_a_pull_that_is_cancelled_ends_though_no_worker_says_anything(tmp_path: Path) -> None:
    listener = PullMessageReceiver(tmp_path)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WeightsError, match="cancelled"):
        await_workers(listener, 1, 1, 5.0, cancelled.is_set, lambda _: None)
    listener.close()
