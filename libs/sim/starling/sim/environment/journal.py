"""The controller's journal, simulated: what is on disk outlives the controller, what was about to be may not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from starling.controller.core.events import Buffers
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    Record,
    RewardsStored,
    StepCommitted,
    StepFrozen,
    TeacherLogprobsStored,
)
from starling.sim.environment.clock import SimulatedClock
from starling.sim.errors import demand

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


class SimulatedJournal:
    """Records in order, durable up to some point. One commit at a time takes all that came before it began."""

    def __init__(
        self, clock: SimulatedClock, rng: random.Random, fsync_s: float, committed: Callable[[], None]
    ) -> None:
        """`committed` is called after each commit."""
        self._clock, self._rng, self._fsync_s, self._committed = clock, rng, fsync_s, committed
        self._records: list[bytes] = []
        self._payloads: list[Buffers] = []
        self.num_durable = 0
        self._committing: int | None = None
        """What will be durable after the commit under way."""
        self._life = 0
        self._pruned = 0
        self._index()

    @property
    def num_records(self) -> int:
        """Return how many records there are, durable or not."""
        return len(self._records)

    def append(self, record: Record, payload: Buffers) -> None:
        """Take in a record, which a commit will make durable."""
        self._records.append(_encoder.encode(record))
        self._payloads.append(payload)
        self._note(len(self._records) - 1, record)
        if self._committing is None:
            self._commit()

    def crash(self) -> None:
        """Lose what is not durable. A commit under way is done or not, as a whole."""
        self._life += 1
        if self._committing is not None and self._rng.random() < 0.5:
            self.num_durable = self._committing
        self._committing = None
        del self._records[self.num_durable :], self._payloads[self.num_durable :]
        self._index()

    def records(self) -> list[Record]:
        """Return what there is, durable or not."""
        return [_decoder.decode(record) for record in self._records]

    def past(self) -> list[JournalEntry]:
        """Return all records; the payload of committed steps is left out, since nobody asks for it by this way."""
        gone = {f"t{ordinal}" for step in self._done for ordinal in self._sealed.get(step, ())}
        kept = []
        for encoded, payload in zip(self._records, self._payloads, strict=True):
            record = _decoder.decode(encoded)
            omitted = isinstance(record, CompletionsStored | TeacherLogprobsStored) and record.key in gone
            kept.append(JournalEntry(record, () if omitted else payload))
        return kept

    def fetch(self, step: int) -> tuple[JournalEntry, ...]:
        """Return what came of each group of a committed step, in the order of the groups."""
        demand(step in self._done, f"step {step} is fetched, which was not committed")
        demand(step > self._pruned, f"step {step} is fetched, and the payload up to step {self._pruned} is deleted")
        keys, books = [f"t{n}" for n in self._sealed.get(step, ())], (self._generated, self._taught, self._scored)
        numbers = [book[key] for key in keys for book in books if key in book]
        return tuple(JournalEntry(_decoder.decode(self._records[n]), self._payloads[n]) for n in numbers)

    def prune(self, step: int) -> None:
        """Delete the payload of the steps up to `step`."""
        for done in range(self._pruned + 1, step + 1):
            for ordinal in self._sealed.get(done, ()):
                for book in (self._generated, self._taught):
                    if f"t{ordinal}" in book:
                        self._payloads[book[f"t{ordinal}"]] = ()
        self._pruned = max(self._pruned, step)

    def _commit(self) -> None:
        self._committing = len(self._records)
        # Now and then a disk takes a hundred times as long.
        seconds = self._fsync_s * (0.5 + self._rng.random()) * (100 if self._rng.random() < 0.01 else 1)
        self._clock.after(seconds, self._synced, self._life)

    def _synced(self, life: int) -> None:
        if life != self._life or self._committing is None:
            return
        self.num_durable, self._committing = self._committing, None
        if self.num_durable < len(self._records):
            self._commit()
        self._committed()

    def _index(self) -> None:
        """Find out which records make up which step."""
        self._generated: dict[str, int] = {}
        self._taught: dict[str, int] = {}
        self._scored: dict[str, int] = {}
        self._sealed: dict[int, tuple[int, ...]] = {}
        self._done: set[int] = set()
        for number, encoded in enumerate(self._records):
            self._note(number, _decoder.decode(encoded))

    def _note(self, number: int, record: Record) -> None:
        match record:
            case CompletionsStored(key=key):
                self._generated[key] = number
            case TeacherLogprobsStored(key=key):
                self._taught[key] = number
            case RewardsStored(key=key):
                self._scored[key] = number
            case StepFrozen(step=step, ordinals=ordinals):
                self._sealed[step] = ordinals
            case StepCommitted(step=step):
                self._done.add(step)
