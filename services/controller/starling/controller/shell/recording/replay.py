"""Makes the core's state again from a recording: same plan, same past, same prompts, same events."""

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
from starling.controller.core.records import JournalEntry
from starling.controller.shell.recording.format import (
    Entry,
    PromptRead,
    RecordingEnd,
    RecordingHeader,
    RecordingPath,
    Stream,
    read_recording,
)

KEPT_EVENTS: Final = 8


class ReplayError(StarlingError):
    """The core fails at a recorded event, as it did when it was recorded."""


class _NotRecordedError(Exception):
    """The core asks for a prompt that the recording does not hold."""


class RecordedPrompts:
    """The prompts of one stream, as far as they were read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._prompts: dict[int, Prompt] = {}

    def add(self, position: int, prompt: Prompt) -> None:
        """Take in what was read."""
        self._prompts[position] = prompt

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        try:
            return self._prompts[position]
        except KeyError:
            raise _NotRecordedError(f"number {position} of the {self._stream}") from None


@dataclass(frozen=True)
class Moment:
    """One event, and what the core read of the data because of it. The first has no event: the core was made."""

    event: Event | None
    prompts: tuple[PromptRead, ...]
    ended: RecordingEnd | None
    """Set when it is the last."""


@dataclass
class ReplayedController:
    """A core as it was, and how it came there."""

    header: RecordingHeader
    past: list[JournalEntry]
    controller: Controller
    num_events: int = 0
    last: deque[tuple[int, Event]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """The last events that it took, each with its number from 1."""
    commands: list[Command] = field(default_factory=list)
    """What it wanted done after the last one."""
    ended: str | None = None
    """Why there are no more events; empty when the controller ended in order, None when there are more."""

    @property
    def now(self) -> float:
        """The controller's clock."""
        return self.last[-1][1].now if self.last else 0.0


def replay(source: RecordingPath | Path, until: int | None = None) -> ReplayedController:
    """Return the state after `until` events of the recording at `source`, or after all.

    Raises ConfigError when it cannot be read, or has fewer events, and ReplayError when the core fails.
    """
    header, past, entries = read_recording(source)
    streams: dict[Stream, RecordedPrompts] = {name: RecordedPrompts(name) for name in ("prompts", "examples")}
    made: ReplayedController | None = None
    for moment in _moments(entries):
        for read in moment.prompts:
            streams[read.stream].add(read.position, read.prompt)
        if made is not None and made.num_events == until:
            return made
        try:
            if moment.event is None:
                made = ReplayedController(header, past, _make_controller(header, past, streams))
            else:
                assert made is not None
                _take(made, moment.event)
        except _NotRecordedError as error:
            if made is not None and moment.ended is not None and moment.ended.reason:
                # The recording ends within what this event made the core read: show what was before it.
                before = replay(source, made.num_events)
                before.ended = moment.ended.reason
                return before
            raise ConfigError(
                f"{source} does not hold {error}, which the core asks for; replay it with the Starling that recorded it"
            ) from None
        if moment.ended is not None:
            made.ended = moment.ended.reason
    assert made is not None
    if until is not None and made.num_events < until:
        raise ConfigError(f"{source} has {made.num_events} events; give --until a number up to that")
    return made


def _make_controller(
    header: RecordingHeader, past: list[JournalEntry], streams: dict[Stream, RecordedPrompts]
) -> Controller:
    return Controller(
        header.plan,
        streams["prompts"],
        streams["examples"],
        header.held_out,
        past=past,
        incarnation=header.incarnation,
    )


def _take(made: ReplayedController, event: Event) -> None:
    number = made.num_events + 1
    try:
        made.commands = made.controller.step(event)
    except _NotRecordedError:
        raise
    except Exception as error:  # to show at which event the core failed is what a recording is for
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ReplayError(
            f"the core fails at event {number}, a {type(event).__name__} at {event.now:.3f} s, in {place.name} "
            f"({Path(place.filename).name}:{place.lineno}) with {type(error).__name__}: {error}; "
            f"--until {number - 1} shows the state before"
        ) from error
    made.num_events = number
    made.last.append((number, event))


def _moments(entries: Iterator[Entry]) -> Iterator[Moment]:
    event: Event | None = None
    prompts: list[PromptRead] = []
    for entry in entries:
        match entry:
            case PromptRead():
                prompts.append(entry)
            case RecordingEnd():
                yield Moment(event, tuple(prompts), entry)
            case _:
                yield Moment(event, tuple(prompts), None)
                event, prompts = entry, []
