"""Messages between a reader and a source, the same over every transport.

A reader may have several requests under way on one connection. Each has a number of the reader's choice, which the
answer repeats. A request names boxes of tensors: only the source knows where in its snapshot they lie, so a reader
cannot ask for memory that is not a weight, and any source that holds the box can answer.

The payload of a `ReadBoxes` is cut into segments, runs of its boxes in order. Within a segment the boxes lie row-major,
each at a multiple of `ALIGNMENT`. A segment of one box that is contiguous at both ends is sent from its place in the
snapshot to its place at the destination; a transport may use that, and need not.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeVar

import msgspec
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.tickets import BOX_COST_BYTES
from starling.weightsync.plan.layout import UNDECODABLE, ShardPiece
from starling.weightsync.plan.moves import MAX_TRANSFERS
from starling.weightsync.plan.planner import MAX_BUCKET_BYTES

REQUEST_BYTES: Final = 1 << 20
"""Longest request."""
OPENING_BYTES: Final = 16 << 10
"""Longest request of a reader that has not proven a ticket."""
ANSWER_BYTES: Final = 20 << 10
"""Longest answer or store entry."""
_CHECK_BYTES: Final = xxhash.xxh3_64().digest_size
LENGTH: Final = struct.Struct("<I")
"""Length prefix of a message, where the transport does not deliver the length."""
_REASON_CHARACTERS: Final = 1000

T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
"""A number that a peer may send; bounded, because peers are not trusted."""


class OpenSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Take a lease on a snapshot. Required before anything else."""

    number: Number
    snapshot: Number
    proof: str
    """Text of the `TicketProof` that `offers.tickets.prove` returns."""


class ReadBoxes(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Request the content of boxes of the opened snapshot."""

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
    """For each box the size in bytes of its delta against version `base`, as answered to a `MeasureDeltas`, or 0 to get
    the box itself; empty to get all boxes themselves."""


class MeasureDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="compare"):
    """Request the sizes of the deltas of boxes against version `base`. A `ReadBoxes` may then ask for the deltas."""

    number: Number
    base: Number
    boxes: tuple[ShardPiece, ...]


class ReleaseSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give the lease back. Granted only if the snapshot was not revoked until now."""

    number: Number


Request = OpenSnapshot | ReadBoxes | MeasureDeltas | ReleaseSnapshot


class SourceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The grant or refusal of a request."""

    number: int
    reason: str = ""
    """Why the request was refused; empty when granted. The segments of a refused `ReadBoxes` are empty."""
    digests: bytes = b""
    """Digests of the boxes of a `ReadBoxes`, concatenated."""
    bases: tuple[int, ...] = ()
    """To an `OpenSnapshot`: versions against which there may be deltas."""
    sizes: tuple[int, ...] = ()
    """To a `MeasureDeltas`: bytes of each box's delta; 0 where there is none."""
    waiting: bool = False
    """Whether this is no answer yet: what was requested has not arrived at the source itself."""


class StoreEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the store by which the two ends of a connection form a process group."""

    key: str
    """Empty in the last entry."""
    value: bytes


Message = Request | SourceAnswer | StoreEntry

_requests: Final = msgspec.msgpack.Decoder[Request](Request)
_answers: Final = msgspec.msgpack.Decoder(SourceAnswer)
_store_entries: Final = msgspec.msgpack.Decoder(StoreEntry)


def refusal(number: int, reason: str) -> SourceAnswer:
    """Return a refusal; `reason` is cut so that it fits an answer."""
    return SourceAnswer(number=number, reason=reason[:_REASON_CHARACTERS])


def still_waiting(number: int) -> SourceAnswer:
    """Return the message by which a source shows, every `WAITING_INTERVAL_S`, that it is alive and waits itself."""
    return SourceAnswer(number=number, waiting=True)


def with_length(message: Message) -> bytes:
    """Encode a message with a length prefix."""
    data = encode_message(message)
    return LENGTH.pack(len(data)) + data


def encode_message(message: Message) -> bytes:
    """Encode a message.

    Raises:
        WeightsError: it is longer than its receiver accepts.
    """
    data = with_checksum(msgspec.msgpack.encode(message))
    longest = REQUEST_BYTES if isinstance(message, Request) else ANSWER_BYTES
    if len(data) > longest:
        raise WeightsError(f"A message of {len(data)} bytes exceeds {longest}; use smaller buckets.")
    return data


def with_checksum(body: bytes) -> bytes:
    """Prefix a message with its xxh3-64.

    A request with bits flipped on the way would fetch another box, with the correct digests of that other box.
    """
    return xxhash.xxh3_64_digest(body) + body


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Decode a request.

    Raises:
        WeightsError: it is malformed, or requests too much at once.
    """
    request: Request = decode_checked(_requests, data, "A peer sent a malformed request")
    if isinstance(request, ReadBoxes):
        _check_boxes(request.boxes, len(data))
        _check_read(request)
    elif isinstance(request, MeasureDeltas):
        _check_boxes(request.boxes, len(data))
    return request


def decode_answer(data: bytes | bytearray | memoryview) -> SourceAnswer:
    """Decode an answer.

    Raises:
        WeightsError: it is malformed.
    """
    return decode_checked(_answers, data, "The source sent a malformed answer")


def decode_store_entry(data: bytes | bytearray | memoryview) -> StoreEntry:
    """Decode a store entry.

    Raises:
        WeightsError: it is malformed.
    """
    return decode_checked(_store_entries, data, "The peer sent a malformed store entry")


def decode_checked(decoder: msgspec.msgpack.Decoder[T], data: bytes | bytearray | memoryview, complaint: str) -> T:
    """Decode a message that `with_checksum` encoded.

    Raises:
        WeightsError: the checksum differs, or the decoder rejects it; the message begins with `complaint`.
    """
    check, body = bytes(data[:_CHECK_BYTES]), memoryview(data)[_CHECK_BYTES:]
    if check != xxhash.xxh3_64_digest(body):
        raise WeightsError(f"{complaint}: its checksum is wrong.")
    try:
        return decoder.decode(body)
    except UNDECODABLE as error:
        raise WeightsError(f"{complaint}: {error}.") from error


def _check_boxes(boxes: tuple[ShardPiece, ...], num_bytes: int) -> None:
    if not 0 < len(boxes) <= MAX_TRANSFERS:
        raise WeightsError(f"Refused to read {len(boxes)} boxes at once; 1 to {MAX_TRANSFERS} may be requested.")
    for box in boxes:
        if not box.is_well_formed:
            raise WeightsError(f"Refused to read the malformed box {str(box)[:_REASON_CHARACTERS]}.")
    if num_bytes > BOX_COST_BYTES * len(boxes):  # a reader is charged so much, however long the names
        raise WeightsError(f"Refused a request of {num_bytes} bytes for {len(boxes)} boxes.")
    total = sum(box.size_bytes for box in boxes)
    if total > MAX_BUCKET_BYTES:
        raise WeightsError(f"Refused to read {total} bytes at once, more than {MAX_BUCKET_BYTES}.")


def _check_read(request: ReadBoxes) -> None:
    boxes, encoded = request.boxes, request.encoded
    if min(request.segments, default=0) < 1 or sum(request.segments) != len(boxes):
        raise WeightsError(f"Refused a request whose segments {request.segments[:9]} do not have {len(boxes)} boxes.")
    if encoded and len(encoded) != len(boxes):
        raise WeightsError(f"Refused a request for {len(encoded)} deltas of {len(boxes)} boxes.")
