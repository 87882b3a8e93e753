"""What a reader and a source say to each other, over whatever transport.

A reader may have several requests under way on one connection. Each has a number of the reader's choice, which comes
back in the answer. What is asked for are boxes of tensors, by name: the source alone knows where in its snapshot they
lie, so nobody can ask for memory that is not a weight, and whoever holds the box can answer.

The payload of a `ReadBoxes` is cut into segments, runs of its boxes in order. Within a segment the boxes lie
row-major, each
at a multiple of `ALIGNMENT`. A segment of one box that is contiguous on both sides is sent from where it is to where it
belongs; a transport may use that, and need not.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeVar

import msgspec
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.plan.layout import ITEM_BYTES, ShardPiece
from starling.weightsync.plan.moves import MAX_TRANSFERS
from starling.weightsync.plan.planner import MAX_BUCKET_BYTES

REQUEST_BYTES: Final = 1 << 20
"""Longest request."""
ANSWER_BYTES: Final = 20 << 10
"""Longest answer or word."""
_CHECK_BYTES: Final = xxhash.xxh3_64().digest_size
LENGTH: Final = struct.Struct("<I")
"""Goes before a message where the transport does not say how long it is."""
_REASON_CHARACTERS: Final = 1000

T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
"""What a stranger may put where a number goes."""


class OpenSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Take a lease on a snapshot. Required before anything else."""

    number: Number
    snapshot: Number
    token: str


class ReadBoxes(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Send these boxes of the opened snapshot."""

    number: Number
    tag: Number
    """The first segment's tag, where the transport has tags; the others follow."""
    segments: tuple[Number, ...]
    """How many boxes each segment has."""
    boxes: tuple[ShardPiece, ...]
    digests: DigestMode
    salt: Number
    base: Number = 0
    encoded: tuple[Number, ...] = ()
    """For each box the bytes of its delta against version `base`, as a `MeasureDeltas` has found, or 0 where the box
    itself shall be sent; empty when all of them shall."""


class MeasureDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="compare"):
    """Say how large the deltas of these boxes against version `base` are. A `ReadBoxes` may then ask for them."""

    number: Number
    base: Number
    boxes: tuple[ShardPiece, ...]


class ReleaseSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give the lease back. Granted only if the snapshot has stood still until now."""

    number: Number


Request = OpenSnapshot | ReadBoxes | MeasureDeltas | ReleaseSnapshot


class SourceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request was granted."""

    number: int
    reason: str = ""
    """A sentence that says why not; empty when granted. The segments of a refused `ReadBoxes` are empty."""
    digests: bytes = b""
    """Of the boxes of a `ReadBoxes`, one after the other."""
    bases: tuple[int, ...] = ()
    """To an `OpenSnapshot`: versions against which there may be deltas."""
    sizes: tuple[int, ...] = ()
    """To a `MeasureDeltas`: bytes of each box's delta; 0 where there is none."""


class StoreEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the two ends of a connection tell each other so that they also find one another elsewhere."""

    key: str
    """Empty in the last word."""
    value: bytes


Message = Request | SourceAnswer | StoreEntry

_requests: Final = msgspec.msgpack.Decoder[Request](Request)
_answers: Final = msgspec.msgpack.Decoder(SourceAnswer)
_words: Final = msgspec.msgpack.Decoder(StoreEntry)


def refusal(number: int, reason: str) -> SourceAnswer:
    """Refuse for `reason`, cut so that it fits an answer."""
    return SourceAnswer(number=number, reason=reason[:_REASON_CHARACTERS])


def with_length(message: Message) -> bytes:
    """Write a message after its length."""
    data = encode_message(message)
    return LENGTH.pack(len(data)) + data


def without_length(data: memoryview) -> memoryview:
    """Return the message in a buffer that may be longer; what is no message stays none."""
    (length,) = LENGTH.unpack_from(data)
    return data[LENGTH.size : LENGTH.size + length]


def encode_message(message: Message) -> bytes:
    """Write a message.

    Raises:
        WeightsError: it is longer than its receiver takes.
    """
    data = with_checksum(msgspec.msgpack.encode(message))
    longest = REQUEST_BYTES if isinstance(message, Request) else ANSWER_BYTES
    if len(data) > longest:
        raise WeightsError(f"A message of {len(data)} bytes exceeds {longest}; use smaller buckets.")
    return data


def with_checksum(body: bytes) -> bytes:
    """Put the xxh3-64 of a message before it.

    A request whose bits changed on the way would fetch another box, with true digests of that other box.
    """
    return xxhash.xxh3_64_digest(body) + body


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Read a request.

    Raises:
        WeightsError: it is none, or it asks for too much at once.
    """
    request: Request = decode_checked(_requests, data, "A peer sent a malformed request")
    if isinstance(request, ReadBoxes):
        _check_boxes(request.boxes)
        _check_read(request)
    elif isinstance(request, MeasureDeltas):
        _check_boxes(request.boxes)
    return request


def decode_answer(data: bytes | bytearray | memoryview) -> SourceAnswer:
    """Read an answer.

    Raises:
        WeightsError: it is none.
    """
    return decode_checked(_answers, data, "The source sent a malformed answer")


def decode_store_entry(data: bytes | bytearray | memoryview) -> StoreEntry:
    """Read a word.

    Raises:
        WeightsError: it is none.
    """
    return decode_checked(_words, data, "The peer sent a malformed word")


def decode_checked(decoder: msgspec.msgpack.Decoder[T], data: bytes | bytearray | memoryview, complaint: str) -> T:
    """Read a message that was `sealed`.

    Raises:
        WeightsError: it is not what it was, or none that the decoder knows; the sentence begins with `complaint`.
    """
    check, body = bytes(data[:_CHECK_BYTES]), memoryview(data)[_CHECK_BYTES:]
    if check != xxhash.xxh3_64_digest(body):
        raise WeightsError(f"{complaint}: its bits have changed on the way.")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsError(f"{complaint}: {error}.") from error


def _check_boxes(boxes: tuple[ShardPiece, ...]) -> None:
    if not 0 < len(boxes) <= MAX_TRANSFERS:
        raise WeightsError(f"Refused to read {len(boxes)} boxes at once; 1 to {MAX_TRANSFERS} may be asked for.")
    for box in boxes:
        if not box.names or box.dtype not in ITEM_BYTES or min((*box.box.offset, *box.box.size), default=0) < 0:
            raise WeightsError(f"Refused to read the malformed box {box}.")
    total = sum(box.size_bytes for box in boxes)
    if total > MAX_BUCKET_BYTES:
        raise WeightsError(f"Refused to read {total} bytes at once, more than {MAX_BUCKET_BYTES}.")


def _check_read(request: ReadBoxes) -> None:
    boxes, encoded = request.boxes, request.encoded
    if min(request.segments, default=0) < 1 or sum(request.segments) != len(boxes):
        raise WeightsError(f"Refused a request whose segments {request.segments[:9]} do not have {len(boxes)} boxes.")
    if encoded and len(encoded) != len(boxes):
        raise WeightsError(f"Refused a request for {len(encoded)} deltas of {len(boxes)} boxes.")
