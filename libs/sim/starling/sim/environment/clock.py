"""Simulated time: a queue of scheduled actions. Nothing waits; the time jumps to the next action."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class SimulatedClock:
    """Scheduled actions by time. Actions of the same moment happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.num_done = 0
        """Actions so far."""
        self._scheduled: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule `action` in `seconds`."""
        self._num_scheduled += 1
        heapq.heappush(self._scheduled, (self.now + seconds, self._num_scheduled, action, arguments))

    def advance(self) -> None:
        """Jump to the next action and perform it. There always is one, because the controller ticks."""
        self.now, _, action, arguments = heapq.heappop(self._scheduled)
        self.num_done += 1
        action(*arguments)
