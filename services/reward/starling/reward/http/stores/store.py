"""Interface of the stores, and the records that they keep.

A request is *pending* until it has a result. It is put into the store before its client is told its id. Its first result
is the one that counts: `finish` returns that one to whoever comes later. A pending request belongs to the instance that
scores it; one whose instance has gone is passed to another by `take`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, Final, Protocol

import msgspec

from starling.reward.core.requests import RequestResult

ENTRY_BYTES: Final = 1024
"""What a request or a result takes besides its bytes."""


class RequestBody(msgspec.Struct, frozen=True):
    """Body of a request as it arrived, so that it can be read again."""

    form: str = "v1"
    """Names the function that reads it: `v1` or `cosmos`."""
    data: bytes = b""


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has been accepted."""

    id: str
    body: RequestBody
    num_samples: int
    num_bytes: int
    """Memory that it takes while it is scored."""
    info: dict[str, Any]
    """What the routes want to know of it when they render its result; values of MessagePack."""
    num_deaths: int = 0
    """How many instances have ended, without a word, while they scored it."""


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

    num_results: int
    """Results that this instance holds, in memory or on its disk."""
    size_bytes: int
    """What they take."""
    renew_interval_s: float | None
    """How often `renew` and `take` must be called; None for a store whose requests no other instance can take."""

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
        """Make pending requests that belong to no instance those of this one: at least one, and few beyond the limits."""

    async def renew(self, ids: Collection[str]) -> set[str]:
        """Say that this instance is alive. Returns those of `ids` that no longer belong to it."""

    async def close(self) -> None:
        """Give pending requests back, so that another instance, or the next process, takes them at once."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(FinishedRequest)


def encode_result(finished: FinishedRequest) -> bytes:
    """Return the result in the form of the stores."""
    return _encoder.encode(finished)


def decode_result(data: bytes) -> FinishedRequest:
    """Return an encoded result. Raises ValueError (msgspec's) for another one."""
    return _decoder.decode(data)
