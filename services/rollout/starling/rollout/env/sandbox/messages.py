"""What is said to and by a sandboxed process: MessagePack over a socket, each frame after its length."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

FRAME_LIMIT_BYTES: Final = 64 << 20
"""A longer frame is taken for garbage."""
LENGTH: Final = struct.Struct("<I")


class SandboxSetup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """What to import; said once, first."""

    names: tuple[str, ...]
    what: str
    """What each is to be, as the beginning of a sentence."""
    described: bool
    """Tell the schema of each function."""
    memory_mb: int
    """Most MiB of address space of each process."""
    import_s: float


class StartSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Start a process for a session; its socket comes with this message."""

    session: int


class KillSession(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Kill the process of a session, and all that it started."""

    session: int


class TargetsImported(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Everything is imported."""

    schemas: tuple[dict[str, Any], ...]


class ImportFailed(msgspec.Struct, frozen=True, array_like=True, tag="unusable"):
    """Something cannot be imported or used; the process ends."""

    problem: str


class MakeObject(msgspec.Struct, frozen=True, array_like=True, tag="make"):
    """Make the object of this session."""

    target: int
    options: dict[str, Any]


class CallFunction(msgspec.Struct, frozen=True, array_like=True, tag="invoke"):
    """Call the target itself, or a method of the object of this session."""

    target: int
    """Which of the names; -1 for the session's object."""
    method: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


class CallReturned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """What a call gave."""

    value: Any


class CallRaised(msgspec.Struct, frozen=True, array_like=True, tag="raised"):
    """What a call raised, in words."""

    problem: str


ToForkServer = SandboxSetup | StartSession | KillSession
FromForkServer = TargetsImported | ImportFailed
ToSession = MakeObject | CallFunction
FromSession = CallReturned | CallRaised


def plain(value: Any) -> Any:
    """Return what stands for a value that MessagePack does not know: numbers of numpy as numbers, the rest as text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
to_keeper: Final = msgspec.msgpack.Decoder(ToForkServer)
from_keeper: Final = msgspec.msgpack.Decoder(FromForkServer)
to_session: Final = msgspec.msgpack.Decoder(ToSession)
from_session: Final = msgspec.msgpack.Decoder(FromSession)


def frame(body: bytes) -> bytes:
    """Put its length before a message."""
    return LENGTH.pack(len(body)) + body
