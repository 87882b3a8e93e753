"""Format of a recording: every event of the controller's core, from which its state can be reconstructed elsewhere.

    starling-recording 1\\n
    [length][crc32][RecordingHeader] [..][JournalFrame] ... [..][PromptFrame] ...
    [..][MessageFrame] [..][PromptFrame] ... [..][RecordingEnd]

The `JournalFrame`s are the journal that the controller began with: after a compaction, the state of that time and the
records since. Prompts that the core reads follow the event that made it read them. Buffers that the core does not
decode are recorded by their sizes, and a replay has zeros in their place. The others are recorded: layouts, offers, and
the versions of the tokens of an interrupted group. What the check of a result's tensors found is recorded with its
message.

An incomplete frame ends a recording: the controller, or its machine, died.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.wire.messages import (
    GroupInterrupted,
    Hello,
    ProfileReport,
    Prompt,
    RelayOffered,
    Up,
    WeightsPublished,
)
from starling.controller.core.events import (
    Buffers,
    CheckpointRead,
    ContentsProblem,
    Event,
    Fetched,
    NotSent,
    Profiled,
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
"""Length and crc32 of the body that follows."""
DECODED: Final = (Hello, WeightsPublished, RelayOffered, GroupInterrupted)
"""The messages whose buffers the core decodes."""

Stream = Literal["prompts", "examples"]
RecordingPath = Path | zipfile.Path
"""A file, or a member of a zip archive."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Run and incarnation of a recording, and the arguments of the core besides the journal."""

    run: str
    incarnation: int
    plan: dict[str, Any]
    """The fields of its `RunPlan`."""
    held_out: tuple[Prompt, ...] = ()
    num_before: int = 0
    """Number of `JournalFrame`s that follow."""


class JournalFrame(msgspec.Struct, frozen=True, array_like=True, tag="before"):
    """One entry of the journal, before the first event or in a `StepReadFrame`."""

    record: Record
    sizes: tuple[int, ...] = ()
    """Sizes of the buffers of its payload."""
    kept: bool = False
    """As in the entry."""


