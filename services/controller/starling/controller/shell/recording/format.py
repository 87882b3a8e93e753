"""A recording: every event that the core took, in a file from which its state can be made again, anywhere.

    starling-recording 1\\n
    [length][crc32][Header] [..][Before] ... [..][PromptRead] ... [..][Heard] [..][PromptRead] ... [..][Ended]

`Before` are the records of the journal that the controller began with. What the core asked of the data follows what
made it ask. Buffers are recorded by their sizes, because the core never looks into them: a replay has zeros instead.
Only those that it decodes are there: layouts, offers, and the versions of tokens of an interrupted group.

A frame that is not whole ends a recording: the controller, or its machine, died.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from starling.common.errors import ConfigError
from starling.common.wire.messages import GroupInterrupted, Hello, Prompt, Up, WeightsPublished
from starling.controller.core.events import (
    Buffers,
    Event,
    Fetched,
    Received,
    ReplicaDisconnected,
    StopRequested,
    Stored,
    Ticked,
)
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry, Record

MAGIC: Final = b"starling-recording "
VERSION: Final = 1
FIRST_LINE: Final = MAGIC + b"%d\n" % VERSION
FRAME: Final = struct.Struct("<II")
"""Length and crc32 of what follows."""
DECODED: Final = (Hello, WeightsPublished, GroupInterrupted)
"""The messages whose buffers the core decodes."""

Stream = Literal["prompts", "examples"]
RecordingPath = Path | zipfile.Path
"""A file, or a file in a zip archive."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of, and all that the core was made from besides `Before`."""

    run: str
    incarnation: int
    plan: RunPlan
    held_out: tuple[Prompt, ...] = ()
    num_before: int = 0
    """How many `Before` follow."""


class Before(msgspec.Struct, frozen=True, array_like=True, tag="before"):
    """One record of the journal: before the first event, and within `StepRead`."""

    record: Record
    sizes: tuple[int, ...] = ()
    """Of the buffers of its payload."""


