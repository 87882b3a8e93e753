"""State of vLLM's groups, and the joined pull of several workers."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from starling.algo.truncation import KeptTokens, mean_nats
from starling.common.errors import WeightsError
from starling.common.wire.messages import MAX_READS, Sampling, Status
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.vllm.groups import (
    VllmGroup,
    completion_seed,
    num_logprobs,
    sampling_arguments,
    token_versions,
)
from starling.rollout.engine.vllm.pull_progress import (
    PullMessage,
    PullMessageReceiver,
    PullMessageSender,
    await_workers,
)
from starling.weightsync.puller.report import PullProgress, PullReport, SourceRead


@dataclass
class Span:
    """A stand-in for vLLM's `WeightVersionSpan`."""

    version: str
    start: int
    end: int


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6), st.integers(0, 5))
def test_token_versions_follow_the_spans(runs: list[tuple[int, int]], late: int) -> None:
    spans, expected = [], []
    for version, length in runs:
        spans.append(Span(str(version), len(expected), len(expected) + length))
        expected += [version] * length
    expected += [runs[-1][0] if runs else -1] * late
    found = token_versions(spans, len(expected))
    assert found.dtype == np.int32
    assert found.tolist() == expected


def partial_completion(num: int, version: int = 4, status: Status | None = None) -> PartialCompletion:
    return PartialCompletion(
        np.arange(num, dtype=np.int32), -np.ones(num, np.float32), np.full(num, version, np.int32), status
    )


def group(*partial: PartialCompletion, count: int = 3, max_tokens: int = 10, context: int = 32) -> VllmGroup:
    asked = GroupRequest("g", [5, 6], count, Sampling(max_tokens=max_tokens), partial=partial)
    return VllmGroup(0, asked, context)


class FlatOutput:
    """vLLM's log-probabilities of some tokens, as `FlatLogprobs` has them."""

    def __init__(self, *positions: dict[int, float]) -> None:
        self.token_ids = [token for one in positions for token in one]
        self.logprobs = [value for one in positions for value in one.values()]
        ends = np.cumsum([len(one) for one in positions]).tolist()
        self.start_indices, self.end_indices = [0, *ends[:-1]], ends


class Output:
    """vLLM's output of some tokens of a request."""

    prompt_logprobs = None

    def __init__(self, *positions: dict[int, float], finished: bool = False) -> None:
        self.token_ids, self.logprobs = [next(iter(one)) for one in positions], FlatOutput(*positions)
        self.weight_versions = [Span("7", 0, len(positions))]
        self.finish_reason = "stop" if finished else None
        self.outputs, self.finished = (self,), finished


def test_kept_tokens_of_a_resumed_and_restarted_completion() -> None:
    before = PartialCompletion(
        np.array([4], np.int32),
        np.array([-0.5], np.float32),
        np.array([3], np.int32),
        kept=KeptTokens.from_rows([np.array([2, 4])]),
    )
    how = Sampling(max_tokens=9, top_p=0.9, top_k=5, logprobs="truncated")
    asked = GroupRequest("g", [5, 6], 1, how, partial=(before,))
    state = VllmGroup(0, asked, 32, num_logprobs=num_logprobs(asked, speculative=False))
    (one,) = state.completions
    assert sampling_arguments(state, one, (3,))["logprobs"] == -1
    assert one.add_output(Output({8: -1.5, -1: -0.5, 2: 0.0, 9: 0.0}, {7: -0.25, -1: -0.25})) == 2
    one.spans, one.restart = [Span("6", 0, 2)], True
    one.prepare_restart()
    one.add_output(Output({1: -2.0, -1: -0.75, 0: 0.0}, finished=True))
    result = state.result()
    assert isinstance(result, GroupResult)
    (completion,) = result.completions
    assert completion.token_ids.tolist() == [4, 8, 7, 1]
    assert completion.versions.tolist() == [3, 6, 6, 7]
    assert completion.logprobs.tolist() == [-0.5, -1.0, 0.0, -1.25]
    assert completion.kept is not None
    assert [row.tolist() for row in completion.kept.rows()] == [[2, 4], [2, 8, 9], [7], [0, 1]]
    assert completion.truncation_nats is not None
    np.testing.assert_array_equal(completion.truncation_nats, [np.nan, 0.5, 0.25, 0.75])
    assert mean_nats((completion.truncation_nats,)) == 0.5, "of the tokens that this engine sampled"


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, 0),
        ({"top_p": 0.9}, 1),
        ({"top_k": 3}, 1),
        ({"min_p": 0.1}, 1),
        ({"top_p": 0.9, "temperature": 0.0}, 0),
        ({"top_k": 3, "logprobs": "truncated"}, -1),
    ],
)
def test_log_probabilities_asked_for(how: dict[str, Any], wanted: int) -> None:
    asked = GroupRequest("g", [5], 1, Sampling(max_tokens=3, **how))
    assert num_logprobs(asked, speculative=False) == wanted
    if wanted == -1 or "min_p" in how:
        with pytest.raises(RequestError, match=r"remove rollout\.vllm\.speculative"):
            num_logprobs(asked, speculative=True)
    else:
        assert num_logprobs(asked, speculative=True) == 0


