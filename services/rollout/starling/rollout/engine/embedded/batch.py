"""Batch state on the host: the groups, one numpy record per running row, and the tokens that each row has sampled.

Every step updates all rows by whole-array operations; only rows that end cost a Python loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.algo.routing import Experts, fill, is_recorded, no_experts
from starling.algo.truncation import NO_IDS, KeptTokens, is_truncated
from starling.common.wire.messages import Status
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult, PartialCompletion, PromptLogprobs
from starling.rollout.engine.embedded.sampling import completion_key

ROW_DTYPE: Final = np.dtype(
    [
        ("group", np.int64),  # number of the group in the engine
        ("index", np.int64),  # index of the completion in its group
        ("slot", np.int64),  # row of the transcript arrays, reserved while the completion runs
        ("position", np.int64),  # position id of `last`
        ("length", np.int64),  # tokens sampled
        ("num_resumed", np.int64),  # tokens of the partial completion; they are not drawn again
        ("budget", np.int64),  # maximum number of tokens to sample
        ("last", np.int64),  # newest token, not yet in the cache
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("records", np.int64),  # 1 if its kept tokens are recorded, else 0
        ("routed", np.int64),  # 1 if the experts of its tokens are recorded, else 0
        ("key", np.uint64),  # key of the completion's stream of uniforms
    ]
)
NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One token sequence to prefill, and the rows that continue it."""

    group: EmbeddedGroup
    indices: tuple[int, ...]
    """The completions that continue it."""
    ids: list[int]
    """The prompt's tokens, followed by those of a partial completion."""


@dataclass(slots=True)
class EmbeddedGroup:
    """A waiting or running group of the embedded engine.

    Partial completions are prefilled at once, or, with `replay`, decoded again token by token in the batches in which
    they were sampled: only the latter leaves bitwise the same KV cache.
    """

    number: int
    request: GroupRequest
    budget: int
    """Maximum number of tokens per completion: `max_tokens`, or what is left of the context."""
    stops: tuple[int, ...]
    """The tokens that end a completion."""
    replay: bool = False
    done: dict[int, Completion] = field(default_factory=dict)
    """The completions that have ended, by index."""
    prompt_logprobs: PromptLogprobs | None = None
    """Set after the prefill if the request has `score_prompt`."""
    prompt_routing: Experts | None = None
    """Set after the first prefill if the experts of its tokens are recorded."""
    prefilled_routing: dict[int, Experts] = field(default_factory=dict)
    """Experts of the resumed tokens of completions, by index, as the prefill has computed them."""

    def __post_init__(self) -> None:
        """Move partial completions that have already ended to `done`."""
        if self.request.partial:
            self.prompt_routing = self.request.partial[0].prompt_routing
        for index, partial in enumerate(self.request.partial):
            if (status := self._ending(partial)) is not None:
                self.done[index] = Completion(
                    token_ids=partial.token_ids.astype(np.int32),
                    logprobs=partial.logprobs.astype(np.float32),
                    versions=partial.versions.astype(np.int32),
                    status=status,
                    kept=partial.kept,
                    truncation_nats=partial.truncation_nats,
                    routing=partial.routing,
                )

    @property
    def is_routed(self) -> bool:
        """Whether the experts of its tokens are recorded."""
        return self.request.sampling.routing == "replayed"

    @property
    def num_rows(self) -> int:
        """Rows that the group needs when it starts."""
        num_ended, num = len(self.done), self.request.num_completions
        return 0 if num_ended == num else num if self.replay else num - num_ended

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are still to be computed."""
        return self.request.score_prompt and self.prompt_logprobs is None

    def prefill_sequences(self) -> list[PrefillSequence]:
        """Return the sequences to prefill when the group starts; none if all completions have ended."""
        indices, prompt = range(self.request.num_completions), self.request.prompt_ids
        if not self.num_rows:
            return []
        if self.replay:
            return [PrefillSequence(self, tuple(indices), prompt)]
        unfinished = [index for index in indices if index not in self.done]
        fresh = tuple(index for index in unfinished if not len(self.resumed(index).token_ids))
        sequences = [PrefillSequence(self, fresh, prompt)] if fresh else []
        sequences += [
            PrefillSequence(self, (index,), [*prompt, *self.resumed(index).token_ids.tolist()])
            for index in unfinished
            if index not in fresh
        ]
        return sequences

    def preempted(self, partials: tuple[PartialCompletion, ...]) -> EmbeddedGroup:
        """Return this group as it waits to resume `partials`."""
        request = replace(self.request, partial=partials)
        group = EmbeddedGroup(self.number, request, self.budget, self.stops, self.replay)
        group.prompt_logprobs = self.prompt_logprobs
        return group

    def resumed(self, index: int) -> PartialCompletion | Completion:
        """Return the partial completion that completion `index` resumes; an empty one if there is none."""
        return self.request.partial[index] if self.request.partial else _NOTHING

    def budget_of(self, index: int) -> int:
        """Return the maximum number of tokens of one completion; a replayed one ends at the same length again."""
        return len(self.done[index].token_ids) if index in self.done else self.budget

    def stream_key(self, index: int) -> int:
        """Return the key of a completion's stream of uniforms."""
        return completion_key(self.request.sampling.seed, index)

    def result(self) -> GroupResult:
        """Return the result of a group whose completions have all ended."""
        completions = tuple(self.done[index] for index in range(self.request.num_completions))
        prompt_ids = np.array(self.request.prompt_ids, np.int32)
        return GroupResult(
            self.request.lease,
            prompt_ids,
            completions,
            self.request.tensors,
            self.prompt_logprobs,
            self.prompt_routing,
        )

    def _ending(self, partial: PartialCompletion) -> Status | None:
        """Return how a partial completion ended, by its status or its tokens; None if it has not ended."""
        if partial.status is not None:
            return partial.status
        if len(partial.token_ids) and int(partial.token_ids[-1]) in self.stops:
            return Status.OK
        return Status.TRUNCATED if len(partial.token_ids) >= self.budget else None


