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
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult, PartialCompletion, PromptLogprobs
from starling.rollout.engine.embedded.sampling import completion_key

ROW_DTYPE: Final = np.dtype(
    [
        ("group", np.int64),  # number of the group in the engine
        ("index", np.int64),  # of the completion in its group
        ("slot", np.int64),  # line of the transcript, the row's own while it runs
        ("position", np.int64),  # of `last` in the sequence, as the model counts them
        ("length", np.int64),  # tokens sampled
        ("given", np.int64),  # tokens that were sampled before the group came here; they are not drawn again
        ("budget", np.int64),  # most tokens to sample
        ("last", np.int64),  # newest token, not yet in the cache
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("key", np.uint64),  # of the completion's stream of uniforms
    ]
)
NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One token sequence that is computed at once, and the rows that go on from it."""

    group: EmbeddedGroup
    indices: tuple[int, ...]
    """The completions that begin with it."""
    ids: list[int]
    """The prompt's tokens, and those of the completions that are there already."""


@dataclass(slots=True)
class EmbeddedGroup:
    """A group that waits or runs.

    What was sampled elsewhere is computed at once, or, to `replay`, token by token, in the batches in which it was
    sampled: only then does it leave the same bits in the cache.
    """

    number: int
    request: GroupRequest
    budget: int
    """Most tokens per completion: `max_tokens`, or what the context leaves."""
    stops: tuple[int, ...]
    """Every token that ends a completion."""
    replay: bool = False
    done: dict[int, Completion] = field(default_factory=dict)
    """Completions that have ended, by index."""
    scores: PromptLogprobs | None = None
    """Of the prompt, where they are asked for, once it is computed."""

    def __post_init__(self) -> None:
        """Sort out what ended elsewhere."""
        for index, partial in enumerate(self.request.partial):
            if (status := self._ending(partial)) is not None:
                self.done[index] = Completion(
                    token_ids=partial.token_ids.astype(np.int32),
                    logprobs=partial.logprobs.astype(np.float32),
                    versions=partial.versions.astype(np.int32),
                    status=status,
                )

    @property
    def most_cached(self) -> int:
        """Most tokens of a row in the cache: the last sampled one never enters it."""
        return len(self.request.prompt_ids) + self.budget - 1

    @property
    def num_rows(self) -> int:
        """Rows that it takes at first."""
        num_ended, num = len(self.done), self.request.num_completions
        return 0 if num_ended == num else num if self.replay else num - num_ended

    @property
    def wants_scores(self) -> bool:
        """Whether its prompt is still to be scored."""
        return self.request.score_prompt and self.scores is None

    def lines(self) -> list[PrefillSequence]:
        """Return what has to be computed to go on, or to begin; nothing where all completions have ended."""
        everyone, prompt = range(self.request.num_completions), self.request.prompt_ids
        if not self.num_rows:
            return []
        if self.replay:
            return [PrefillSequence(self, tuple(everyone), prompt)]
        unfinished = [index for index in everyone if index not in self.done]
        fresh = tuple(index for index in unfinished if not len(self.given(index).token_ids))
        lines = [PrefillSequence(self, fresh, prompt)] if fresh else []
        lines += [
            PrefillSequence(self, (index,), [*prompt, *self.given(index).token_ids.tolist()])
            for index in unfinished
            if index not in fresh
        ]
        return lines

    def given(self, index: int) -> PartialCompletion | Completion:
        """Return what there was of a completion when the group came."""
        return self.request.partial[index] if self.request.partial else _NOTHING

    def budget_of(self, index: int) -> int:
        """Return the most tokens of one completion; one that is replayed although it has ended ends there again."""
        return len(self.done[index].token_ids) if index in self.done else self.budget

    def stream_key(self, index: int) -> int:
        """Return the key of a completion's stream of uniforms."""
        return completion_key(self.request.sampling.seed, index)

    def result(self) -> GroupResult:
        """Return the completions of a group that has ended."""
        completions = tuple(self.done[index] for index in range(self.request.num_completions))
        prompt_ids = np.array(self.request.prompt_ids, np.int32)
        return GroupResult(self.request.lease, prompt_ids, completions, self.request.tensors, self.scores)

    def _ending(self, partial: PartialCompletion) -> Status | None:
        """Return how a completion that came here ended, by what was said of it or by its tokens; None: it goes on."""
        if partial.status is not None:
            return partial.status
        if len(partial.token_ids) and int(partial.token_ids[-1]) in self.stops:
            return Status.OK
        return Status.TRUNCATED if len(partial.token_ids) >= self.budget else None


