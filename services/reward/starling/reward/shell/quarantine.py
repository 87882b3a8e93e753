"""Quarantine: files of completions that ended their scorer's worker, or exceeded a limit, at every try.

A scorer that compares the completions of a prompt gets, and loses, all of them; they are one file.

`starling reward replay FILE --config recipe.toml` scores one again.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.wire.messages import CompletionText
from starling.reward.core.samples import LostCall, PromptText
from starling.reward.settings import RewardSettings

log = structlog.get_logger(__name__)


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


class Quarantine:
    """Writes the files of a replica, up to a limit on their bytes; those of its former processes count.

    They are not synced: thousands may be lost at a time, and the scorers must not wait for the disk.
    """

    def __init__(self, folder: Path, replica: str, settings: RewardSettings) -> None:
        self._folder, self._titles = folder, [scorer.title for scorer in settings.scorers]
        self._prefix = f"{replica}-"
        self._left_bytes = settings.quarantine_mb << 20
        self._number = 0
        for file in folder.glob(f"{self._prefix}*.json"):
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
            )
        )
        if len(content) > self._left_bytes:
            self._say_full(f"the limit reward.quarantine_mb is reached in {self._folder}")
            return
        self._number += 1
        name = f"{self._prefix}{self._number:06d}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', title)[-60:]}.json"
        file = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(file, "xb", opener=_private) as stream:
                stream.write(content)
        except OSError as error:
            self._say_full(f"{file} cannot be written: {error.strerror}")
            return
        self._left_bytes -= len(content)
        log.warning("quarantined", scorer=title, file=str(file), reason=lost.problem)

    def _say_full(self, reason: str) -> None:
        if not self._is_full:
            log.warning("not_quarantined", reason=reason)
        self._is_full = True


def read_quarantined(file: Path) -> tuple[str, PromptText, tuple[CompletionText, ...]]:
    """Return the scorer's title, the prompt and the completions in a file of a quarantine.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=QuarantinedCall)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a file of <run folder>/quarantine") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is no file of a quarantine: {error}; give one that a reward service wrote") from None
    completions = found.completions or ((found.completion,) if found.completion else ())
    if not completions:
        raise ConfigError(f"{file} is no file of a quarantine: no completion; give one that a reward service wrote")
    return found.scorer, PromptText(found.prompt, found.reference, found.metadata), completions


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
