"""Wire messages of a rollout: progress of pulls, and partial completions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.truncation import KeptTokens
from starling.common.wire.messages import GenerateGroup, LeaseProgress, Prompt, Sampling, Status
from starling.rollout.engine.base import PartialCompletion, RequestError
from starling.rollout.shell.results import interrupted_message, lease_progress, read_partials
from starling.weightsync.puller.report import PullProgress


def test_unknown_time_left_is_not_reported() -> None:
    message = lease_progress(PullProgress(bytes_done=0, bytes_total=7, seconds_left=float("inf")))
    assert message == LeaseProgress(bytes_done=0, bytes_total=7)


def test_pull_progress_is_reported() -> None:
    message = lease_progress(PullProgress(bytes_done=3, bytes_total=7, seconds_left=1.5))
    assert message == LeaseProgress(bytes_done=3, bytes_total=7, seconds_left=1.5)


ASKED = GenerateGroup(
    lease="generate:t0:1",
    purpose="train",
    prompt=Prompt(id="p"),
    num_completions=2,
    sampling=Sampling(max_tokens=9),
    min_version=0,
)


def partial(length: int, status: Status | None) -> PartialCompletion:
    draw = np.random.default_rng(length)
    ids, logprobs = draw.integers(0, 2**31 - 1, length), -draw.random(length)
    return PartialCompletion(ids.astype(np.int32), logprobs.astype(np.float32), np.full(length, 3, np.int32), status)


def recorded(one: PartialCompletion, records: bool) -> PartialCompletion:
    """Return `one` with one to three tokens kept at each position, if it `records` them."""
    rows = [np.arange(token, token + 1 + at % 3, dtype=np.int64) % 2**31 for at, token in enumerate(one.token_ids)]
    return replace(one, kept=KeptTokens.from_rows(rows)) if records else one


STATUSES = st.sampled_from((None, Status.OK, Status.TRUNCATED))


@given(st.lists(st.tuples(st.integers(0, 5), STATUSES, st.booleans()), max_size=4))
def test_partial_completions_round_trip(left: list[tuple[int, Status | None, bool]]) -> None:
    partials = tuple(recorded(partial(length, status), records) for length, status, records in left)
    message, buffers = interrupted_message("generate:t0:1", partials, "it leaves")
    assert [meta.nbytes for meta in message.tensors] == [len(buffer) for buffer in buffers]
    found = read_partials(msgspec.structs.replace(ASKED, partial=message.partial, tensors=message.tensors), buffers)
    if not any(length for length, *_ in left):
        assert found == (), "an empty handover has no partial completions"
        return
    for sent, received in zip(partials, found, strict=True):
        assert received.status is (sent.status if len(sent.token_ids) else None)
        for name in ("token_ids", "logprobs", "versions"):
            a, b = getattr(sent, name), getattr(received, name)
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()
        if not any(records for _, _, records in left):
            assert received.kept is None
        else:
            assert received.kept is not None
            rows = sent.kept.rows() if sent.kept is not None else [[]] * len(sent.token_ids)
            assert [list(row) for row in received.kept.rows()] == [list(row) for row in rows]


def test_partial_completions_of_wrong_size_are_rejected() -> None:
    message, buffers = interrupted_message("generate:t0:1", (partial(2, None), partial(3, None)), "it leaves")
    asked = msgspec.structs.replace(ASKED, partial=message.partial, tensors=message.tensors)
    counts = np.array([1, 2, 0, 0, -1], np.int32).tobytes()
    for wrong in (
        buffers[:2],
        (*buffers[:2], buffers[2][:-4]),
        (*buffers, buffers[0]),
        (*buffers, buffers[0], buffers[0][:8]),
        (*buffers, counts, bytes(8)),
    ):
        with pytest.raises(RequestError, match="have 5 tokens, and buffers of"):
            read_partials(asked, wrong)


def test_ended_completion_without_a_token_is_generated() -> None:
    """An older controller may have kept such a lie of another rollout: no answer could be made of it."""
    message, buffers = interrupted_message("generate:t0:1", (partial(2, None), partial(0, Status.OK)), "it leaves")
    asked = msgspec.structs.replace(ASKED, partial=message.partial, tensors=message.tensors)
    assert [one.status for one in read_partials(asked, buffers)] == [None, None]
