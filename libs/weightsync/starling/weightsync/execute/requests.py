"""What a reader and a source say to each other over UCX.

Each message is MessagePack after its length in four bytes, sent by tag. Tags are matched in the whole worker of who
receives, so a connection needs one of its own: the source picks a random one for the requests of each connection and
tells it first of all (`WELCOME_TAG`). A reader has one worker per source, where fixed tags do; it picks the tags of
the payloads. UCX's streams would need no tags, but a stream receive that is posted on a dead endpoint never completes.
"""

from __future__ import annotations

import secrets
import struct
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.execute.regions import Region

REQUEST_BYTES: Final = 1 << 18
"""Longest request, its length included; a bucket has at most `MAX_TRANSFERS` regions."""
ANSWER_BYTES: Final = 4096
"""Longest answer, its length included."""
WELCOME: Final = struct.Struct("<Q")
"""The first message of a source: the tag of this connection's requests."""
WELCOME_TAG: Final = 1
ANSWER_TAG: Final = 2
FIRST_PAYLOAD_TAG: Final = 16
_LENGTH: Final = struct.Struct("<I")
_REASON_CHARACTERS: Final = 1000


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


def new_request_tag() -> int:
    """Draw the tag of a connection's requests: nobody else can guess it."""
    return secrets.randbits(63) | 1 << 63


def refusal(reason: str) -> Answer:
    """Refuse for `reason`, cut so that it fits an answer."""
    return Answer(reason=reason[:_REASON_CHARACTERS])


def frame(message: Request | Answer) -> bytes:
    """Write a message with its length.

    Raises:
        WeightsError: it is longer than its receiver takes.
    """
    body = msgspec.msgpack.encode(message)
    longest = ANSWER_BYTES if isinstance(message, Answer) else REQUEST_BYTES
    if _LENGTH.size + len(body) > longest:
        raise WeightsError(f"A message of {len(body)} bytes exceeds {longest}; use smaller buckets.")
    return _LENGTH.pack(len(body)) + body


def _body(data: bytes | memoryview) -> bytes | memoryview:
    """Return what follows the length; `data` may be longer than the message."""
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length]


def decode_request(data: bytes | memoryview) -> Request:
    """Read a request from the buffer that it was received in.

    Raises:
        WeightsError: it is none.
    """
    try:
        request: Request = _requests.decode(_body(data))
    except msgspec.MsgspecError as error:
        raise WeightsError(f"A peer sent a malformed request: {error}.") from error
    return request


def decode_answer(data: bytes | memoryview) -> Answer:
    """Read an answer from the buffer that it was received in.

    Raises:
        WeightsError: it is none.
    """
    try:
        return _answers.decode(_body(data))
    except msgspec.MsgspecError as error:
        raise WeightsError(f"The source sent a malformed answer: {error}.") from error
