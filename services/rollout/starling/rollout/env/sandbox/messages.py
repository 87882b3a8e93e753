"""Messages between the rollout, the fork server and the session processes: MessagePack frames over sockets."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from starling.common.sandbox.usage import Usage
from starling.common.wire.messages import Status

FRAME_LIMIT_BYTES: Final = 64 << 20
"""A longer frame is rejected."""
VALUES_LIMIT_BYTES: Final = 4 << 20
"""A longer frame may return one text only: an empty list takes one byte of a frame, and 64 in memory."""
SESSION_BEGUN: Final = b"b"
"""What a session sends before all else, so that time limits of calls begin when its process has."""
PROBLEM_CHARS: Final = 2000
"""The rest of a problem's text is dropped."""
LENGTH: Final = struct.Struct("<I")
"""Length of a frame, sent before it."""


class SandboxSetup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Objects to import; the first message."""

    names: tuple[str, ...]
    what: str
    """Kind of the names, as the beginning of an error: ``Tool``."""
    with_schemas: bool
    """Return the schema of each function."""
    memory_mb: int
    """Limit on the address space of each process, in MiB."""
    import_s: float
    mechanism: str
    """How the sandbox was made."""
    max_tasks: int
    """Limit on the processes and threads of all sessions."""
    network: bool
    """Whether sessions share the network of the sandbox; else each has a loopback device of its own."""
    arguments: tuple[str, ...] | None = None
    """Names of the arguments of a program, which are checked; None for other functions."""
    listens: bool = False
    """Send a socket that listens in the sandbox's network with `TargetsImported`."""
    writable: tuple[str, ...] = ()
    """Declared files and folders that sessions may write."""


class StartSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Start the process of a session; its socket comes with this message."""

    session: int


class KillSession(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Kill the process of a session and all its children."""

    session: int


class MeasureSession(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Return how the processes of a session have used processors since its start or the last message with `begin`."""

    session: int
    begin: bool
    """Count from now on, and return nothing."""


class SessionUsage(msgspec.Struct, frozen=True, array_like=True, tag="usage"):
    """How the processes of a session have used processors."""

    session: int
    usage: Usage


class TargetsImported(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Everything is imported."""

    schemas: tuple[dict[str, Any], ...]


class ImportFailed(msgspec.Struct, frozen=True, array_like=True, tag="unusable"):
    """A name cannot be imported or called; the process ends."""

    problem: str


class MakeObject(msgspec.Struct, frozen=True, array_like=True, tag="make"):
    """Create the session's object."""

    target: int
    options: dict[str, Any]


class CallFunction(msgspec.Struct, frozen=True, array_like=True, tag="invoke"):
    """Call the target itself, or a method of the session's object."""

    target: int
    """Index of the name; -1 for the session's object."""
    method: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


class CallProgram(msgspec.Struct, frozen=True, array_like=True, tag="play"):
    """Call the target as a program of the environment `agent`."""

    target: int
    task: dict[str, Any]
    """Fields of its `AgentTask`."""
    named: dict[str, Any]


class CallReturned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """Result of a call."""

    value: Any


class TextReturned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """`CallReturned` with a text, as the receiver of a long frame decodes it."""

    value: str


class ProgramEnded(msgspec.Struct, frozen=True, array_like=True, tag="outcome"):
    """The `EpisodeOutcome` that a program returned."""

    reward: float | None
    metrics: dict[str, float]
    status: Status | None
    problem: str


class CallRaised(msgspec.Struct, frozen=True, array_like=True, tag="raised"):
    """Exception of a call, as text."""

    problem: str


ToForkServer = SandboxSetup | StartSession | MeasureSession | KillSession
FromForkServer = TargetsImported | ImportFailed
ToSession = MakeObject | CallFunction | CallProgram
FromSession = CallReturned | ProgramEnded | CallRaised


def to_builtin(value: Any) -> Any:
    """Convert a value that MessagePack does not know: numpy numbers and arrays to numbers, others to text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


encode = msgspec.msgpack.Encoder(enc_hook=to_builtin).encode
decode_to_fork_server: Final = msgspec.msgpack.Decoder(ToForkServer)
decode_from_fork_server: Final = msgspec.msgpack.Decoder(FromForkServer)
decode_usage: Final = msgspec.msgpack.Decoder(SessionUsage)
decode_to_session: Final = msgspec.msgpack.Decoder(ToSession)
_decode_values: Final = msgspec.msgpack.Decoder(FromSession).decode
_decode_text: Final = msgspec.msgpack.Decoder(TextReturned | CallRaised).decode


def decode_from_session(body: bytes) -> FromSession | TextReturned:
    """Decode what a session sent. Raises msgspec.MsgspecError, RecursionError or ValueError for what is no answer."""
    answer: FromSession | TextReturned = (_decode_values if len(body) <= VALUES_LIMIT_BYTES else _decode_text)(body)
    return answer


def frame(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return LENGTH.pack(len(body)) + body
