"""Files of trajectories: what `generate` writes, and `replay` reads.

    trajectories/
      index.jsonl              one line for each file, in the order of steps
      step-000001.msgpack      the groups of one step: one MessagePack map, `TrajectoryFile`

A file comes into being whole (it is renamed when it is on disk), and its line in the index after that, so whatever the
index names is complete. MessagePack, because a group is a map of small values with a few buffers of some KiB: the
header of a container for tensors would be longer than they are. It is read with `msgpack.unpackb` in any language, and
is written here by the codec that wire and journal have. See `docs/how-to/replay.md`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.controller.core.groups.stored import StoredGroup
from starling.controller.core.records import CompletionsStored, JournalEntry, RewardsStored

TRAJECTORIES: Final = "trajectories:"
"""The sources of data that begin so are folders of such files."""
FOLDER: Final = "trajectories"
"""Where a run keeps them, in its folder."""
INDEX: Final = "index.jsonl"
FORMAT: Final = "starling-trajectories"
VERSION: Final = 1

_encoder: Final = msgspec.msgpack.Encoder()


class TrajectoryFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is in one file."""

    format: str
    version: int
    run: str
    """Id of the run that wrote it."""
    step: int
    """Of reinforcement learning: the step that trained the groups; else which file this is, from 1."""
    groups: tuple[StoredGroup, ...]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the index."""

    file: str
    step: int
    num_groups: int
    num_usable: int
    """Groups that were not given up."""
    size_bytes: int
    sha256: str


_files: Final = msgspec.msgpack.Decoder(TrajectoryFile)
_lines: Final = msgspec.json.Decoder(IndexEntry)


def encode_file(run: str, step: int, groups: Sequence[StoredGroup]) -> bytes:
    """Return the content of a file."""
    return _encoder.encode(TrajectoryFile(format=FORMAT, version=VERSION, run=run, step=step, groups=tuple(groups)))


def line_of(step: int, groups: Sequence[StoredGroup], content: bytes) -> IndexEntry:
    """Return what the index says of a file."""
    return IndexEntry(
        file=f"step-{step:06}.msgpack",
        step=step,
        num_groups=len(groups),
        num_usable=sum(bool(group.trajectories) for group in groups),
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def read_index(folder: Path) -> list[IndexEntry]:
    """Return the lines of the index; a last one that was cut short is none. Raises ConfigError when it is damaged."""
    path = folder / INDEX
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {INDEX}, so there are no trajectories in it; give the folder {FOLDER} of a run"
        )
    lines: list[IndexEntry] = []
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            break
        try:
            lines.append(_lines.decode(text))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} of {path} does not decode: {error}; restore the file") from None
    return lines


def read_file(folder: Path, line: IndexEntry) -> tuple[StoredGroup, ...]:
    """Return the groups of a file. Raises ConfigError when it is not what the index says."""
    path = folder / line.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which the index names: {error.strerror}; restore the file") from None
    if hashlib.sha256(content).hexdigest() != line.sha256:
        raise ConfigError(f"{path} is not as it was written, by its checksum in {INDEX}; restore the file")
    try:
        file = _files.decode(content)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not decode: {error}; read it with the Starling that wrote it") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise ConfigError(
            f"{path} has the form {file.format} {file.version}, and this Starling reads {FORMAT} {VERSION}; read it "
            "with the Starling that wrote it"
        )
    return file.groups


def num_usable(folder: Path) -> int:
    """Return how many groups of `folder` can be trained. Raises ConfigError."""
    return sum(line.num_usable for line in read_index(folder))


def check_enough(folder: Path, num: int, prompts_per_step: int) -> None:
    """Raise ConfigError when the `num` groups of `folder` are not even those of one step."""
    if num == 0:
        raise ConfigError(f"{folder} has no groups that could be trained; give the trajectories of another run")
    if num < prompts_per_step:
        raise ConfigError(
            f"{folder} has {num} groups, and a step takes {prompts_per_step}; set rl.prompts_per_step = {num} or less"
        )


class Trajectories:
    """The groups of such a folder that can be trained, as the prompts and steps of a run that replays."""

    def __init__(self, folder: Path, *, prompts_per_step: int, first_step: int, first_prompt: int = 0) -> None:
        """Step `first_step` of the run takes the groups from position `first_prompt` on. Raises ConfigError."""
        self._folder, self._per_step = folder, prompts_per_step
        self._first_step, self._first_prompt = first_step, first_prompt
        self._index = [line for line in read_index(folder) if line.num_usable]
        self._begins: list[int] = []
        self.num_groups = 0
        for line in self._index:
            self._begins.append(self.num_groups)
            self.num_groups += line.num_usable
        self._read = lru_cache(maxsize=2)(self._usable)

    def check_tokens(self) -> None:
        """Raise ConfigError when the files are of a run that keeps the texts of completions alone."""
        if self.num_groups and not self._group(0).tensors:
            raise ConfigError(
                f"{self._folder} has texts without their tokens, from which nothing can be trained; give what a run of "
                "run.kind = 'generate' or with logging.trajectories = true has written"
            )

    def prompt(self, position: int) -> Prompt:
        """Return the prompt of the group at `position`."""
        return self._group(position).prompt

    def records(self, step: int) -> tuple[JournalEntry, ...]:
        """Return what `step` is made of, as a journal would. Raises ConfigError."""
        begin = self._first_prompt + (step - self._first_step) * self._per_step
        kept: list[JournalEntry] = []
        for position in range(begin, min(begin + self._per_step, self.num_groups)):
            group, key = self._group(position), f"t{position}"
            generated = CompletionsStored(
                key=key, trajectories=group.trajectories, tensors=group.tensors, temperature=group.temperature
            )
            rewards = group.rewards or (0.0,) * len(group.trajectories)
            kept.append(JournalEntry(generated, group.buffers))
            kept.append(JournalEntry(RewardsStored(key=key, rewards=rewards, components=group.components)))
        return tuple(kept)

    def _group(self, position: int) -> StoredGroup:
        number = bisect_right(self._begins, position) - 1
        return self._read(number)[position - self._begins[number]]

    def _usable(self, number: int) -> list[StoredGroup]:
        return [group for group in read_file(self._folder, self._index[number]) if group.trajectories]
