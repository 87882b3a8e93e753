"""Messages of a hostile worker: whatever it sends, the service decodes it or takes the worker as ended."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests import examples

from starling.reward.score.scorers.batch import BatchScores, ScorerForm
from starling.reward.score.workers.process import WorkerProcess
from starling.reward.score.workers.protocol import (
    FRAME_LIMIT_BYTES,
    CallReport,
    FrameReader,
    WorkerReady,
    decode_from_worker,
    frame,
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
values: st.SearchStrategy[Any] = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
tags = st.sampled_from(["ready", "start_failed", "report", "setup", ""])
bodies = st.binary(max_size=48) | st.builds(
    lambda tag, fields: msgspec.msgpack.encode([tag, *fields]), tags, st.lists(values, max_size=5)
)
FORMS = ((0, ScorerForm()), (1, ScorerForm(("quality", "motion"), "groupwise", 8)))
MESSAGES = (
    WorkerReady(FORMS),
    CallReport(3, BatchScores(((0.5,),), ("",)), 1.0),
    CallReport(4, BatchScores(((None, 1.0), (2.0, 3.0)), ("raised", "")), 2.0),
)


def decoded(data: bytes, cuts: list[int]) -> list[Any]:
    """Decode a stream that arrives in pieces, as `WorkerProcess.receive` does."""
    reader, found = FrameReader(), list[Any]()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        found += [decode_from_worker.decode(body) for body in reader.feed(data[start:end])]
    return found


@examples(300)
@given(st.lists(bodies, max_size=4), st.binary(max_size=16), st.lists(st.integers(0, 999), max_size=6))
@example([b"\x96\xa6report\x00\xcb" + bytes(8) + b"\xa0\xcb" + bytes(8) + b"\x91" * 200_000 + b"\xc0"], b"", [])
@example([], (FRAME_LIMIT_BYTES + 1).to_bytes(4, "little"), [])
def test_any_stream_is_decoded_or_ends_the_worker(sent: list[bytes], tail: bytes, cuts: list[int]) -> None:
    data = b"".join(len(body).to_bytes(4, "little") + body for body in sent) + tail
    try:
        decoded(data, cuts)
    except WorkerProcess.UNDECODABLE:
        return


@given(st.lists(st.integers(0, 999), max_size=12))
def test_valid_messages_arrive_whatever_the_pieces(cuts: list[int]) -> None:
    assert decoded(b"".join(map(frame, MESSAGES)), cuts) == list(MESSAGES)