_NOTHING: Final = PartialCompletion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


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
        self.table: npt.NDArray[Any] = np.zeros(0, ROW_DTYPE)
        self._stops = np.zeros((0, 0), np.int64)
        self._free_slots = list(range(max_rows))[::-1]
        self._token_ids = np.zeros((max_rows, 0), np.int32)
        self._logprobs = np.zeros((max_rows, 0), np.float32)
        self._versions = np.zeros((max_rows, 0), np.int32)

    def __len__(self) -> int:
        return len(self.table)

    def append(self, lines: Sequence[PrefillSequence]) -> None:
        """Add the rows of lines that are in the cache, line after line."""
        rows = [(line, index) for line in lines for index in line.indices]
        groups = [line.group for line, _ in rows]
        sampled = [len(line.ids) - len(line.group.request.prompt_ids) for line, _ in rows]
        new = np.zeros(len(rows), ROW_DTYPE)
        for name, values in (
            ("group", [group.number for group in groups]),
            ("index", [index for _, index in rows]),
            ("length", sampled),
            # The next token, once drawn, stands right behind the line.
            ("position", [last_position(group.request) + n for group, n in zip(groups, sampled, strict=True)]),
            ("given", [len(line.group.given(index).token_ids) for line, index in rows]),
            ("budget", [line.group.budget_of(index) for line, index in rows]),
            ("temperature", [group.request.sampling.temperature for group in groups]),
            ("top_p", [group.request.sampling.top_p for group in groups]),
            ("top_k", [group.request.sampling.top_k for group in groups]),
            ("slot", [self._free_slots.pop() for _ in rows]),
            ("key", [line.group.stream_key(index) for line, index in rows]),
        ):
            new[name] = values
        self.table = np.concatenate((self.table, new))
        self._append_stops(groups)
        self._widen(int(new["given"].max()))
        for slot, (line, index) in zip(new["slot"], rows, strict=True):
            given = line.group.given(index)
            num = len(given.token_ids)
            self._token_ids[slot, :num] = given.token_ids
            self._logprobs[slot, :num] = given.logprobs
            self._versions[slot, :num] = given.versions

    def _append_stops(self, groups: Sequence[EmbeddedGroup]) -> None:
        """Add the stop tokens of new rows, padded to the width of the longest list."""
        old = self._stops
        width = max(old.shape[1], max(len(group.stops) for group in groups))
        padded = [group.stops + (NO_TOKEN,) * (width - len(group.stops)) for group in groups]
        new = np.array(padded, np.int64).reshape(len(groups), width)
        widened = np.pad(old, ((0, 0), (0, width - old.shape[1])), constant_values=NO_TOKEN)
        self._stops = np.concatenate((widened, new))

    def record(
        self, token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64], version: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Write down one token per row, or take the one that was given.

        Returns:
            Which rows hit a stop token, which are out of budget, and which have sampled.
        """
        lines, at = self.table["slot"], self.table["length"]
        self._widen(int(at.max()) + 1)
        sampled = at >= self.table["given"]
        self._token_ids[lines[sampled], at[sampled]] = token_ids[sampled]
        self._logprobs[lines[sampled], at[sampled]] = logprobs[sampled]
        self._versions[lines[sampled], at[sampled]] = version
        newest = self._token_ids[lines, at].astype(np.int64)
        self.table["last"] = newest
        self.table["length"] += 1
        self.table["position"] += 1
        stopped = (self._stops == newest[:, None]).any(axis=1)
        return stopped, self.table["length"] >= self.table["budget"], sampled

    def completion(self, row: int, status: Status) -> Completion:
        """Return what row number `row` has sampled."""
        return Completion(*self._transcript(row, int(self.table["length"][row])), status=status)

    def partial(self, row: int) -> PartialCompletion:
        """Return what is there of row number `row`, which goes on: what was given, too, if it is not replayed yet."""
        record = self.table[row]
        return PartialCompletion(*self._transcript(row, int(max(record["length"], record["given"]))))

    def cached_ids(self, row: int) -> list[int]:
        """Return the sampled tokens of row number `row` whose keys and values are in the cache: all but the newest."""
        ids: list[int] = self._token_ids[self.table["slot"][row], : self.table["length"][row] - 1].tolist()
        return ids

    def _transcript(
        self, row: int, length: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        line = self.table["slot"][row]
        return (
            self._token_ids[line, :length].copy(),
            self._logprobs[line, :length].copy(),
            self._versions[line, :length].copy(),
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