_NOTHING: Final = PartialCompletion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


def _resumed_routing(group: EmbeddedGroup, index: int) -> list[Experts]:
    """Return the experts of each token that completion `index` resumes: those with which the tokens after it were
    sampled, or those of this engine's prefill."""
    resumed, own = group.resumed(index).routing, group.prefilled_routing.pop(index, None)
    if resumed is not None and own is not None:
        return list(fill(resumed, own))
    return list(resumed if resumed is not None else own if own is not None else ())


def last_position(request: GroupRequest) -> int:
    """Return the position id of the prompt's last token; sampled tokens continue from it.

    With images it differs from the number of tokens, as the tokens of an image share positions. Nor is it the largest
    position: the times of a long video can be ahead of the text after it.
    """
    positions = request.tensors.get("position_ids")
    return len(request.prompt_ids) - 1 if positions is None else int(positions[:, -1].max())


class RunningRows:
    """The rows of the batch, in batch order, with the sampled tokens of each."""

    def __init__(self, max_rows: int) -> None:
        """Create an empty batch of at most `max_rows` rows."""
        self.table: npt.NDArray[Any] = np.zeros(0, ROW_DTYPE)
        self._stops = np.zeros((0, 0), np.int64)
        self._free_slots = list(range(max_rows))[::-1]
        self._token_ids = np.zeros((max_rows, 0), np.int32)
        self._logprobs = np.zeros((max_rows, 0), np.float32)
        self._versions = np.zeros((max_rows, 0), np.int32)
        self._nats = np.zeros((max_rows, 0), np.float32)
        """See `Completion.truncation_nats`."""
        self._truncates = False
        """Whether a row ever was truncated, or had kept tokens."""
        self._kept: dict[int, list[npt.NDArray[np.int32]]] = {}
        """The kept tokens at each position of the rows that record them, by slot."""
        self._routing: dict[int, list[Experts]] = {}
        """The experts [layers, chosen] of each token that was computed, of the rows that record them, by slot."""

    def __len__(self) -> int:
        return len(self.table)

    def append(self, sequences: Sequence[PrefillSequence]) -> None:
        """Add the rows of prefilled sequences, sequence after sequence."""
        rows = [(sequence, index) for sequence in sequences for index in sequence.indices]
        groups = [sequence.group for sequence, _ in rows]
        sampled = [len(sequence.ids) - len(sequence.group.request.prompt_ids) for sequence, _ in rows]
        new = np.zeros(len(rows), ROW_DTYPE)
        for name, values in (
            ("group", [group.number for group in groups]),
            ("index", [index for _, index in rows]),
            ("length", sampled),
            # `record` advances this by one for the first sampled token.
            ("position", [last_position(group.request) + n for group, n in zip(groups, sampled, strict=True)]),
            ("num_resumed", [len(sequence.group.resumed(index).token_ids) for sequence, index in rows]),
            ("budget", [sequence.group.budget_of(index) for sequence, index in rows]),
            ("temperature", [group.request.sampling.temperature for group in groups]),
            ("top_p", [group.request.sampling.top_p for group in groups]),
            ("top_k", [group.request.sampling.top_k for group in groups]),
            ("min_p", [group.request.sampling.min_p for group in groups]),
            ("records", [group.request.sampling.logprobs == "truncated" for group in groups]),
            ("routed", [group.is_routed for group in groups]),
            ("slot", [self._free_slots.pop() for _ in rows]),
            ("key", [sequence.group.stream_key(index) for sequence, index in rows]),
        ):
            new[name] = values
        self.table = np.concatenate((self.table, new))
        self._append_stops(groups)
        self._widen(int(new["num_resumed"].max()))
        self._nats[new["slot"]] = np.nan
        for number in np.flatnonzero(new["num_resumed"] | new["routed"] | new["records"]):
            row, (sequence, index) = new[number], rows[number]
            slot = int(row["slot"])
            resumed = sequence.group.resumed(index)
            num = len(resumed.token_ids)
            self._token_ids[slot, :num] = resumed.token_ids
            self._logprobs[slot, :num] = resumed.logprobs
            self._versions[slot, :num] = resumed.versions
            if row["routed"]:
                self._routing[slot] = _resumed_routing(sequence.group, index)
            if row["records"]:
                self._truncates = True
                self._kept[slot] = resumed.kept.rows() if resumed.kept is not None else [NO_IDS] * num

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
        """Append one token per row: the sampled one, or during a replay the next one of the partial completion.

        Returns:
            bool [rows] each: rows that hit a stop token, rows that are out of budget, and rows that have sampled.
        """
        slots, at = self.table["slot"], self.table["length"]
        self._widen(int(at.max()) + 1)
        sampled = at >= self.table["num_resumed"]
        self._token_ids[slots[sampled], at[sampled]] = token_ids[sampled]
        self._logprobs[slots[sampled], at[sampled]] = logprobs[sampled]
        self._versions[slots[sampled], at[sampled]] = version
        newest = self._token_ids[slots, at].astype(np.int64)
        self.table["last"] = newest
        self.table["length"] += 1
        self.table["position"] += 1
        stopped = (self._stops == newest[:, None]).any(axis=1)
        return stopped, self.table["length"] >= self.table["budget"], sampled

    def record_truncation(
        self, log_mass: npt.NDArray[np.float64], kept: KeptTokens | None, sampled: npt.NDArray[np.bool_]
    ) -> None:
        """Note how the newest tokens were truncated.

        Args:
            log_mass: [rows]: logarithm of the probability of the kept tokens; 0 for rows that are not truncated.
            kept: the kept tokens of each row; None if no row records them.
            sampled: bool [rows]: rows that have sampled, see `record`.
        """
        self._truncates = True
        counted = sampled & is_truncated(*(self.table[name] for name in ("temperature", "top_p", "top_k", "min_p")))
        self._nats[self.table["slot"][counted], self.table["length"][counted] - 1] = -log_mass[counted]
        if kept is not None:
            rows = kept.rows()
            for row in np.flatnonzero(sampled & (self.table["records"] == 1)):
                self._kept[int(self.table["slot"][row])].append(rows[row])

    def record_experts(self, experts: Experts) -> None:
        """Note the experts of the newest token of each row, [rows, layers, chosen]: it has just been computed.

        A replayed token keeps those with which the tokens after it were sampled.
        """
        for row in np.flatnonzero(self.table["routed"] == 1):
            known, at = self._routing[int(self.table["slot"][row])], int(self.table["length"][row]) - 1
            if at == len(known):
                known.append(experts[row])
            elif not is_recorded(known[at][None])[0]:
                known[at] = experts[row]

    def completion(self, row: int, status: Status) -> Completion:
        """Return the completion of row number `row`."""
        length = int(self.table["length"][row])
        kept, nats = self._truncation(row, length)
        routing = self._experts(row, length)
        return Completion(
            *self._transcript(row, length), status=status, kept=kept, truncation_nats=nats, routing=routing
        )

    def partial(self, row: int, prompt_routing: Experts | None) -> PartialCompletion:
        """Return the partial completion of running row `row`, including resumed tokens that are not replayed yet."""
        record = self.table[row]
        length = int(max(record["length"], record["num_resumed"]))
        kept, nats = self._truncation(row, length)
        return PartialCompletion(
            *self._transcript(row, length),
            kept=kept,
            truncation_nats=nats,
            routing=self._experts(row, length),
            prompt_routing=prompt_routing,
        )

    def _experts(self, row: int, length: int) -> Experts | None:
        """Return the experts of row `row`, which has `length` tokens; None if none are recorded.

        The newest token has not been computed.
        """
        known = self._routing.get(int(self.table["slot"][row]))
        if not known:
            return None
        return np.stack([*known[:length], *no_experts(length - len(known[:length]), known[0][None])])

    def _truncation(self, row: int, length: int) -> tuple[KeptTokens | None, npt.NDArray[np.float32] | None]:
        """Return the kept tokens and the nats of truncation of row `row`, which has `length` tokens."""
        if not self._truncates:
            return None, None
        slot = int(self.table["slot"][row])
        kept, nats = self._kept.get(slot), self._nats[slot, :length].copy()
        known_nats = None if np.isnan(nats).all() else nats
        return None if kept is None else KeptTokens.from_rows(kept[:length]), known_nats

    def cached_ids(self, row: int) -> list[int]:
        """Return the sampled tokens of row number `row` that are in the KV cache: all but the newest."""
        ids: list[int] = self._token_ids[self.table["slot"][row], : self.table["length"][row] - 1].tolist()
        return ids

    def _transcript(
        self, row: int, length: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        slot = self.table["slot"][row]
        return (
            self._token_ids[slot, :length].copy(),
            self._logprobs[slot, :length].copy(),
            self._versions[slot, :length].copy(),
        )

    def remove(self, removed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Remove rows, filling each gap with a row from the end; return the old number of each remaining row."""
        left = int(len(removed) - removed.sum())
        order = np.arange(left)
        order[removed[:left]] = left + np.flatnonzero(~removed[left:])
        slots = [int(slot) for slot in self.table["slot"][removed]]
        self._free_slots.extend(slots)
        for known in (self._kept, self._routing):
            if known:
                for slot in slots:
                    known.pop(slot, None)
        self.table, self._stops = self.table[order], self._stops[order]
        return order

    def _widen(self, columns: int) -> None:
        """Grow the transcript arrays to at least `columns` tokens."""
        have = self._token_ids.shape[1]
        if columns <= have:
            return
        extra = ((0, 0), (0, max(columns, 2 * have, 64) - have))
        self._token_ids = np.pad(self._token_ids, extra)
        self._logprobs = np.pad(self._logprobs, extra)
        self._versions = np.pad(self._versions, extra)
        self._nats = np.pad(self._nats, extra, constant_values=np.nan)
