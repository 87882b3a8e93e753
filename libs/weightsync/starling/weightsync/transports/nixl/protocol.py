"""Messages over the socket of a NIXL connection: their kinds, and the location of a granted payload."""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from starling.weightsync.transports.messages import Number

LOCATION_BYTES: Final = 1 << 20
"""Longest `PayloadLocation`."""
REQUEST, FETCHED, ANSWER, LOCATION = range(1, 5)
"""Kinds of messages. From the reader: a request, and the number of a request whose payload it has fetched. From the
source: an answer, and the location of a payload."""
HOST: Final = -1
"""In place of the number of a GPU."""
NUMBER: Final = struct.Struct("<Q")
"""Body of a `FETCHED` message."""


class PayloadLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the payload of a granted `ReadBoxes` lies in the source's memory."""

    number: Number
    """Of the request."""
    metadata: bytes = b""
    """Metadata of the source's agent, when it is new to this reader."""
    segments: tuple[tuple[Number, Number], ...] = ()
    """Address and size in bytes of each segment."""
    devices: tuple[Annotated[int, msgspec.Meta(ge=HOST, lt=1 << 16)], ...] = ()
    """For each segment the number of the GPU whose memory it is in, `HOST` for others; empty where all are others."""
