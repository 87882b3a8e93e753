"""One running worker: the calls that were sent to it, and since when it makes the first of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starling.reward.score.pool.call import Call
from starling.reward.score.pool.chunks import CHUNK_CALLS, CHUNK_S
from starling.reward.score.pool.kinds import KindState
from starling.reward.score.workers.process import WorkerProcess

_SETTLED_S: Final = 10.0
"""A worker that ends sooner after its start, without having made a call, could not be started."""


class TimeLimits(NamedTuple):
    """After how many seconds a worker is killed."""

    start_s: float
    """Of its start and its imports."""
    calls_s: tuple[float, ...]
    """Of a call of each scorer."""


class SentCall(NamedTuple):
    """A call that a worker has been sent."""

    call: Call
    serial: int
    """Number of the call in the messages of its worker."""
    expected_s: float
    """How long it probably takes, in seconds."""
    sent_at: float
    """Monotonic seconds, as all times here."""


@dataclass(slots=True, eq=False)
class RunningWorker:
    """A worker that has been started. Calls are made in the order in which they were sent."""

    process: WorkerProcess
    kind: KindState
    started_at: float
    ready_at: float | None = None
    """When it had loaded its scorers."""
    has_scored: bool = False
    """Whether it has reported a call."""
    next_serial: int = 0
    calls: deque[SentCall] = field(default_factory=deque)
    """Sent and not reported; the first is the current call."""
    free_at: float = 0.0
    """When it finished the last call that it has reported."""
    expected_s: float = 0.0
    """Expected seconds of `calls`."""
    is_writing: bool = False
    """Whether a message waits for space in the socket's buffer."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent calls."""
        return self.ready_at is not None

    @property
    def has_room(self) -> bool:
        """Whether it may be sent another chunk."""
        return self.expected_s < CHUNK_S and len(self.calls) <= CHUNK_CALLS

    @property
    def begun_at(self) -> float:
        """When it began the current call."""
        return max(self.free_at, self.calls[0].sent_at)

    def has_settled(self, now: float) -> bool:
        """Whether it has run long enough to say that its kind can be started."""
        return self.has_scored or (self.ready_at is not None and now - self.ready_at >= _SETTLED_S)

    def deadline(self, limits: TimeLimits) -> float | None:
        """Return when it is to be killed; None while it is idle."""
        if not self.is_ready:
            return self.started_at + limits.start_s
        if not self.calls:
            return None
        return self.begun_at + limits.calls_s[self.calls[0].call.scorer]

    def add(self, call: Call, expected_s: float, now: float) -> None:
        """Note that a call is sent to it; its serial number is `next_serial`."""
        self.calls.append(SentCall(call, self.next_serial, expected_s, now))
        self.expected_s += expected_s
        self.next_serial += 1

    def finish(self, finished_at: float, now: float) -> tuple[Call, float]:
        """Note that it has reported its current call.

        Args:
            finished_at: when it says that the call was finished, which a scorer may have made up.
            now: when the report was read.

        Returns:
            The call, and its duration in seconds.
        """
        begun_at = self.begun_at
        call, _, expected_s, _ = self.calls.popleft()
        self.has_scored = True
        self.expected_s = self.expected_s - expected_s if self.calls else 0.0
        self.free_at = min(max(begun_at, finished_at), now)  # in this order, NaN is not taken
        return call, self.free_at - begun_at

    def take_calls(self) -> list[Call]:
        """Return its calls, and forget them."""
        calls = [sent.call for sent in self.calls]
        self.calls.clear()
        return calls
