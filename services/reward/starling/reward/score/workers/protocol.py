"""Messages between the reward service and its workers: MessagePack frames over a socket pair."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from starling.common.wire.messages import CompletionText
from starling.reward.core.media import MediaForm
from starling.reward.core.samples import PromptText
from starling.reward.score.scorers.batch import BatchScores, ScorerForm

FRAME_LIMIT_BYTES: Final = 256 << 20
"""A longer frame is rejected."""
REPORT_LIMIT_BYTES: Final = 8 << 20
"""A longer frame from a worker is rejected; scores and problems of the largest batch take half of that."""
PROBLEM_CHARS: Final = 2000
"""The rest of a problem's text is dropped."""
PROBLEMS_CHARS: Final = 1 << 19
"""Of all problems in a report; each may have an equal share."""

_LENGTH: Final = struct.Struct("<I")


class ScorerSpec(msgspec.Struct, frozen=True, array_like=True):
    """One scorer to resolve."""

    index: int
    """Its number in calls."""
    name: str
    options: dict[str, Any]


class WorkerSetup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """The worker's scorers; the first message."""

    scorers: tuple[ScorerSpec, ...]
    mechanism: str
    """How the worker's sandbox was made."""
    max_tasks: int
    """Limit on its processes and threads."""
    runs_programs: bool
    """Whether its scorers may run programs that a model wrote."""
    network: bool
    """Whether its scorers may reach the network."""
    data_mb: int = 0
    """Limit on the private memory of each of its processes, in MiB; 0 for none."""
    nice: int = 0
    """How much lower than that of the service its priority is."""


class PlacedMedia(msgspec.Struct, frozen=True, array_like=True):
    """Media of one sample."""

    buffer: int
    """Index among the buffers of the chunk."""
    offset: int
    """Where they begin in it, in bytes."""
    form: MediaForm


class CallChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Calls for one task, to be made in order."""

    prompts: tuple[PromptText, ...]
    samples: tuple[tuple[int, CompletionText], ...]
    """Index in `prompts`, and the completion."""
    calls: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Serial number of the call, number of the scorer, indices in `samples`."""
    media: tuple[PlacedMedia | None, ...] = ()
    """Of each of `samples` its media; empty if no scorer of the chunk reads media."""
    outputs: tuple[PlacedMedia, ...] = ()
    """Of each of `samples` where its pixels are to be written, in a chunk for decoders of latents."""
    num_buffers: int = 0
    """Descriptors of so many buffers are sent along with the chunk."""


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All scorers are resolved."""

    forms: tuple[tuple[int, ScorerForm], ...]
    """Number of each scorer, and how it is called."""


class WorkerStartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed"):
    """A scorer cannot be resolved; the worker ends."""

    problem: str


class CallReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Result of one call. The next call has begun, unless the worker is exhausted and ends."""

    serial: int
    scores: BatchScores
    finished_at: float
    """Monotonic seconds, one clock for all processes of a machine."""


ToWorker = WorkerSetup | CallChunk
FromWorker = WorkerReady | WorkerStartFailed | CallReport

encode = msgspec.msgpack.Encoder().encode
decode_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
decode_from_worker: Final = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """Return the encoded message, with its length before it."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames of at most `limit` bytes."""

    def __init__(self, limit: int = FRAME_LIMIT_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the frames that are complete. Raises ValueError when a length is too large."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > self._limit:
                    raise ValueError(f"a frame of {length} bytes, above the limit of {self._limit}")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                yield bytes(self._buffer[start + _LENGTH.size : end])
                start = end
        finally:
            del self._buffer[:start]
