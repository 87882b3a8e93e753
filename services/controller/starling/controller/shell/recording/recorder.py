"""Recorder of the controller's events, in the format of `format.py`.

A full disk, the size limit or any other problem ends the recording, never the controller.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from starling.common.files import open_own
from starling.common.wire.messages import Prompt
from starling.controller.core.events import Event, Prompts, Ticked
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry
from starling.controller.shell.recording.format import (
    FIRST_LINE,
    Frame,
    PromptFrame,
    RecordingEnd,
    RecordingHeader,
    Stream,
    encode_frame,
    event_frame,
    journal_frame,
)

log = structlog.get_logger(__name__)

NUM_KEPT: Final = 8
"""Recordings in a folder, the new one included: a run that is restarted again and again does not fill the disk."""
FLUSH_BYTES: Final = 1 << 20
"""Maximum number of bytes that are kept in memory between two ticks."""


def recording_path(folder: Path, incarnation: int) -> Path:
    """Return where the recording of an incarnation is."""
    return folder / f"events-{incarnation}.rec"


def remove_old_recordings(folder: Path, incarnation: int) -> None:
    """Remove all recordings but those of the last incarnations before `incarnation`, whose own is about to begin."""
    for path in folder.glob("events-*.rec"):
        number = path.stem.removeprefix("events-")
        if number.isascii() and number.isdigit() and int(number) <= incarnation - NUM_KEPT:
            try:
                path.unlink()
            except OSError as error:
                log.warning("recording_not_removed", file=str(path), reason=str(error.strerror))


class Recorder:
    """The recording of one incarnation of the controller.

    The file is flushed at each tick and always ends with a whole event, so a controller that is killed loses the events
    since the last tick. One that fails and calls `close` loses nothing: the event at which it failed is recorded.
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
        """Begin the file with everything that the core is constructed from; `cap_bytes` limits its size."""
        self.path = path
        self.stopped = ""
        """Reason why the recording ended; empty while it runs."""
        self._cap = cap_bytes
        self._buffer = bytearray(FIRST_LINE)
        self._written = 0
        self._file: io.FileIO | None = None
        header = RecordingHeader(
            run=run, incarnation=incarnation, plan=plan.to_fields(), held_out=tuple(held_out), num_before=len(past)
        )
        try:
            self._file = io.FileIO(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")
        except OSError as error:
            self._stop(f"cannot open {path}: {error.strerror}")
        self._add(header)
        for entry in past:
            self._add(journal_frame(entry))
            self._flush_if_long()
        self.flush()

    def event(self, event: Event) -> None:
        """Record the next event of the core."""
        if self.stopped:
            return
        if isinstance(event, Ticked):
            self.flush()
        else:
            self._flush_if_long()
        self._add(event_frame(event))

    def prompt(self, stream: Stream, position: int, prompt: Prompt) -> None:
        """Record a prompt that the core read."""
        self._add(PromptFrame(stream, position, prompt))

    def flush(self) -> None:
        """Write the buffered frames to the file."""
        if self._file is None or not self._buffer:
            return
        try:
            _write_all(self._file, self._buffer)
        except OSError as error:
            # A part of the buffer may be in the file: readers ignore the incomplete frame at the end.
            self._file.close()
            self._file = None
            self._stop(f"cannot write {self.path}: {error.strerror}")
            return
        self._written += len(self._buffer)
        self._buffer.clear()

    def close(self) -> None:
        """End the recording and close the file."""
        if not self.stopped:
            self._buffer += encode_frame(RecordingEnd(""))
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
            frame = encode_frame(item)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            self._stop(f"a {type(item).__name__} cannot be encoded: {error}")
            return
        if self._written + len(self._buffer) + len(frame) > self._cap:
            self._stop(f"it has reached its limit of {self._cap} bytes")
            return
        self._buffer += frame

    def _stop(self, reason: str) -> None:
        """End the recording and log the reason."""
        self.stopped = reason
        log.warning("recording_stopped", file=str(self.path), reason=reason)
        if self._file is not None:
            self._buffer += encode_frame(RecordingEnd(reason))


class RecordingPrompts:
    """Stream of prompts that records each prompt when the core reads it."""

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
