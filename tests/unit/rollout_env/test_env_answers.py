"""Answers of a hostile session: whatever it sends, a call returns a value or raises `SandboxError`."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.sandbox.usage import UNKNOWN, Usage
from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.sandbox.messages import (
    FRAME_LIMIT_BYTES,
    LENGTH,
    SESSION_BEGUN,
    CallRaised,
    CallReturned,
    FromSession,
    ProgramEnded,
    decode_from_fork_server,
    encode,
    frame,
)
from starling.rollout.env.sandbox.sandbox import SandboxError, SandboxSession, _ForkServer

LIMIT_S = 60.0

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=12))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)
tags = st.sampled_from(["returned", "outcome", "raised", "ready", "unusable", "open", ""])
bodies = (
    st.binary(max_size=64)
    | values.map(msgspec.msgpack.encode)
    | st.builds(lambda tag, fields: msgspec.msgpack.encode([tag, *fields]), tags, st.lists(values, max_size=5))
)
answers: st.SearchStrategy[FromSession] = st.one_of(
    st.builds(CallReturned, values), st.builds(CallRaised, st.text()), st.just(ProgramEnded(1.0, {"a": 2.0}, None, ""))
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid answer with some bytes changed, its length included."""
    data = bytearray(frame(encode(draw(answers))))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


async def measure_nothing(begin: bool) -> Usage:
    return Usage()


async def answer_with(sent: bytes) -> Any:
    """Call over a real connection whose other end sends `sent` and closes."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=mine)
    try:
        with theirs:
            theirs.sendall(SESSION_BEGUN + sent)
            theirs.shutdown(socket.SHUT_WR)
            return await SandboxSession(reader, writer, measure_nothing).call(0, {}, timeout_s=LIMIT_S)
    finally:
        writer.close()


def returns_or_fails(sent: bytes) -> None:
    try:
        asyncio.run(answer_with(sent))
    except SandboxError:
        return


@examples(150, deadline=None)
@given(bodies)
@example(b"\x92\xa8returned" + b"\x91" * 200_000 + b"\xc0")
@example(b"\x92\xa8returned\x81\x91\x01\x02")
@example(b"\x92\xa8returned\xc7\x0c\xff" + b"\xff" * 12)
@example(b"\x92\xa8returned\xd7\xff" + b"\xff" * 8)
def test_any_body_is_an_answer_or_a_failed_call(body: bytes) -> None:
    returns_or_fails(frame(body))


@examples(150, deadline=None)
@given(damaged() | st.binary(max_size=40))
@example(LENGTH.pack(FRAME_LIMIT_BYTES + 1))
@example(b"")
def test_any_stream_is_an_answer_or_a_failed_call(sent: bytes) -> None:
    returns_or_fails(sent)


def test_valid_answers_arrive() -> None:
    assert asyncio.run(answer_with(frame(encode(CallReturned({"a": [1]}))))) == {"a": [1]}
    ended = asyncio.run(answer_with(frame(encode(ProgramEnded(1.0, {"a": 2.0}, None, "")))))
    assert ended == EpisodeOutcome(1.0, {"a": 2.0}, None, "")
    with pytest.raises(SandboxError, match="it broke"):
        asyncio.run(answer_with(frame(encode(CallRaised("it broke")))))


@examples(300)
@given(bodies)
def test_any_first_message_of_a_fork_server_is_decoded_or_refused(body: bytes) -> None:
    try:
        decode_from_fork_server.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return


@examples(150, deadline=None)
@given(st.binary(max_size=64) | values.map(msgspec.msgpack.encode) | bodies)
@example(b"\x93\xa1\xff\x01\xc0")
@example(b"\x94\xa5usage\x01\x93\x00\x00\xc2" + b"\x91" * 9999)
def test_any_measurement_of_a_fork_server_is_one_or_unknown(body: bytes) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        theirs.send(body)
        theirs.shutdown(socket.SHUT_WR)
        assert _ForkServer(mine, None, None)._measure(1, False) == UNKNOWN  # type: ignore[arg-type]
