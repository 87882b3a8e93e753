"""Kinds of workers of a pool while it runs: the calls that wait for each, and how its starts have gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from starling.common.sandbox.output import OutputAllowance
from starling.reward.score.pool.call import Call
from starling.reward.score.workers.keeper import WorkerKeeper
from starling.reward.score.workers.kinds import WorkerKind
from starling.reward.score.workers.protocol import PROBLEM_CHARS

_MOST_FAILED_STARTS: Final = 3
"""In a row; then the kind is given up."""
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0
_OFTEN: Final = 3
_OFTEN_S: Final = 60.0
_NICE: Final = 10
"""Where so many workers of a kind were replaced within so many seconds, further ones have a lower priority: what loops
or ends again and again would have most of the processors, and the requests of other scorers would wait."""


@dataclass(slots=True, eq=False)
class KindState:
    """Workers that are alike, and the calls that wait for them."""

    workers: WorkerKind
    allowance: OutputAllowance = field(default_factory=OutputAllowance)
    """How much of what they print is logged, of all together."""
    keeper: WorkerKeeper = field(default_factory=WorkerKeeper)
    """Starts and ends them."""
    num_starting: int = 0
    """Workers that the keeper is to start."""
    queue: deque[Call] = field(default_factory=deque)
    num_failed_starts: int = 0
    """In a row."""
    start_at: float = 0.0
    """When the next worker may be started, in monotonic seconds."""
    replaced_at: deque[float] = field(default_factory=lambda: deque(maxlen=_OFTEN))
    """When workers were last replaced, in monotonic seconds."""
    problem: str = ""
    """Why no worker can be started; its scorer is quarantined then."""

    @property
    def num_wanted(self) -> int:
        """Number of workers that it should have."""
        return min(1, self.workers.num_workers) if self.problem else self.workers.num_workers

    @property
    def is_needed(self) -> bool:
        """Whether it has scorers that can be used."""
        return bool(self.workers.scorers) and not self.problem

    @property
    def quarantine(self) -> str:
        """Why its scorer scores nothing, as the end of a sentence."""
        return f"is quarantined, since no worker of it can be started: {self.problem}"[:PROBLEM_CHARS]

    def nice(self, now: float) -> int:
        """Return how much lower than that of the service the priority of its next worker is."""
        is_often = len(self.replaced_at) == _OFTEN and now - self.replaced_at[0] < _OFTEN_S
        return _NICE if is_often else 0

    def record_failed_start(self, now: float) -> bool:
        """Let the next start wait for longer than the last one; returns whether too many have failed in a row."""
        self.num_failed_starts += 1
        self.start_at = now + min(_RETRY_S * 2**self.num_failed_starts, _LONGEST_RETRY_S)
        return self.num_failed_starts >= _MOST_FAILED_STARTS


class KindTable:
    """The kinds of workers of a pool, and to which of them each scorer belongs.

    Raises:
        OSError: no thread can be started for a kind.
    """

    def __init__(self, kinds: Iterable[WorkerKind]) -> None:
        self._kinds = [KindState(kind) for kind in kinds]
        self._kind_of = {spec.index: kind for kind in self._kinds for spec in kind.workers.scorers}

    def __iter__(self) -> Iterator[KindState]:
        return iter(self._kinds)

    def of(self, scorer: int) -> KindState:
        """Return the kind of workers that a scorer has now."""
        return self._kind_of[scorer]

    def split(self, kind: KindState) -> None:
        """Give each scorer of a kind workers of its own; the kind itself stays, without scorers and workers."""
        for spec in kind.workers.scorers:
            own = KindState(replace(kind.workers, scorers=(spec,)))
            self._kinds.append(own)
            self._kind_of[spec.index] = own
        kind.workers = replace(kind.workers, scorers=(), num_workers=0)
