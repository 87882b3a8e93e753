"""What the service and its workers say to each other: MessagePack over a socket pair, each frame after its length."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from starling.common.wire.messages import CompletionText

FRAME_LIMIT_BYTES: Final = 256 << 20
"""A longer frame is taken for garbage."""

_LENGTH: Final = struct.Struct("<I")


class ScorerSpec(msgspec.Struct, frozen=True, array_like=True):
    """One scorer to resolve."""

    name: str
    options: dict[str, Any]


class WorkerSetup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """The scorers of this worker; said once, first."""

    scorers: tuple[ScorerSpec, ...]


class CallChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Some calls for one group, to be made in order."""

    reference: str
    prompt_text: str
    metadata: dict[str, Any]
    completions: tuple[CompletionText, ...]
    calls: tuple[tuple[int, int, int], ...]
    """Serial number of the call, position in `completions`, position of the scorer."""


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Every scorer is resolved."""


class WorkerStartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed"):
    """A scorer cannot be resolved; the worker ends."""

    problem: str


class CallReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """One call is done. The next one has begun."""

    serial: int
    value: float | None
    problem: str
    finished_at: float
    """Monotonic seconds, one clock for all processes of a machine."""


ToWorker = WorkerSetup | CallChunk
FromWorker = WorkerReady | WorkerStartFailed | CallReport

encode = msgspec.msgpack.Encoder().encode
decode_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
decode_from_worker: Final = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """Encode a message with its length before it."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes and yield the frames that are complete now. ValueError when a length is not one of ours."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > FRAME_LIMIT_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                yield bytes(self._buffer[start + _LENGTH.size : end])
                start = end
        finally:
            del self._buffer[:start]