class PromptRead(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """The core read a prompt of the data."""

    stream: Stream
    position: int
    prompt: Prompt


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """`Received`: the buffers if the core decodes them, else their sizes."""

    now: float
    sender: str
    epoch: int
    message: Up
    buffers: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()


class Tick(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """`Ticked`."""

    now: float


class LostEntry(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """`ReplicaDisconnected`."""

    now: float
    peer: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """`StopRequested`."""

    now: float
    reason: str


class StepRead(msgspec.Struct, frozen=True, array_like=True, tag="step_read"):
    """`Fetched`."""

    now: float
    step: int
    records: tuple[Before, ...]


class StepStored(msgspec.Struct, frozen=True, array_like=True, tag="step_stored"):
    """`Stored`."""

    now: float
    step: int


class RecordingEnd(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The last entry. The reader adds it where it is missing."""

    reason: str
    """Empty when the controller ended it in order."""
    cut_off: bool = False
    """The controller had no time to write this."""


Frame = Before | PromptRead | Heard | Tick | LostEntry | Stop | StepRead | StepStored | RecordingEnd
Entry = Event | PromptRead | RecordingEnd

_encoder: Final = msgspec.msgpack.Encoder()
_frames: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)
_headers: Final = msgspec.msgpack.Decoder(RecordingHeader)


def frame_of(event: Event) -> Frame:
    """Return what is recorded of an event."""
    match event:
        case Received(now=now, sender=sender, epoch=epoch, message=message, buffers=buffers):
            if buffers and isinstance(message, DECODED):
                return Heard(now, sender, epoch, message, tuple(bytes(buffer) for buffer in buffers))
            return Heard(now, sender, epoch, message, (), _sizes(buffers))
        case Ticked(now=now):
            return Tick(now)
        case ReplicaDisconnected(now=now, peer=peer):
            return LostEntry(now, peer)
        case StopRequested(now=now, reason=reason):
            return Stop(now, reason)
        case Fetched(now=now, step=step, records=records):
            return StepRead(now, step, tuple(before_of(kept) for kept in records))
        case Stored(now=now, step=step):
            return StepStored(now, step)


def before_of(kept: JournalEntry) -> Before:
    """Return what is recorded of a record of the journal."""
    return Before(kept.record, _sizes(kept.payload))


def kept_of(before: Before) -> JournalEntry:
    """Return a record of the journal, with zeros for its payload."""
    return JournalEntry(before.record, _zeros(before.sizes))


def pack(item: RecordingHeader | Frame) -> bytes:
    """Return one frame, as it is in the file."""
    body = _encoder.encode(item)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def read_recording(source: RecordingPath) -> tuple[RecordingHeader, list[JournalEntry], Iterator[Entry]]:
    """Return what the recording at `source` begins from: header and journal; and then its entries, one by one.

    The last entry is `RecordingEnd`, and only that. Raises ConfigError when it is no recording, or holds not even its
    beginning.
    """
    bodies = _bodies(source)
    first = next(bodies, None)
    if first is None:
        raise ConfigError(f"{source} holds only the first line of a recording; the controller died as it began")
    try:
        header = _headers.decode(first)
        frames = _decoded(bodies)
        before = [frame for _, frame in zip(range(header.num_before), frames, strict=False)]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{source} does not decode: {error}; read it with the Starling that recorded it") from None
    past = [kept_of(frame) for frame in before if isinstance(frame, Before)]
    if len(past) < header.num_before:
        raise ConfigError(
            f"{source} holds {len(past)} of the {header.num_before} records that it begins from, and no event"
        )
    return header, past, _entries(source, frames)


def _entries(source: RecordingPath, frames: Iterator[Frame]) -> Iterator[Entry]:
    num = 0
    try:
        for frame in frames:
            assert not isinstance(frame, Before)
            entry = _entry_of(frame)
            yield entry
            if isinstance(entry, RecordingEnd):
                return
            num += 1
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"entry {num + 1} of {source} does not decode: {error}; read it with the Starling that recorded it"
        ) from None
    yield RecordingEnd("it was cut off: the controller, or its machine, died", cut_off=True)


def _entry_of(frame: Heard | Tick | LostEntry | Stop | StepRead | StepStored | PromptRead | RecordingEnd) -> Entry:
    match frame:
        case Heard(now=now, sender=sender, epoch=epoch, message=message, buffers=buffers, sizes=sizes):
            return Received(now, sender, epoch, message, buffers or _zeros(sizes))
        case Tick(now=now):
            return Ticked(now)
        case LostEntry(now=now, peer=peer):
            return ReplicaDisconnected(now, peer)
        case Stop(now=now, reason=reason):
            return StopRequested(now, reason)
        case StepRead(now=now, step=step, records=records):
            return Fetched(now, step, tuple(kept_of(before) for before in records))
        case StepStored(now=now, step=step):
            return Stored(now, step)
        case PromptRead() | RecordingEnd():
            return frame


def _decoded(bodies: Iterator[bytes]) -> Iterator[Frame]:
    return (_frames.decode(body) for body in bodies)


def _bodies(source: RecordingPath) -> Iterator[bytes]:
    """Return the frames that are whole. Raises ConfigError."""
    try:
        with source.open("rb") as file:
            line = file.readline(len(MAGIC) + 8)
            if line != FIRST_LINE:
                version = line[len(MAGIC) :].strip().decode(errors="replace")
                raise ConfigError(
                    f"{source} is a recording of version {version} and this Starling reads version {VERSION}; "
                    "read it with the Starling that recorded it"
                    if line.startswith(MAGIC)
                    else f"{source} is no recording; give an events-<n>.rec, or what `starling record` wrote"
                )
            while len(head := file.read(FRAME.size)) == FRAME.size:
                length, checksum = FRAME.unpack(head)
                body = file.read(length)
                if len(body) < length or zlib.crc32(body) != checksum or not body:
                    return
                yield body
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"cannot read {source}: {error}; give the path of a recording") from None


def _sizes(buffers: Buffers) -> tuple[int, ...]:
    return tuple(len(buffer) for buffer in buffers)


def _zeros(sizes: tuple[int, ...]) -> Buffers:
    """Return buffers of these sizes; zeros that nobody reads take no memory."""
    return tuple(bytes(size) for size in sizes)
