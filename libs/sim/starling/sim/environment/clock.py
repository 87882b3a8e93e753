"""Simulated time: what is to happen, in order. Nothing waits; the time jumps to the next thing that is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class SimulatedClock:
    """A heap of actions. Actions of the same moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.num_done = 0
        """Actions so far."""
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_asked = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do `action` in `seconds`."""
        self._num_asked += 1
        heapq.heappush(self._due, (self.now + seconds, self._num_asked, action, arguments))

    def advance(self) -> None:
        """Go to the next action and do it. There always is one: the controller ticks."""
        self.now, _, action, arguments = heapq.heappop(self._due)
        self.num_done += 1
        action(*arguments)
