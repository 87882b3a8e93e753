"""Interface of the stores, and the records that they keep.

A request is *pending* until it has a result. It is put into the store before its client is told its id. Its first
result is the one that counts: `finish` returns that one to later callers. A pending request belongs to the
instance that scores it; one whose instance has gone is passed to another by `take`.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec

from starling.reward.core.requests import RequestResult
from starling.reward.http.errors import HttpError

ENTRY_BYTES: Final = 1024
"""What a request or a result takes besides its bytes."""
LARGE_BYTES: Final = 1 << 20
"""Bodies above this are encoded in a thread."""
MAX_SAMPLES: Final = 4096
"""Of one request."""
MAX_NUMBER: Final = 1 << 48
"""Of what a record counts: others may have written it."""


class RequestBody(msgspec.Struct, frozen=True):
    """Body of a request as it arrived, so that it can be read again."""

    form: str = "v1"
    """Names the function that reads it: `v1` or `cosmos`."""
    data: bytes = b""


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has been accepted."""

    id: str
    body: RequestBody
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
    """Memory that it takes while it is scored."""
    info: dict[str, Any]
    """What the routes want to know of it when they render its result; values of MessagePack."""
    num_deaths: Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)] = 0
    """How many instances were killed, or crashed, while they scored it."""


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request, with what the routes want to know of it."""

    result: RequestResult
    info: dict[str, Any]
    """As it was given with the request."""
    duration_s: float
    """From the acceptance to the last score, in seconds; after a restart, from the restart."""


class Pending(enum.Enum):
    """The request has no result yet."""

    PENDING = enum.auto()


PENDING: Final = Pending.PENDING


class RequestStore(Protocol):
    """Store of requests and results. Its methods are called in the event loop of the HTTP server.

    All but `close` raise StoreUnavailable where the store cannot be reached in time.
    """

    renew_interval_s: float
    """How often `renew`, and then `take`, must be called."""

    @property
    def num_results(self) -> int:
        """Results that this instance holds, in memory or on its disk."""

    @property
    def size_bytes(self) -> int:
        """What they take."""

    @property
    def problem(self) -> str:
        """Why the store cannot be reached; empty if it can."""

    async def open(self) -> None:
        """Begin. Raises ConfigError when the store cannot be used."""

    async def put(self, request: StoredRequest) -> None:
        """Store a pending request of this instance. Once this returns, it survives the end of the process."""

    async def finish(self, request: StoredRequest, result: bytes) -> bytes | None:
        """Store a result, and return the one that counts: the first. Returns None if the request was removed.

        Args:
            request: the request, whose body may be left out.
            result: the encoded FinishedRequest.
        """

    async def find(self, id: str) -> bytes | Pending | None:
        """Return the result of a request; PENDING before it has one; None for an unknown or expired one."""

    async def remove(self, id: str) -> bool:
        """Forget a request and its result. Returns False if it was unknown."""

    async def take(self, max_samples: int, max_bytes: int) -> list[StoredRequest]:
        """Make pending requests of no instance those of this one: at least one, and few beyond the limits."""

    async def renew(self) -> set[str]:
        """Say that this instance is alive. Returns the requests that no longer belong to it."""

    async def close(self) -> None:
        """Give pending requests back, so that another instance, or the next process, takes them at once."""


REQUEST, RESULT = b"SQ\x01", b"SR\x01"
"""How stored requests and results begin: what they are, and the version of their form."""
Record = TypeVar("Record")
_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(StoredRequest)
_results: Final = msgspec.msgpack.Decoder(FinishedRequest)


def encode_request(request: StoredRequest) -> bytes:
    """Return a request in the form of the stores."""
    return REQUEST + _encoder.encode(request)


async def encode_large(request: StoredRequest, max_bytes: int) -> bytes:
    """Return a request in the form of the stores, encoded in a thread where that takes long.

    Raises:
        HttpError: it has more than `max_bytes`, which the store cannot keep (413).
    """
    is_large = len(request.body.data) > LARGE_BYTES
    data = await asyncio.to_thread(encode_request, request) if is_large else encode_request(request)
    if len(data) > max_bytes:
        raise HttpError(413, f"the body has more than {max_bytes >> 20} MiB, which the store cannot keep; send less")
    return data


def decode_request(data: object) -> StoredRequest:
    """Return a stored request. Raises ValueError for something else."""
    return _decoded(_requests, data, REQUEST)


def encode_result(finished: FinishedRequest) -> bytes:
    """Return a result in the form of the stores."""
    return RESULT + _encoder.encode(finished)


def decode_result(data: object) -> FinishedRequest:
    """Return a stored result. Raises ValueError for something else."""
    finished = _decoded(_results, data, RESULT)
    found = finished.result
    tables = (found.scores, found.failures, found.evaluation_scores)
    rows = [found.rewards, found.problems, *(row for table in tables for row in table.values())]
    num = len(found.statuses)
    if not 0 < num <= MAX_SAMPLES or any(len(row) != num for row in rows):
        raise ValueError("its rows are not of one length, or have no samples")
    return finished


def unreadable_request(id: str, num_samples: object) -> StoredRequest:
    """Return a request that no reader knows, in place of one that cannot be decoded: it is answered as failed."""
    num = num_samples if isinstance(num_samples, int) and 0 < num_samples <= MAX_SAMPLES else 1
    return StoredRequest(id=id, body=RequestBody("unreadable"), num_samples=num, num_bytes=0, info={})


def _decoded(decoder: msgspec.msgpack.Decoder[Record], data: object, begin: bytes) -> Record:
    try:
        return decoder.decode(_contents(data, begin))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _contents(data: object, begin: bytes) -> memoryview:
    if not isinstance(data, bytes) or data[:2] != begin[:2]:
        raise ValueError("it is no record of this service")
    if data[2:3] != begin[2:]:
        raise ValueError(f"it is of version {data[2] if len(data) > 2 else None}, and this service knows {begin[2]}")
    return memoryview(data)[len(begin) :]
