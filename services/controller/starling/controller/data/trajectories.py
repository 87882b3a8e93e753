"""Trajectory files, which runs of kind `generate` write and runs of kind `replay` read.

    trajectories/
      index.jsonl              one line for each file, in the order of steps
      step-000001.msgpack      the groups of one step: one MessagePack map, `TrajectoryFile`

A file is renamed to its name when it is durable, and its line in the index is written afterwards, so every file in the
index is complete. The format is MessagePack, because a group is a map of small values with a few buffers of some KiB,
for which the header of a tensor container would be too long. Any MessagePack library can read it. See
`docs/how-to/replay.md`.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.ranges import MAX_TEMPERATURE, MAX_WHOLE, MIN_TEMPERATURE
from starling.common.wire.messages import Prompt
from starling.controller.core.groups.validation.validation import InvalidResultError, check_stored
from starling.controller.core.records import CompletionsStored, JournalEntry, RewardsStored, StoredGroup
from starling.weightsync.plan.layout import UNDECODABLE

TRAJECTORIES: Final = "trajectories:"
"""Prefix of a `data.source` that is a folder of trajectory files."""
FOLDER: Final = "trajectories"
"""Folder of the trajectory files in the folder of a run."""
INDEX: Final = "index.jsonl"
FORMAT: Final = "starling-trajectories"
VERSION: Final = 1

MAX_INDEX_BYTES: Final = 1 << 30
"""Largest index: it has some 200 bytes a step."""
MAX_REASON: Final = 1000
"""Characters of what is wrong with a group; parts of it are from the file."""
_NAMES: Final = re.compile(r"step-[0-9]{6,12}\.msgpack")
_encoder: Final = msgspec.msgpack.Encoder()


class TrajectoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one file."""

    format: str
    version: int
    run: str
    """Id of the run that wrote it."""
    step: int
    """In reinforcement learning the step that trained the groups, else the number of the file, from 1."""
    groups: tuple[StoredGroup, ...]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the index."""

    file: str
    step: int
    num_groups: int
    num_usable: int
    """Groups with trajectories, which were not discarded."""
    size_bytes: int
    sha256: str


_files: Final = msgspec.msgpack.Decoder(TrajectoryFile)
_lines: Final = msgspec.json.Decoder(IndexEntry)


def encode_file(run: str, step: int, groups: Sequence[StoredGroup]) -> bytes:
    """Return the content of a file."""
    return _encoder.encode(TrajectoryFile(format=FORMAT, version=VERSION, run=run, step=step, groups=tuple(groups)))


def index_entry(step: int, groups: Sequence[StoredGroup], content: bytes) -> IndexEntry:
    """Return the line of the index for a file."""
    return IndexEntry(
        file=f"step-{step:06}.msgpack",
        step=step,
        num_groups=len(groups),
        num_usable=sum(bool(group.trajectories) for group in groups),
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def read_index(folder: Path) -> list[IndexEntry]:
    """Return the lines of the index without an incomplete last one. Raises ConfigError when it is damaged."""
    path = folder / INDEX
    if not path.is_file():
        raise ConfigError(f"{folder} has no {INDEX}, so it has no trajectories; give the folder {FOLDER} of a run")
    with open_regular(path) as file:
        content = file.read(MAX_INDEX_BYTES + 1) if os.fstat(file.fileno()).st_size <= MAX_INDEX_BYTES else None
    if content is None:
        raise ConfigError(f"{path} has more than {MAX_INDEX_BYTES} bytes, which no run has written; restore the file")
    lines: list[IndexEntry] = []
    for number, text in enumerate(content.splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            break
        try:
            line = _lines.decode(text)
        except UNDECODABLE as error:
            raise ConfigError(f"line {number} of {path} cannot be decoded: {error}; restore the file") from None
        if not _NAMES.fullmatch(line.file) or not 0 <= line.num_usable <= line.num_groups <= MAX_WHOLE:
            raise ConfigError(
                f"line {number} of {path} is of the file {line.file!r:.255} with {line.num_usable} of "
                f"{line.num_groups} groups, which no run has written; restore the file"
            )
        lines.append(line)
    return lines


def intact_lines(folder: Path) -> list[IndexEntry]:
    """Return the lines of the index that are complete and can be decoded."""
    lines = []
    for text in (folder / INDEX).read_bytes().splitlines(keepends=True):
        if text.endswith(b"\n"):
            with suppress(*UNDECODABLE):
                lines.append(_lines.decode(text))
    return lines


def line_of_file(path: Path, run: str) -> IndexEntry | None:
    """Return the line of the index for a file of this run; None for one that is damaged, or of another run."""
    content = path.read_bytes()
    try:
        file = _files.decode(content)
    except UNDECODABLE:
        return None
    if (file.format, file.version, file.run) != (FORMAT, VERSION, run):
        return None
    line = index_entry(file.step, file.groups, content)
    return line if line.file == path.name else None


def encode_line(line: IndexEntry) -> bytes:
    """Return a line of the index."""
    return msgspec.json.encode(line) + b"\n"


def read_file(folder: Path, line: IndexEntry) -> tuple[StoredGroup, ...]:
    """Return the groups of a file. Raises ConfigError when it does not match the index."""
    path = folder / line.file
    if line.size_bytes > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ConfigError(
            f"{path} has {line.size_bytes} bytes in {INDEX}, and this machine {memory} of memory; restore the file"
        )
    try:
        with open_regular(path) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            content = opened.read(line.size_bytes) if size_bytes == line.size_bytes else b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which is in the index: {error.strerror}; restore the file") from None
    if size_bytes != line.size_bytes:
        raise ConfigError(f"{path} has {size_bytes} bytes, and {line.size_bytes} in {INDEX}; restore the file")
    if hashlib.sha256(content).hexdigest() != line.sha256:
        raise ConfigError(f"{path} does not match its checksum in {INDEX}; restore the file")
    try:
        file = _files.decode(content)
    except UNDECODABLE as error:
        raise ConfigError(f"{path} cannot be decoded: {error}; read it with the version that wrote it") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise ConfigError(
            f"{path} has the format {file.format} {file.version}, and this Starling reads {FORMAT} {VERSION}; read it "
            "with the version that wrote it"
        )
    if (len(file.groups), sum(bool(group.trajectories) for group in file.groups)) != (line.num_groups, line.num_usable):
        raise ConfigError(f"{path} has other groups than {INDEX} says; restore both files")
    return file.groups


def check_group(group: StoredGroup) -> None:
    """Check all that a policy trains of a group, which is from a file that may be anyone's.

    Raises:
        InvalidResultError: naming what it could not train.
    """
    check_stored(group.trajectories, group.tensors, group.buffers, group.rewards, contents=True)
    if group.temperature and not MIN_TEMPERATURE <= group.temperature <= MAX_TEMPERATURE:
        raise InvalidResultError(f"its tokens were sampled at temperature {group.temperature}")


def num_usable(folder: Path) -> int:
    """Return the number of groups of `folder` that can be trained. Raises ConfigError."""
    return sum(line.num_usable for line in read_index(folder))


def check_enough(folder: Path, num: int, prompts_per_step: int) -> None:
    """Raise ConfigError when the `num` groups of `folder` are fewer than one step needs."""
    if num == 0:
        raise ConfigError(f"{folder} has no groups that can be trained; give the trajectories of another run")
    if num < prompts_per_step:
        raise ConfigError(
            f"{folder} has {counted(num, 'group')}, and a step takes {prompts_per_step}; "
            f"set rl.prompts_per_step = {num} or less"
        )


class Trajectories:
    """The trainable groups of a folder, as the prompts and the steps of a run that replays."""

    def __init__(self, folder: Path, *, prompts_per_step: int, first_step: int, first_prompt: int = 0) -> None:
        """Open a folder; step `first_step` trains the groups from position `first_prompt` on. Raises ConfigError."""
        self._folder, self._per_step = folder, prompts_per_step
        self._first_step, self._first_prompt = first_step, first_prompt
        self._index = [line for line in read_index(folder) if line.num_usable]
        self._first_groups: list[int] = []
        self.num_groups = 0
        for line in self._index:
            self._first_groups.append(self.num_groups)
            self.num_groups += line.num_usable
        self._read = lru_cache(maxsize=2)(self._read_usable)

    def __len__(self) -> int:
        """Return the number of groups that can be trained."""
        return self.num_groups

    @property
    def digest(self) -> str:
        """Digest of the files, by those in the index."""
        return hashlib.sha256("".join(line.sha256 for line in self._index).encode()).hexdigest()

    def check_tokens(self) -> None:
        """Raise ConfigError when the files have the texts of completions without their tokens."""
        if self.num_groups and not self._group(0).tensors:
            raise ConfigError(
                f"{self._folder} has texts without tokens, which cannot be trained; give those of a run with "
                "run.kind = 'generate' or logging.trajectories = true"
            )

    def prompt(self, position: int) -> Prompt:
        """Return the prompt of the group at `position`."""
        return self._group(position).prompt

    def entries(self, step: int) -> tuple[JournalEntry, ...]:
        """Return the groups of `step` as `Journal.fetch` does. Raises ConfigError for one that cannot be trained."""
        begin = self._first_prompt + (step - self._first_step) * self._per_step
        entries: list[JournalEntry] = []
        for position in range(begin, min(begin + self._per_step, self.num_groups)):
            group, key = self._group(position), f"t{position}"
            try:
                check_group(group)
            except InvalidResultError as error:
                where = f"the group of prompt {group.prompt.id!r:.255} in {self._path(position)}"
                reason = str(error)[:MAX_REASON]
                raise ConfigError(
                    f"{where} cannot be trained: {reason}; give the trajectories of another run"
                ) from None
            generated = CompletionsStored(
                key=key, trajectories=group.trajectories, tensors=group.tensors, temperature=group.temperature
            )
            rewards = group.rewards or (0.0,) * len(group.trajectories)
            entries.append(JournalEntry(generated, group.buffers))
            scored = RewardsStored(
                key=key, rewards=rewards, components=group.components, evaluation_scores=group.evaluation_scores
            )
            entries.append(JournalEntry(scored))
        return tuple(entries)

    def _path(self, position: int) -> Path:
        return self._folder / self._index[bisect_right(self._first_groups, position) - 1].file

    def _group(self, position: int) -> StoredGroup:
        number = bisect_right(self._first_groups, position) - 1
        return self._read(number)[position - self._first_groups[number]]

    def _read_usable(self, number: int) -> list[StoredGroup]:
        return [group for group in read_file(self._folder, self._index[number]) if group.trajectories]
