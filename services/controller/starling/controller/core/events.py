"""What happens to the controller, and what it wants done. The time is inside the event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from starling.common.wire.messages import Down, Prompt, Up

Buffers = tuple[bytes, ...]


@dataclass(frozen=True)
class Received:
    """A replica said something."""

    now: float
    sender: str
    epoch: int
    message: Up
    buffers: Buffers = ()


@dataclass(frozen=True)
class Ticked:
    """Time passed."""

    now: float


@dataclass(frozen=True)
class PeerLost:
    """The connection of a replica closed."""

    now: float
    peer: str


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the run to end in good order before its last step."""

    now: float
    reason: str


Event = Received | Ticked | PeerLost | StopRequested


@dataclass(frozen=True)
class Send:
    """Say `message` to `peer`."""

    peer: str
    message: Down
    buffers: Buffers = ()


@dataclass(frozen=True)
class Note:
    """Something to record: a line of metrics.jsonl, and of the log."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    ok: bool
    reason: str


Command = Send | Note | Finish


class Prompts(Protocol):
    """An endless, deterministic stream of prompts that can be read at any position."""

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`, counted from 0 over all passes."""