class PromptFrame(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """A prompt that the core read."""

    stream: Stream
    position: int
    prompt: Prompt


class MessageFrame(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """`Received`, with its buffers if the core decodes them, else with their sizes."""

    now: float
    sender: str
    incarnation: int
    message: Up
    buffers: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    problem: ContentsProblem | None = None


class TickFrame(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """`Ticked`."""

    now: float


class DisconnectFrame(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """`ReplicaDisconnected`."""

    now: float
    peer: str


class StopFrame(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """`StopRequested`."""

    now: float
    reason: str


class StepReadFrame(msgspec.Struct, frozen=True, array_like=True, tag="step_read"):
    """`Fetched`."""

    now: float
    step: int
    records: tuple[JournalFrame, ...]
    problem: str = ""


class StepStoredFrame(msgspec.Struct, frozen=True, array_like=True, tag="step_stored"):
    """`Stored`."""

    now: float
    step: int


class CheckpointFrame(msgspec.Struct, frozen=True, array_like=True, tag="checkpoint_read"):
    """`CheckpointRead`."""

    now: float
    digest: str


class NotSentFrame(msgspec.Struct, frozen=True, array_like=True, tag="not_sent"):
    """`NotSent`."""

    now: float
    peer: str
    lease: str
    reason: str


class ProfiledFrame(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    """`Profiled`."""

    now: float
    report: ProfileReport


class RecordingEnd(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The last entry. The reader adds it to a recording that was cut off."""

    reason: str
    """Empty when the controller ended in order."""
    cut_off: bool = False
    """Whether the controller died before it could write this entry."""


FileFrame = StepReadFrame | StepStoredFrame | CheckpointFrame
EventFrame = MessageFrame | TickFrame | DisconnectFrame | StopFrame | FileFrame | NotSentFrame | ProfiledFrame
Frame = JournalFrame | PromptFrame | EventFrame | RecordingEnd
Entry = Event | PromptFrame | RecordingEnd

_encoder: Final = msgspec.msgpack.Encoder()
_frames: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)
_headers: Final = msgspec.msgpack.Decoder(RecordingHeader)


def event_frame(event: Event) -> EventFrame:
    """Return the frame of an event."""
    match event:
        case Received(now=now, sender=sender, incarnation=incarnation, message=message, buffers=buffers):
            if buffers and isinstance(message, DECODED):
                return MessageFrame(now, sender, incarnation, message, tuple(bytes(buffer) for buffer in buffers))
            return MessageFrame(now, sender, incarnation, message, (), _sizes(buffers), event.problem)
        case Ticked(now=now):
            return TickFrame(now)
        case ReplicaDisconnected(now=now, peer=peer):
            return DisconnectFrame(now, peer)
        case StopRequested(now=now, reason=reason):
            return StopFrame(now, reason)
        case Fetched(now=now, step=step, records=records, problem=problem):
            return StepReadFrame(now, step, tuple(journal_frame(entry) for entry in records), problem)
        case Stored(now=now, step=step):
            return StepStoredFrame(now, step)
        case CheckpointRead(now=now, digest=digest):
            return CheckpointFrame(now, digest)
        case NotSent(now=now, peer=peer, lease=lease, reason=reason):
            return NotSentFrame(now, peer, lease, reason)
        case Profiled(now=now, report=report):
            return ProfiledFrame(now, report)


def journal_frame(entry: JournalEntry) -> JournalFrame:
    """Return the frame of an entry of the journal."""
    return JournalFrame(entry.record, _sizes(entry.payload), entry.kept)


def entry_from(frame: JournalFrame) -> JournalEntry:
    """Return the entry of the journal, with zeros for its payload."""
    return JournalEntry(frame.record, _zeros(frame.sizes), frame.kept)


def encode_frame(item: RecordingHeader | Frame) -> bytes:
    """Return the bytes of a frame in the file."""
    body = _encoder.encode(item)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def read_recording(source: RecordingPath) -> tuple[RecordingHeader, list[JournalEntry], Iterator[Entry]]:
    """Return the header, the journal and an iterator of the entries of the recording at `source`.

    Only the last entry is a `RecordingEnd`. Raises ConfigError for a file that is not a recording, or that ends before
    its first event.
    """
    bodies = _bodies(source)
    first = next(bodies, None)
    if first is None:
        raise ConfigError(f"{source} has only the first line of a recording; the controller died when it started")
    try:
        header = _headers.decode(first)
        RunPlan.from_fields(header.plan)
        frames = _decoded(bodies)
        before = [frame for _, frame in zip(range(header.num_before), frames, strict=False)]
        past = [entry_from(frame) for frame in before if isinstance(frame, JournalFrame)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be decoded: {error}; read it with the version that recorded it") from None
    if len(past) < header.num_before:
        raise ConfigError(
            f"{source} has {len(past)} of the {header.num_before} journal entries at its beginning, and no event"
        )
    return header, past, _entries(source, frames)


def _entries(source: RecordingPath, frames: Iterator[Frame]) -> Iterator[Entry]:
    num = 0
    try:
        for frame in frames:
            if isinstance(frame, JournalFrame):
                raise msgspec.ValidationError("it is an entry of the journal, which belongs before the first event")
            entry = _entry_of(frame)
            yield entry
            if isinstance(entry, RecordingEnd):
                return
            num += 1
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"entry {num + 1} of {source} cannot be decoded: {error}; read it with the version that recorded it"
        ) from None
    yield RecordingEnd("it was cut off: the controller or its machine died", cut_off=True)


def _entry_of(frame: EventFrame | PromptFrame | RecordingEnd) -> Entry:
    match frame:
        case MessageFrame(now=now, sender=sender, message=message, buffers=buffers, sizes=sizes):
            return Received(now, sender, frame.incarnation, message, buffers or _zeros(sizes), True, frame.problem)
        case TickFrame(now=now):
            return Ticked(now)
        case DisconnectFrame(now=now, peer=peer):
            return ReplicaDisconnected(now, peer)
        case StopFrame(now=now, reason=reason):
            return StopRequested(now, reason)
        case StepReadFrame(now=now, step=step, records=records, problem=problem):
            return Fetched(now, step, tuple(entry_from(one) for one in records), problem)
        case StepStoredFrame(now=now, step=step):
            return Stored(now, step)
        case CheckpointFrame(now=now, digest=digest):
            return CheckpointRead(now, digest)
        case NotSentFrame(now=now, peer=peer, lease=lease, reason=reason):
            return NotSent(now, peer, lease, reason)
        case ProfiledFrame(now=now, report=report):
            return Profiled(now, report)
        case PromptFrame() | RecordingEnd():
            return frame


def _decoded(bodies: Iterator[bytes]) -> Iterator[Frame]:
    return (_frames.decode(body) for body in bodies)


def _bodies(source: RecordingPath) -> Iterator[bytes]:
    """Yield the bodies of the complete frames. Raises ConfigError."""
    try:
        with open_regular(source) if isinstance(source, Path) else source.open("rb") as file:
            line = file.readline(len(MAGIC) + 8)
            if line != FIRST_LINE:
                version = line[len(MAGIC) :].strip().decode(errors="replace")
                raise ConfigError(
                    f"{source} is a recording of version {version} and this Starling reads version {VERSION}; "
                    "read it with the version that recorded it"
                    if line.startswith(MAGIC)
                    else f"{source} is not a recording; give an events-<n>.rec or a file of `starling record`"
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
    """Return buffers of zeros of these sizes. The pages of large ones are never touched, so they take no memory.

    Raises msgspec.ValidationError for sizes that no buffers have: a recording may come from others.
    """
    try:
        return tuple(bytes(size) for size in sizes)
    except (ValueError, OverflowError, MemoryError):
        raise msgspec.ValidationError(f"it has buffers of {max(sizes):,} and {min(sizes):,} bytes") from None
