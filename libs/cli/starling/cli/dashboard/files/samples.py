"""Index of samples.jsonl and its predecessor: where each completion is, and by what it is found."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from starling.cli.dashboard.files.follow import Follower
from starling.cli.runs.files.lines import decode, number, step_of, text_of
from starling.common.files import MAX_LINE_BYTES, open_own
from starling.controller.shell.outputs.samples import OLD_SAMPLES, SAMPLES

MAX_ROWS: Final = 200_000
"""Completions in the index; older ones are left out."""
MAX_PAGE: Final = 50
MAX_TOKENS: Final = 8192
"""Tokens of a completion that are shown one by one."""
MAX_MEDIA: Final = 16
Order = Literal["newest", "oldest", "best", "worst", "longest"]


@dataclass(frozen=True)
class Filter:
    """Which completions are listed."""

    first_step: int = 0
    last_step: int = 1 << 23
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    """Part of the prompt or the completion; only among the `MAX_SEARCHED` completions that come first in the order."""

    def takes(self, step: float, reward: float | None) -> bool:
        """Return whether a completion is listed, as far as the index says."""
        if not self.first_step <= step <= self.last_step:
            return False
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        return self.max_reward is None or (reward is not None and reward <= self.max_reward)


MAX_SEARCHED: Final = 2000


@dataclass(frozen=True)
class Row:
    """Place of one completion."""

    key: int
    """Number of the completion among all that were read."""
    position: int
    size: int
    step: int
    reward: float | None
    num_tokens: int
    generation: int
    """Number of the file: the predecessor has a smaller one."""


class SampleIndex:
    """Follows samples.jsonl, also over its rotation."""

    def __init__(self, folder: Path) -> None:
        self._path, self._old = folder / SAMPLES, folder / OLD_SAMPLES
        self._follower = Follower(self._path)
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._identities: dict[int, tuple[int, int]] = {}
        """By generation: device and inode of the file; only of the newest two, as others are deleted."""
        self._has_read_old = False
        self.num_read = 0

    def read(self, max_bytes: int) -> None:
        """Add the completions that were written since. Raises OSError."""
        if not self._has_read_old:
            self._has_read_old = True
            self._read_old()
        for position, text in self._follower.lines(max_bytes):
            self._add(position, text, self._follower.num_begun, self._follower.identity)

    def close(self) -> None:
        """Close the file."""
        self._follower.close()

    def __len__(self) -> int:
        return len(self._rows)

    def page(self, wanted: Filter, order: Order, skip: int, num: int) -> tuple[list[dict[str, Any]], int]:
        """Return the fields of up to `num` completions after the first `skip`, and how many there are in all.

        With a text, they are counted among those that were searched.
        """
        rows = [row for row in self._rows if wanted.takes(row.step, row.reward)]
        _sort(rows, order)
        if not wanted.text:
            found = rows[skip : skip + min(num, MAX_PAGE)]
            return [fields for row in found if (fields := self.fields(row)) is not None], len(rows)
        matching, needle = [], wanted.text.casefold()
        for row in rows[:MAX_SEARCHED]:
            fields = self.fields(row)
            if fields is not None and needle in f"{fields['prompt']}\n{fields['completion']}".casefold():
                matching.append(fields)
        return matching[skip : skip + min(num, MAX_PAGE)], len(matching)

    def line(self, key: int) -> dict[str, Any] | None:
        """Return all that the file says of the completion with this number, None where it is there no more."""
        first = self._rows[0].key if self._rows else 0
        at = key - first
        return self._line(self._rows[at]) if 0 <= at < len(self._rows) else None

    def fields(self, row: Row) -> dict[str, Any] | None:
        """Return what the page shows of a completion, None where it is there no more."""
        line = self._line(row)
        return None if line is None else _shown(row, line)

    def _line(self, row: Row) -> dict[str, Any] | None:
        for path in (self._path, self._old):
            with suppress(OSError):
                descriptor = open_own(path)
                try:
                    status = os.fstat(descriptor)
                    if self._identities.get(row.generation) != (status.st_dev, status.st_ino):
                        continue
                    return decode(os.pread(descriptor, min(row.size, MAX_LINE_BYTES), row.position))
                finally:
                    os.close(descriptor)
        return None

    def _read_old(self) -> None:
        """Read the predecessor once: it is not written any more."""
        old = Follower(self._old)
        try:
            for position, text in old.lines(1 << 62):
                self._add(position, text, 0, old.identity)
        finally:
            old.close()

    def _add(self, position: int, text: bytes, generation: int, identity: tuple[int, int]) -> None:
        line = decode(text)
        step = step_of(line.get("step")) if line is not None else None
        if line is None or step is None:
            return
        self._identities[generation] = identity
        self._identities.pop(generation - 2, None)  # its file was deleted by the second rotation since
        self.num_read += 1
        num_tokens = int(number(line.get("num_tokens")) or 0)
        reward = number(line.get("reward"))
        self._rows.append(Row(self.num_read, position, len(text), step, reward, num_tokens, generation))


def _sort(rows: list[Row], order: Order) -> None:
    low = float("-inf")
    keys: dict[Order, Callable[[Row], tuple[float, ...]]] = {
        "newest": lambda row: (-row.step, row.key),
        "oldest": lambda row: (row.step, row.key),
        "best": lambda row: (-(row.reward if row.reward is not None else low), -row.key),
        "worst": lambda row: (row.reward if row.reward is not None else -low, -row.key),
        "longest": lambda row: (-row.num_tokens, -row.key),
    }
    rows.sort(key=keys[order])


def _shown(row: Row, line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a completion for the page: texts, numbers and the parts of its reward."""
    parts = {}
    for prefix in ("score/", "eval_score/", "env/"):
        parts[prefix.rstrip("/")] = {
            name.removeprefix(prefix)[:80]: number(value) for name, value in line.items() if name.startswith(prefix)
        }
    return {
        "key": row.key,
        "step": row.step,
        "prompt_id": text_of(line, "prompt_id", 200),
        "prompt": text_of(line, "prompt", 20_000),
        "completion": text_of(line, "completion", 20_000),
        "reward": row.reward,
        "parts": parts,
        "status": text_of(line, "status", 40),
        "num_turns": number(line.get("num_turns")),
        "num_tokens": row.num_tokens,
        "oldest_version": number(line.get("oldest_version")),
        "newest_version": number(line.get("newest_version")),
        "has_tokens": isinstance(line.get("token_ids"), list),
        "media": _media(line),
    }


