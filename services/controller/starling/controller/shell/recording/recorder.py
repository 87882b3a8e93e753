"""Writes a recording (`recording.py`) while the controller runs, and never stands in its way.

Whatever goes wrong, a full disk or the cap, ends the recording and not the controller.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from starling.common.wire.messages import Prompt
from starling.controller.core.events import Event, Prompts, Ticked
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry
from starling.controller.shell.recording.format import (
    FIRST_LINE,
    Frame,
    PromptRead,
    RecordingEnd,
    RecordingHeader,
    Stream,
    before_of,
    frame_of,
    pack,
)

log = structlog.get_logger(__name__)

FLUSH_BYTES: Final = 1 << 20
"""So much is kept in memory at most between two ticks."""


class Recorder:
    """The recording of one incarnation of the controller.

    The file is written at each tick and always ends with a whole event, so a controller that is killed loses what came
    since the last tick. One that fails loses nothing, as long as `close` is called: the event that it failed at is
    there.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        incarnation: int,
        plan: RunPlan,
        past: Sequence[JournalEntry],
        held_out: Sequence[Prompt],
        cap_bytes: int,
    ) -> None:
        """Begin the file. `past` and the rest are what the core is made from; `cap_bytes` bounds the file."""
        self.path = path
        self.stopped = ""
        """Why nothing is recorded any more; empty while it is."""
        self._cap = cap_bytes
        self._buffer = bytearray(FIRST_LINE)
        self._written = 0
        self._file: io.FileIO | None = None
        header = RecordingHeader(
            run=run, incarnation=incarnation, plan=plan, held_out=tuple(held_out), num_before=len(past)
        )
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            self._stop(f"cannot open {path}: {error.strerror}")
        self._add(header)
        for kept in past:
            self._add(before_of(kept))
            self._flush_if_long()
        self.flush()

    def event(self, event: Event) -> None:
        """Record what the core takes next."""
        if self.stopped:
            return
        if isinstance(event, Ticked):
            self.flush()
        else:
            self._flush_if_long()
        self._add(frame_of(event))

    def prompt(self, stream: Stream, position: int, prompt: Prompt) -> None:
        """Record what the core read."""
        self._add(PromptRead(stream, position, prompt))

    def flush(self) -> None:
        """Hand what there is to the operating system."""
        if self._file is None or not self._buffer:
            return
        try:
            _write_all(self._file, self._buffer)
        except OSError as error:
            # What of this is in the file is the torn frame that ends it.
            self._file.close()
            self._file = None
            self._stop(f"cannot write {self.path}: {error.strerror}")
            return
        self._written += len(self._buffer)
        self._buffer.clear()

    def close(self) -> None:
        """End the recording in order."""
        if not self.stopped:
            self._buffer += pack(RecordingEnd(""))
        self.flush()
        self.stopped = self.stopped or "closed"
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush_if_long(self) -> None:
        if len(self._buffer) > FLUSH_BYTES:
            self.flush()

    def _add(self, item: RecordingHeader | Frame) -> None:
        if self.stopped:
            return
        try:
            frame = pack(item)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            self._stop(f"a {type(item).__name__} cannot be written: {error}")
            return
        if self._written + len(self._buffer) + len(frame) > self._cap:
            self._stop(f"it has reached the {self._cap} bytes that it may have")
            return
        self._buffer += frame

    def _stop(self, reason: str) -> None:
        """Record no more, and say so once."""
        self.stopped = reason
        log.warning("recording_stopped", file=str(self.path), reason=reason)
        if self._file is not None:
            self._buffer += pack(RecordingEnd(reason))


class RecordingPrompts:
    """Prompts that are recorded as the core reads them."""

    def __init__(self, prompts: Prompts, stream: Stream, recorder: Recorder) -> None:
        self._prompts, self._stream, self._recorder = prompts, stream, recorder

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        prompt = self._prompts.prompt(position)
        self._recorder.prompt(self._stream, position, prompt)
        return prompt


def _write_all(file: io.FileIO, data: bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += file.write(view[done:])
