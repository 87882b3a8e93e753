"""Replay of a recording: reconstructs the core's state from its plan, its journal, its prompts and its events."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import Prompt
from starling.controller.core.events import Command, Event
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry
from starling.controller.shell.recording.format import (
    Entry,
    PromptFrame,
    RecordingEnd,
    RecordingHeader,
    RecordingPath,
    Stream,
    read_recording,
)

NUM_LAST_EVENTS: Final = 8


class ReplayError(StarlingError):
    """The core fails at a recorded event, as it did when it was recorded."""


class _NotRecordedError(Exception):
    """The core reads a prompt that the recording does not have."""


class RecordedPrompts:
    """The recorded prompts of one stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._prompts: dict[int, Prompt] = {}

    def add(self, position: int, prompt: Prompt) -> None:
        """Add a prompt that was read."""
        self._prompts[position] = prompt

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        try:
            return self._prompts[position]
        except KeyError:
            raise _NotRecordedError(f"number {position} of the {self._stream}") from None


@dataclass(frozen=True)
class ReplayStep:
    """One event and the prompts that the core read because of it. The first step constructs the core, without event."""

    event: Event | None
    prompts: tuple[PromptFrame, ...]
    end: RecordingEnd | None
    """Set for the last step."""


@dataclass
class ReplayedController:
    """The reconstructed core, and how it got there."""

    header: RecordingHeader
    past: list[JournalEntry]
    controller: Controller
    num_events: int = 0
    last: deque[tuple[int, Event]] = field(default_factory=lambda: deque(maxlen=NUM_LAST_EVENTS))
    """The last events, each with its number from 1."""
    commands: list[Command] = field(default_factory=list)
    """The commands of the last event."""
    ended: str | None = None
    """Reason why there are no more events; empty when the controller ended in order, None when there are more."""

    @property
    def now(self) -> float:
        """Time of the last event, in seconds of the controller's monotonic clock."""
        return self.last[-1][1].now if self.last else 0.0


def replay(source: RecordingPath | Path, until: int | None = None) -> ReplayedController:
    """Replay the first `until` events of the recording at `source`, or all of them.

    Raises ConfigError when it cannot be read or has fewer events, and ReplayError when the core fails.
    """
    header, past, entries = read_recording(source)
    streams: dict[Stream, RecordedPrompts] = {name: RecordedPrompts(name) for name in ("prompts", "examples")}
    replayed: ReplayedController | None = None
    for step in _steps(entries):
        for read in step.prompts:
            streams[read.stream].add(read.position, read.prompt)
        if replayed is not None and replayed.num_events == until:
            return replayed
        try:
            if step.event is None:
                replayed = ReplayedController(header, past, _make_controller(header, past, streams))
            else:
                assert replayed is not None
                _take(replayed, step.event)
        except _NotRecordedError as error:
            if replayed is not None and step.end is not None and step.end.reason:
                # The recording ends before the prompts of this event: show the state before it.
                before = replay(source, replayed.num_events)
                before.ended = step.end.reason
                return before
            raise ConfigError(
                f"{source} lacks {error}, which the core reads; replay it with the version that recorded it"
            ) from None
        if step.end is not None:
            replayed.ended = step.end.reason
    assert replayed is not None
    if until is not None and replayed.num_events < until:
        raise ConfigError(f"{source} has {replayed.num_events} events; give --until a number up to that")
    return replayed


def _make_controller(
    header: RecordingHeader, past: list[JournalEntry], streams: dict[Stream, RecordedPrompts]
) -> Controller:
    return Controller(
        RunPlan.from_fields(header.plan),
        streams["prompts"],
        streams["examples"],
        header.held_out,
        journal=past,
        incarnation=header.incarnation,
    )


def _take(replayed: ReplayedController, event: Event) -> None:
    number = replayed.num_events + 1
    try:
        replayed.commands = replayed.controller.step(event)
    except _NotRecordedError:
        raise
    except Exception as error:  # any failure is reported with its event
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ReplayError(
            f"the core fails at event {number}, a {type(event).__name__} at {event.now:.3f} s, in {place.name} "
            f"({Path(place.filename).name}:{place.lineno}) with {type(error).__name__}: {error}; "
            f"--until {number - 1} shows the state before"
        ) from error
    replayed.num_events = number
    replayed.last.append((number, event))


def _steps(entries: Iterator[Entry]) -> Iterator[ReplayStep]:
    event: Event | None = None
    prompts: list[PromptFrame] = []
    for entry in entries:
        match entry:
            case PromptFrame():
                prompts.append(entry)
            case RecordingEnd():
                yield ReplayStep(event, tuple(prompts), entry)
            case _:
                yield ReplayStep(event, tuple(prompts), None)
                event, prompts = entry, []
