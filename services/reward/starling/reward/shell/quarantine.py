"""Quarantine: files of completions that ended their scorer's worker, or exceeded a limit, at every try.

A scorer that compares the completions of a prompt gets, and loses, all of them; they are one file. The media that the
scorer read are beside it, for each completion a `.npy` file of the same name with the completion's number.

`starling reward replay FILE --config recipe.toml` scores one again.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.wire.messages import CompletionText
from starling.reward.core.media import MediaForm, MediaKind, MediaTensor, form_problem
from starling.reward.core.samples import LostCall, PromptText
from starling.reward.http.npy import NpyError, npy_header, read_npy
from starling.reward.settings import RewardSettings

log = structlog.get_logger(__name__)


class QuarantinedMedia(msgspec.Struct, frozen=True, kw_only=True):
    """What the file with the media of a completion does not say."""

    kind: MediaKind
    fps: float = 0.0


class QuarantinedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a file."""

    scorer: str
    """Title of the scorer."""
    prompt: str
    reference: str
    metadata: dict[str, Any]
    problem: str
    """One sentence on the last try."""
    completions: tuple[CompletionText, ...] = ()
    """Of one call: one, or all of the prompt."""
    completion: CompletionText | None = None
    """The only completion, in files of earlier versions."""
    media: tuple[QuarantinedMedia, ...] = ()
    """Of each completion, if the scorer read them."""


class Quarantined(NamedTuple):
    """A call that can be made again."""

    scorer: str
    """Title of the scorer."""
    prompt: PromptText
    completions: tuple[CompletionText, ...]
    media: tuple[tuple[MediaForm, memoryview], ...]
    """Of each completion, if the scorer read them."""


class Quarantine:
    """Writes the files of a replica, up to a limit on their bytes; those of its former processes count.

    They are not synced: thousands may be lost at a time, and the scorers must not wait for the disk.
    """

    def __init__(self, folder: Path, replica: str, settings: RewardSettings) -> None:
        self._folder, self._titles = folder, [scorer.title for scorer in settings.scorers]
        self._prefix = f"{replica}-"
        self._left_bytes = settings.quarantine_mb << 20
        self._number = 0
        for file in folder.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):  # it was deleted
                self._left_bytes -= file.stat().st_size
                number = file.name.removeprefix(self._prefix).partition("-")[0]
                self._number = max(self._number, int(number) if number.isdecimal() else 0)
        self._is_full = False

    def add(self, lost: LostCall) -> None:
        """Write the completions of a call to a file; log where, or once that no more can be written."""
        title = self._titles[lost.scorer]
        content = msgspec.json.encode(
            QuarantinedCall(
                scorer=title,
                prompt=lost.prompt.text,
                reference=lost.prompt.reference,
                metadata=lost.prompt.metadata,
                completions=lost.completions,
                problem=lost.problem,
                media=tuple(QuarantinedMedia(kind=one.form.kind, fps=one.form.fps) for one, _ in lost.media),
            )
        )
        size_bytes = len(content) + sum(len(_header(one)) + one.form.size_bytes for one, _ in lost.media)
        if size_bytes > self._left_bytes:
            self._say_full(f"the limit reward.quarantine_mb is reached in {self._folder}")
            return
        self._number += 1
        name = f"{self._prefix}{self._number:06d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', title)[-60:]}.json"
        file = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for number, (tensor, row) in enumerate(lost.media):
                _write(_media_file(file, number), _header(tensor), tensor.read(row))
            _write(file, content)
        except OSError as error:
            for written in (file, *(_media_file(file, number) for number in range(len(lost.media)))):
                with contextlib.suppress(OSError):
                    written.unlink(missing_ok=True)
            self._say_full(f"{file} cannot be written: {error.strerror}")
            return
        self._left_bytes -= size_bytes
        log.warning("quarantined", scorer=title, file=str(file), reason=lost.problem)

    def _say_full(self, reason: str) -> None:
        if not self._is_full:
            log.warning("not_quarantined", reason=reason)
        self._is_full = True


def read_quarantined(file: Path) -> Quarantined:
    """Return what is in a file of a quarantine, and beside it.

    Raises:
        ConfigError: the file, or one with its media, cannot be read, or is none.
    """
    content = _contents(file)
    try:
        found = msgspec.json.decode(content, type=QuarantinedCall)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is no file of a quarantine: {error}; give one that a reward service wrote") from None
    completions = found.completions or ((found.completion,) if found.completion else ())
    if not completions:
        raise ConfigError(f"{file} is no file of a quarantine: no completion; give one that a reward service wrote")
    if found.media and len(found.media) != len(completions):
        raise ConfigError(f"{file} is no file of a quarantine: it has media of some completions only")
    media = tuple(_read_media(_media_file(file, number), one) for number, one in enumerate(found.media))
    return Quarantined(found.scorer, PromptText(found.prompt, found.reference, found.metadata), completions, media)


def _read_media(file: Path, media: QuarantinedMedia) -> tuple[MediaForm, memoryview]:
    """Return the media in a file. Raises ConfigError."""
    try:
        header, data = read_npy(_contents(file))
    except NpyError as error:
        raise ConfigError(f"{file}: {error}") from None
    form = MediaForm(media.kind, header.dtype, header.shape, media.fps)
    if problem := "are not in C order" if header.is_fortran else form_problem(form):
        raise ConfigError(f"{file}: the {media.kind} {problem}")
    return form, data


def _contents(file: Path) -> bytes:
    """Return the bytes of a file. Raises ConfigError."""
    try:
        with open_regular(file) as stream:
            return stream.read()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a file of <run folder>/quarantine") from None


def _media_file(file: Path, number: int) -> Path:
    """Return the file with the media of a completion, beside that of its call."""
    return file.with_name(f"{file.name.removesuffix('.json')}.{number}.npy")


def _header(tensor: MediaTensor) -> bytes:
    return npy_header(tensor.form.dtype, tensor.form.shape)


def _write(file: Path, *parts: bytes) -> None:
    """Write a new file. Raises OSError."""
    with open(file, "xb", opener=_private) as stream:
        stream.writelines(parts)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
