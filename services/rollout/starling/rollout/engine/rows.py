"""What the host knows of the running rows: one numpy record per row, and what each has sampled so far.

Every step touches all rows by whole-array operations; only rows that end cost a pass through Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import Status
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult
from starling.rollout.engine.sampling import completion_key

ROW: Final = np.dtype(
    [
        ("group", np.int64),  # number of the group in the engine
        ("index", np.int64),  # of the completion in its group
        ("slot", np.int64),  # line of the transcript, the row's own while it runs
        ("position", np.int64),  # of `last` in the sequence, as the model counts them
        ("length", np.int64),  # tokens sampled
        ("budget", np.int64),  # most tokens to sample
        ("last", np.int64),  # newest token, not yet in the cache
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("key", np.uint64),  # of the completion's stream of uniforms
    ]
)
NO_TOKEN: Final = -1


@dataclass(slots=True)
class Group:
    """A group that waits or runs."""

    number: int
    request: GroupRequest
    budget: int
    """Most tokens per completion: `max_tokens`, or what the context leaves."""
    stops: tuple[int, ...]
    """Every token that ends a completion."""
    done: dict[int, Completion] = field(default_factory=dict)
    """Completions that have ended, by index."""

    def stream_keys(self) -> list[int]:
        """Return the key of each completion's stream of uniforms."""
        seed = self.request.sampling.seed
        return [completion_key(seed, index) for index in range(self.request.num_completions)]

    def result(self) -> GroupResult:
        """Return the completions of a group that has ended."""
        completions = tuple(self.done[index] for index in range(self.request.num_completions))
        prompt_ids = np.array(self.request.prompt_ids, np.int32)
        return GroupResult(self.request.lease, prompt_ids, completions, self.request.tensors)


def last_position(request: GroupRequest) -> int:
    """Return the position of the prompt's last token; what is sampled counts on from there.

    It is not the number of tokens: those of an image stand side by side. Nor is it the greatest position: the times of
    a long video run ahead of the text behind it.
    """
    positions = request.tensors.get("position_ids")
    return len(request.prompt_ids) - 1 if positions is None else int(positions[:, -1].max())


class RunningRows:
    """The rows of the batch, in batch order, with the transcript of each."""

    def __init__(self, max_rows: int) -> None:
        """Make an empty batch of at most `max_rows` rows."""
        self.table: npt.NDArray[Any] = np.zeros(0, ROW)
        self._stops = np.zeros((0, 0), np.int64)
        self._free_slots = list(range(max_rows))[::-1]
        self._token_ids = np.zeros((max_rows, 0), np.int32)
        self._logprobs = np.zeros((max_rows, 0), np.float32)
        self._versions = np.zeros((max_rows, 0), np.int32)

    def __len__(self) -> int:
        return len(self.table)

    def append(self, groups: Sequence[Group]) -> None:
        """Add the rows of groups whose prompts are in the cache, group after group."""
        counts = np.array([group.request.num_completions for group in groups])
        total = int(counts.sum())
        new = np.zeros(total, ROW)
        for name, values in (
            ("group", [group.number for group in groups]),
            # The first sampled token, once drawn, stands right behind the prompt.
            ("position", [last_position(group.request) for group in groups]),
            ("budget", [group.budget for group in groups]),
            ("temperature", [group.request.sampling.temperature for group in groups]),
            ("top_p", [group.request.sampling.top_p for group in groups]),
            ("top_k", [group.request.sampling.top_k for group in groups]),
        ):
            new[name] = np.repeat(values, counts)
        new["index"] = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
        new["slot"] = [self._free_slots.pop() for _ in range(total)]
        new["key"] = [key for group in groups for key in group.stream_keys()]
        self.table = np.concatenate((self.table, new))
        self._append_stops(groups, counts)

    def _append_stops(self, groups: Sequence[Group], counts: npt.NDArray[np.int64]) -> None:
        """Add the stop tokens of new rows, padded to the width of the longest list."""
        old = self._stops
        width = max(old.shape[1], max(len(group.stops) for group in groups))
        padded = [group.stops + (NO_TOKEN,) * (width - len(group.stops)) for group in groups]
        new = np.repeat(np.array(padded, np.int64).reshape(len(groups), width), counts, axis=0)
        widened = np.pad(old, ((0, 0), (0, width - old.shape[1])), constant_values=NO_TOKEN)
        self._stops = np.concatenate((widened, new))

    def record(
        self, token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64], version: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Write down one token per row; return which rows hit a stop token, and which are out of budget."""
        lines, at = self.table["slot"], self.table["length"]
        self._widen(int(at.max()) + 1)
        self._token_ids[lines, at] = token_ids
        self._logprobs[lines, at] = logprobs
        self._versions[lines, at] = version
        self.table["last"] = token_ids
        self.table["length"] += 1
        self.table["position"] += 1
        stopped = (self._stops == token_ids[:, None]).any(axis=1)
        return stopped, self.table["length"] >= self.table["budget"]

    def completion(self, row: int, status: Status) -> Completion:
        """Return what row number `row` has sampled."""
        line, length = self.table["slot"][row], self.table["length"][row]
        return Completion(
            token_ids=self._token_ids[line, :length].copy(),
            logprobs=self._logprobs[line, :length].copy(),
            versions=self._versions[line, :length].copy(),
            status=status,
        )

    def remove(self, gone: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Let rows go, filling each hole with a row from the end; return the old number of each row that stays."""
        left = int(len(gone) - gone.sum())
        order = np.arange(left)
        order[gone[:left]] = left + np.flatnonzero(~gone[left:])
        self._free_slots.extend(int(slot) for slot in self.table["slot"][gone])
        self.table, self._stops = self.table[order], self._stops[order]
        return order

    def _widen(self, columns: int) -> None:
        """Make the transcripts at least `columns` tokens long."""
        have = self._token_ids.shape[1]
        if columns <= have:
            return
        extra = ((0, 0), (0, max(columns, 2 * have, 64) - have))
        self._token_ids = np.pad(self._token_ids, extra)
        self._logprobs = np.pad(self._logprobs, extra)
        self._versions = np.pad(self._versions, extra)