def _media(line: dict[str, Any]) -> list[dict[str, str]]:
    """Return kind and name of the images and videos of a prompt."""
    media = line.get("media")
    found = media if isinstance(media, list) else []
    return [
        {"kind": text_of(one, "kind", 20), "name": text_of(one, "uri", 200).rpartition("/")[2][:100]}
        for one in found[:MAX_MEDIA]
        if isinstance(one, dict)
    ]


def tokens_of(line: dict[str, Any]) -> tuple[list[int], list[float | None], list[int]] | None:
    """Return ids, log-probabilities and versions of the tokens of a completion, None where the line has none."""
    ids, logprobs, versions = line.get("token_ids"), line.get("logprobs"), line.get("versions")
    if not (isinstance(ids, list) and isinstance(logprobs, list) and isinstance(versions, list)):
        return None
    if len(ids) != len(logprobs):
        return None
    checked = array("q")
    for token in ids[:MAX_TOKENS]:
        if type(token) is not int or not 0 <= token < 1 << 31:
            return None
        checked.append(token)
    return list(checked), [number(value) for value in logprobs[:MAX_TOKENS]], list(_versions(versions, len(checked)))


def _versions(runs: list[Any], num: int) -> Iterator[int]:
    """Yield the version of each token from pairs of a version and the number of tokens that it sampled."""
    left = num
    for pair in runs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(value) is int for value in pair)):
            break
        for _ in range(min(left, max(0, pair[1]))):
            yield pair[0]
        left -= min(left, max(0, pair[1]))
    for _ in range(left):
        yield -1