def test_group_budget_counts_partial_completions() -> None:
    state = group(partial_completion(3), partial_completion(10), partial_completion(2, status=Status.OK))
    assert state.completions[0].budget == 7
    assert [completion.index for completion in state.unfinished] == [0]
    assert state.prompt_of(state.completions[0]) == [5, 6, 0, 1, 2]
    state.completions[0].token_ids, state.completions[0].logprobs = [9], [-0.5]
    state.completions[0].spans, state.completions[0].status = [Span("7", 0, 1)], Status.OK
    result = state.result()
    assert isinstance(result, GroupResult)
    first, second, third = result.completions
    assert first.token_ids.tolist() == [0, 1, 2, 9]
    assert first.versions.tolist() == [4, 4, 4, 7]
    assert first.logprobs.tolist() == [-1.0, -1.0, -1.0, -0.5]
    assert (len(second.token_ids), second.status) == (10, Status.TRUNCATED)
    assert third.status is Status.OK


def test_completion_restart_requests_remaining_tokens() -> None:
    completion = group(count=1).completions[0]
    completion.token_ids, completion.logprobs, completion.spans = [7, 8], [-1.0, -2.0], [Span("3", 0, 2)]
    completion.prepare_restart()
    assert (completion.budget, completion.num_resumed, completion.token_ids) == (8, 2, [])
    assert completion.partial().versions.tolist() == [3, 3]


def test_group_budget_is_bounded_by_the_context() -> None:
    assert [completion.budget for completion in group(max_tokens=100, context=20).completions] == [18, 18, 18]


def test_group_with_non_finite_logits_fails() -> None:
    state = group(count=1)
    completion = state.completions[0]
    completion.token_ids, completion.logprobs, completion.spans, completion.status = (
        [1],
        [float("nan")],
        [Span("2", 0, 1)],
        Status.OK,
    )
    result = state.result()
    assert isinstance(result, GroupFailed)
    assert "not finite at weight version 2" in result.reason


def test_completion_seed_differs_by_index_and_resumed_length() -> None:
    sampling = Sampling(max_tokens=4, seed=3)
    completions = [
        *group().completions,
        *group(partial_completion(1), partial_completion(2), partial_completion(3)).completions,
    ]
    seeds = [completion_seed(sampling, completion) for completion in completions]
    assert len({*seeds}) == len(completions)
    assert seeds == [completion_seed(sampling, completion) for completion in completions]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_arguments_list_every_stop_token() -> None:
    asked = GroupRequest("g", [1], 1, Sampling(max_tokens=4, stop_token_ids=(9, 2)))
    state = VllmGroup(0, asked, 32)
    found = sampling_arguments(state, state.completions[0], (2, 3))
    assert found["stop_token_ids"] == [2, 3, 9]
    assert (found["max_tokens"], found["logprobs"]) == (4, 0)


@pytest.mark.parametrize(("listens", "interval"), [(True, 1), (False, 8)])
def test_vllm_outputs_each_token_only_to_a_listener(listens: bool, interval: int) -> None:
    listener = (lambda *_: None) if listens else None
    state = VllmGroup(0, GroupRequest("g", [1], 1, Sampling(max_tokens=4), listener=listener), 32)
    assert sampling_arguments(state, state.completions[0], (2,))["stream_interval"] == interval


