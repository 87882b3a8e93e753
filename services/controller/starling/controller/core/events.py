"""What happens to the controller, and what it wants done. The time is inside the event."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from starling.common.wire.messages import Down, Prompt, Up
from starling.controller.core.records import JournalEntry, Record, StoredGroup

Buffers = tuple[bytes, ...]


class Received(msgspec.Struct, frozen=True, gc=False):
    """A replica or an operator said something."""

    now: float
    sender: str
    incarnation: int
    message: Up
    buffers: Buffers = ()


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time passed."""

    now: float


class ReplicaDisconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection of a replica closed."""

    now: float
    peer: str


class StopRequested(msgspec.Struct, frozen=True, gc=False):
    """Somebody wants the run to end in good order before its last step."""

    now: float
    reason: str


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """The records of a step, with their payload, in the order of its groups: what `Fetch` asked for."""

    now: float
    step: int
    records: tuple[JournalEntry, ...]


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The groups of a step are in a file: what `Store` asked for."""

    now: float
    step: int


Event = Received | Ticked | ReplicaDisconnected | StopRequested | Fetched | Stored


class Send(msgspec.Struct, frozen=True, gc=False):
    """Say `message` to `peer`."""

    peer: str
    message: Down
    buffers: Buffers = ()


class Write(msgspec.Struct, frozen=True, gc=False):
    """Put `record` into the journal. It must be durable before any `Send` that comes after it."""

    record: Record
    payload: Buffers = ()


class Prune(msgspec.Struct, frozen=True, gc=False):
    """States of version `step` and of a later one are saved: what the steps up to it were made of may go."""

    step: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Read what `step` was made of from the journal, or is made of from files; `Fetched` is the answer."""

    step: int


class Store(msgspec.Struct, frozen=True, gc=False):
    """Write the groups of a step to a file, unless they are there; `Stored` is the answer."""

    step: int
    groups: tuple[StoredGroup, ...]


class Note(msgspec.Struct, frozen=True, gc=False):
    """Something to record: a line of metrics.jsonl, and of the log."""

    kind: str
    fields: dict[str, Any] = {}


class FinishRun(msgspec.Struct, frozen=True, gc=False):
    """The run is over."""

    ok: bool
    reason: str


Command = Send | Write | Note | Prune | Fetch | Store | FinishRun


class Prompts(Protocol):
    """An endless, deterministic stream of prompts that can be read at any position."""

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`, counted from 0 over all passes."""
