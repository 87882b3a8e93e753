"""Events of the controller, and the commands that follow from them. The time is inside the event."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from starling.common.wire.messages import Down, Profile, ProfileReport, Prompt, Up
from starling.controller.core.records import JournalEntry, Record, StoredGroup

Buffers = tuple[bytes, ...]


class ContentsProblem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why the tensors of a result cannot be used."""

    reason: str
    is_malformed: bool
    """No working replica sends them."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message of a replica or of an operator arrived."""

    now: float
    sender: str
    incarnation: int
    message: Up
    buffers: Buffers = ()
    is_checked: bool = False
    """The contents of the buffers were checked, and `problem` is the result."""
    problem: ContentsProblem | None = None


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time passed."""

    now: float


class ReplicaDisconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection of a replica closed."""

    now: float
    peer: str


class StopRequested(msgspec.Struct, frozen=True, gc=False):
    """A signal requests a graceful stop before the last step."""

    now: float
    reason: str


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """The records of a step, with their payload, in the order of its groups: the answer to `Fetch`."""

    now: float
    step: int
    records: tuple[JournalEntry, ...]
    problem: str = ""
    """Why the step cannot be trained from trajectory files, in one sentence."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The groups of a step are in a file: the answer to `Store`."""

    now: float
    step: int


class CheckpointRead(msgspec.Struct, frozen=True, gc=False):
    """The controller has read the checkpoint of a run without a policy, which it was to read: `reads_checkpoint`."""

    now: float
    digest: str
    """Of the model's folder, as in the hello of a rollout; empty if the folder cannot be read."""


class NotSent(msgspec.Struct, frozen=True, gc=False):
    """The message that was to grant `lease` is larger than a message can be."""

    now: float
    peer: str
    lease: str
    reason: str


class Profiled(msgspec.Struct, frozen=True, gc=False):
    """How far the controller's own profile is: answers `ProfileSelf`."""

    now: float
    report: ProfileReport


Event = Received | Ticked | ReplicaDisconnected | StopRequested | Fetched | Stored | CheckpointRead | NotSent | Profiled


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to `peer`."""

    peer: str
    message: Down
    buffers: Buffers = ()


class Write(msgspec.Struct, frozen=True, gc=False):
    """Write `record` to the journal. It must be durable before any `Send` after it is carried out."""

    record: Record
    payload: Buffers = ()


class Prune(msgspec.Struct, frozen=True, gc=False):
    """Drop the groups of the steps up to `step` from the journal: that version and a later one have saved states."""

    step: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Read the groups of `step` from the journal, or from trajectory files; `Fetched` is the answer."""

    step: int


class Store(msgspec.Struct, frozen=True, gc=False):
    """Write the groups of a step to a file, unless it exists; `Stored` is the answer."""

    step: int
    groups: tuple[StoredGroup, ...]


class Note(msgspec.Struct, frozen=True, gc=False):
    """Write a line to metrics.jsonl and to the log."""

    kind: str
    fields: dict[str, Any] = {}


class ProfileSelf(msgspec.Struct, frozen=True, gc=False):
    """Profile the controller's process; `Profiled` says how far that is."""

    order: Profile


class FinishRun(msgspec.Struct, frozen=True, gc=False):
    """The run is over."""

    ok: bool
    reason: str


Command = Send | Write | Note | Prune | Fetch | Store | ProfileSelf | FinishRun


class Prompts(Protocol):
    """An endless, deterministic stream of prompts that can be read at any position."""

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`, counted from 0 over all epochs."""
