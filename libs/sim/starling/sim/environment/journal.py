"""Simulated journal of the controller: records that were committed survive a crash, others may be lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from starling.controller.core.events import Buffers
from starling.controller.core.records import (
    CompletionsStored,
    EvaluationClosed,
    EvaluationOpened,
    GroupDiscarded,
    GroupRequeued,
    JournalEntry,
    PartialCompletionsStored,
    Record,
    RewardsStored,
    StateCompacted,
    StepCommitted,
    StepFrozen,
    StepReopened,
    TeacherLogprobsStored,
)
from starling.sim.environment.clock import SimulatedClock
from starling.sim.errors import require

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


class SimulatedJournal:
    """Records in order, durable up to a position. One commit at a time covers all records appended before it began.

    It keeps all records, also those that a compaction has replaced, for the checks.
    """

    def __init__(
        self, clock: SimulatedClock, rng: random.Random, fsync_s: float, on_commit: Callable[[], None]
    ) -> None:
        """`on_commit` is called after each commit."""
        self._clock, self._rng, self._fsync_s, self._on_commit = clock, rng, fsync_s, on_commit
        self._records: list[bytes] = []
        self._payloads: list[Buffers] = []
        self.num_durable = 0
        self._committing: int | None = None
        """Number of records that the commit in progress makes durable; None when there is none."""
        self._incarnation = 0
        self._pruned = 0
        self._compacted: tuple[int, bytes] | None = None
        """The newest compaction: the number of the records that it replaces, and its record."""
        self._rebuild_index()

    @property
    def num_records(self) -> int:
        """Return the number of records, durable or not."""
        return len(self._records)

    def append(self, record: Record, payload: Buffers) -> None:
        """Append a record, and begin a commit unless one is in progress."""
        self._records.append(_encoder.encode(record))
        self._payloads.append(payload)
        self._index_record(len(self._records) - 1, record)
        if self._committing is None:
            self._commit()

    def crash(self) -> None:
        """Lose the records that are not durable. A commit in progress succeeds or fails as a whole."""
        self._incarnation += 1
        if self._committing is not None and self._rng.random() < 0.5:
            self.num_durable = self._committing
        self._committing = None
        del self._records[self.num_durable :], self._payloads[self.num_durable :]
        self._rebuild_index()

    def records(self) -> list[Record]:
        """Return all records, durable or not."""
        return [_decoder.decode(record) for record in self._records]

    def compact(self, record: StateCompacted) -> None:
        """Replace all records so far by the state that they have led to, unless some are not durable yet."""
        if self.num_durable == len(self._records):
            self._compacted = len(self._records), _encoder.encode(record)

    @property
    def is_compacted(self) -> bool:
        """Return whether a state has replaced some records."""
        return self._compacted is not None

    def entries(self) -> list[JournalEntry]:
        """Return what a controller restarts from: the compacted state, the contents of live groups, later records."""
        entries = self.all_entries()
        if self._compacted is None:
            return entries
        begin, record = self._compacted
        committed = self._committed_keys()
        live = {
            number
            for index in (self._generated, self._teacher_scored, self._partial)
            for key, number in index.items()
            if number < begin and key not in committed
        }
        kept = [JournalEntry(entries[n].record, entries[n].payload, kept=True) for n in sorted(live)]
        return [JournalEntry(_decoder.decode(record)), *kept, *entries[begin:]]

    def _committed_keys(self) -> set[str]:
        return {f"t{ordinal}" for step in self._committed_steps for ordinal in self._frozen.get(step, ())}

    def all_entries(self) -> list[JournalEntry]:
        """Return all records, without the payloads of committed steps, which are read by `fetch` only."""
        committed = self._committed_keys()
        entries = []
        for encoded, payload in zip(self._records, self._payloads, strict=True):
            record = _decoder.decode(encoded)
            omitted = isinstance(record, CompletionsStored | TeacherLogprobsStored) and record.key in committed
            entries.append(JournalEntry(record, () if omitted else payload))
        return entries

    def fetch(self, step: int) -> tuple[JournalEntry, ...]:
        """Return the records of each group of a committed step, in the order of the groups."""
        require(step in self._committed_steps, f"step {step} is fetched, which was not committed")
        require(step > self._pruned, f"step {step} is fetched, and the payload up to step {self._pruned} is deleted")
        keys = [f"t{n}" for n in self._frozen.get(step, ())]
        indexes = (self._generated, self._teacher_scored, self._scored)
        numbers = [index[key] for key in keys for index in indexes if key in index]
        return tuple(JournalEntry(_decoder.decode(self._records[n]), self._payloads[n]) for n in numbers)

    def prune(self, step: int) -> None:
        """Delete the payloads of the steps up to `step`."""
        for done in range(self._pruned + 1, step + 1):
            for ordinal in self._frozen.get(done, ()):
                for index in (self._generated, self._teacher_scored):
                    if f"t{ordinal}" in index:
                        self._payloads[index[f"t{ordinal}"]] = ()
        self._pruned = max(self._pruned, step)

    def _commit(self) -> None:
        self._committing = len(self._records)
        # One commit in a hundred takes a hundred times as long.
        seconds = self._fsync_s * (0.5 + self._rng.random()) * (100 if self._rng.random() < 0.01 else 1)
        self._clock.after(seconds, self._synced, self._incarnation)

    def _synced(self, incarnation: int) -> None:
        if incarnation != self._incarnation or self._committing is None:
            return
        self.num_durable, self._committing = self._committing, None
        if self.num_durable < len(self._records):
            self._commit()
        self._on_commit()

    def _rebuild_index(self) -> None:
        """Rebuild the index of the records of each step."""
        self._generated: dict[str, int] = {}
        self._teacher_scored: dict[str, int] = {}
        self._scored: dict[str, int] = {}
        self._partial: dict[str, int] = {}
        self._frozen: dict[int, tuple[int, ...]] = {}
        self._committed_steps: set[int] = set()
        for number, encoded in enumerate(self._records):
            self._index_record(number, _decoder.decode(encoded))

    def _index_record(self, number: int, record: Record) -> None:
        match record:
            case CompletionsStored(key=key):
                self._drop(key)
                self._generated[key] = number
            case PartialCompletionsStored(key=key):
                self._partial[key] = number
            case GroupRequeued(key=key) | GroupDiscarded(key=key):
                self._drop(key)
            case EvaluationOpened() | EvaluationClosed():
                for key in [*self._generated, *self._partial]:
                    if key.startswith("e"):
                        self._drop(key)
            case TeacherLogprobsStored(key=key):
                self._teacher_scored[key] = number
            case RewardsStored(key=key) if key.startswith("e"):
                self._drop(key)  # nothing of an evaluation is trained
            case RewardsStored(key=key):
                self._scored[key] = number
            case StepFrozen(step=step, ordinals=ordinals):
                self._frozen[step] = ordinals
            case StepReopened(step=step):
                self._frozen.pop(step, None)
            case StepCommitted(step=step):
                self._committed_steps.add(step)

    def _drop(self, key: str) -> None:
        for index in (self._generated, self._teacher_scored, self._scored, self._partial):
            index.pop(key, None)