def report(seconds: float, size: int, address: str) -> PullReport:
    rest = dict.fromkeys(("prepare_s", "read_s", "unpack_s", "digest_s", "wait_s", "confirm_s"), 0.0)
    counts: dict[str, Any] = {"num_buckets": 1, "num_retries": 0, "num_deltas": 0, "buffer_bytes": 5}
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


def send(receiver: PullMessageReceiver, *messages: PullMessage) -> None:
    sender = PullMessageSender(receiver.path)
    for message in messages:
        sender.send(message)
    sender.close()


def test_await_workers_joins_progress_and_reports(tmp_path: Path) -> None:
    receiver = PullMessageReceiver(tmp_path)
    half = PullProgress(bytes_done=5, bytes_total=10, seconds_left=1.0)
    send(
        receiver,
        PullMessage(pull=1, rank=0, problem="of an earlier pull"),
        PullMessage(pull=2, rank=0, progress=half),
        PullMessage(pull=2, rank=1, progress=half),
        PullMessage(pull=2, rank=1, report=report(2.0, 30, "x")),
        PullMessage(pull=2, rank=0, report=report(1.0, 10, "x")),
    )
    progress: list[PullProgress] = []
    report_of_all = await_workers(receiver, 2, 2, 5.0, lambda: False, progress.append)
    receiver.close()
    assert [(p.bytes_done, p.bytes_total) for p in progress] == [(5, 10), (10, 20)]
    assert (report_of_all.seconds, report_of_all.size_bytes, report_of_all.bytes_by_source) == (2.0, 40, {"": 40})


def test_what_a_worker_says_fits_into_a_datagram(tmp_path: Path) -> None:
    """Of a pull from a policy of thousands of ranks, and of one whose sources all gave long reasons."""
    receiver = PullMessageReceiver(tmp_path)
    reads = tuple(SourceRead(address="h:1", source_rank=rank, rank=0, transport="tcp", num_bytes=rank, seconds=1.0)
                  for rank in range(5000))  # fmt: skip
    sources = {f"10.0.0.{rank}:{rank}": 1 for rank in range(5000)}
    long = replace(report(1.0, 10, "x"), reads=reads, bytes_by_source=sources)
    send(receiver, PullMessage(pull=1, rank=0, report=long), PullMessage(pull=2, rank=0, problem="x" * 200_000))
    found = await_workers(receiver, 1, 1, 5.0, lambda: False, lambda _: None)
    assert sum(found.bytes_by_source.values()) == 5000
    assert [read.num_bytes for read in found.reads] == list(range(4999, 4999 - MAX_READS, -1))
    with pytest.raises(WeightsError, match=r"^Worker 0: x{8000}$"):
        await_workers(receiver, 2, 1, 5.0, lambda: False, lambda _: None)
    receiver.close()


@pytest.mark.parametrize("datagram", [b"junk", b"\x81\xa7problem\xa1\xff", b"\x81\xa1x" + b"\x91" * 9999])
def test_datagram_that_is_no_message_is_dropped(datagram: bytes, tmp_path: Path) -> None:
    receiver = PullMessageReceiver(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(datagram, receiver.path)
    assert receiver.next(5.0) is None
    send(receiver, PullMessage(pull=1, rank=0, problem="after it"))
    message = receiver.next(5.0)
    receiver.close()
    assert message is not None
    assert message.problem == "after it"


def test_await_workers_raises_the_error_of_one_worker(tmp_path: Path) -> None:
    receiver = PullMessageReceiver(tmp_path)
    send(
        receiver,
        PullMessage(pull=1, rank=0, report=report(1.0, 1, "x")),
        PullMessage(pull=1, rank=1, problem="WeightsError: torn"),
    )
    with pytest.raises(WeightsError, match="Worker 1: WeightsError: torn"):
        await_workers(receiver, 1, 2, 5.0, lambda: False, lambda _: None)
    receiver.close()


def test_await_workers_cancelled_ends_without_messages(tmp_path: Path) -> None:
    receiver = PullMessageReceiver(tmp_path)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WeightsError, match="cancelled"):
        await_workers(receiver, 1, 1, 5.0, cancelled.is_set, lambda _: None)
    receiver.close()
