"""What a reader and a source say to each other over UCX.

Each message is MessagePack after its length in four bytes, on the endpoint's stream; the reader speaks first, the
source answers each request in turn. The payload of a `Read` travels by tag: the reader picks the tag, which is unique
in its own worker.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.execute.regions import Region

MAX_BYTES: Final = 1 << 20
"""Longest message."""
LENGTH: Final = struct.Struct("<I")


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Take a lease on a snapshot. Required before anything else."""

    snapshot: int
    token: str


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Send these regions of the opened snapshot as one payload with this tag."""

    tag: int
    regions: tuple[Region, ...]


class Confirm(msgspec.Struct, frozen=True, kw_only=True, tag="confirm"):
    """Is the snapshot still what it was?"""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give the lease back."""


Request = Open | Read | Confirm | Release


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the request was granted; a `reason` is a sentence saying why not. After a refusal the source hangs up."""

    reason: str = ""


_requests: Final = msgspec.msgpack.Decoder[Request](Request)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """Write a message with its length.

    Raises:
        WeightsError: it is longer than `MAX_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BYTES:
        raise WeightsError(f"A message of {len(body)} bytes exceeds {MAX_BYTES}; use smaller buckets.")
    return LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Read the length of the message that follows.

    Raises:
        WeightsError: it is longer than `MAX_BYTES`.
    """
    (length,) = LENGTH.unpack(header)
    if not 0 < length <= MAX_BYTES:
        raise WeightsError(f"A peer announced a message of {length} bytes; it is none of ours.")
    return int(length)


def decode_request(body: bytes) -> Request:
    """Read a request.

    Raises:
        WeightsError: it is none.
    """
    try:
        request: Request = _requests.decode(body)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"A peer sent a malformed request: {error}.") from error
    return request


def decode_answer(body: bytes) -> Answer:
    """Read an answer.

    Raises:
        WeightsError: it is none.
    """
    try:
        return _answers.decode(body)
    except msgspec.MsgspecError as error:
        raise WeightsError(f"The source sent a malformed answer: {error}.") from error
