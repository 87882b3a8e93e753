"""Simulated network between the controller and its replicas: it delays, loses, duplicates and reorders messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from starling.sim.environment.clock import SimulatedClock
from starling.sim.scenario.faults import Faults

MAX_DELAY_S = 0.01
"""Longest delay of a message when nothing is wrong."""

Delivery = Callable[..., None]


class SimulatedNetwork:
    """Connections between the controller and each replica, each in two directions that keep their order."""

    def __init__(self, clock: SimulatedClock, rng: random.Random, faults: Faults) -> None:
        self._clock, self._rng, self._faults = clock, rng, faults
        self._last_arrival: dict[tuple[bool, str], float] = {}
        self.partitioned: dict[str, int] = {}
        """The replicas that are cut off from the controller, each with the number of partitions it is in."""
        self._delayed: dict[str, list[tuple[bool, Delivery, tuple[Any, ...]]]] = {}
        """By replica, the messages that are delivered after its partition; without an entry they are lost."""
        self._num_losses = 0
        """How often every message in transit was lost."""
        self.num_messages = 0

    def partition(self, peers: list[str], *, late: bool = False) -> None:
        """Cut replicas off; with `late`, messages of either side arrive after the partition instead of being lost."""
        for peer in peers:
            self.partitioned[peer] = self.partitioned.get(peer, 0) + 1
            if late:
                self._delayed.setdefault(peer, [])

    def heal(self, peers: list[str]) -> None:
        """End a partition."""
        for peer in peers:
            self.partitioned[peer] -= 1
            if not self.partitioned[peer]:
                del self.partitioned[peer]
                for up, deliver, arguments in self._delayed.pop(peer, ()):
                    self._deliver_later(peer, up, deliver, arguments)

    def lose_all(self) -> None:
        """Lose every message in transit, as when the power of all machines fails."""
        self._num_losses += 1
        self._delayed = {peer: [] for peer in self._delayed}

    def send(self, peer: str, up: bool, deliver: Delivery, *arguments: Any) -> None:
        """Call `deliver` when a message has crossed the connection of `peer`, to the controller (`up`) or from it."""
        faults, rng = self._faults, self._rng
        if peer in self.partitioned:
            self._hold(peer, up, deliver, arguments)
            return
        if faults.loss and rng.random() < faults.loss:
            return
        self.num_messages += 1
        for _ in range(1 + (faults.duplicates > 0 and rng.random() < faults.duplicates)):
            self._deliver_later(peer, up, deliver, arguments)

    def _delay(self, peer: str, up: bool) -> float:
        """Return the delay of a message. Without `Faults.reorder` no message overtakes another."""
        if self._faults.reorder:
            return self._rng.choice((0.01, 0.1, 0.5, 2.0)) * self._rng.random()
        now = self._clock.now
        at = max(now + MAX_DELAY_S * self._rng.random(), self._last_arrival.get((up, peer), 0.0))
        self._last_arrival[up, peer] = at
        return at - now

    def _deliver_later(self, peer: str, up: bool, deliver: Delivery, arguments: tuple[Any, ...]) -> None:
        self._clock.after(self._delay(peer, up), self._arrive, self._num_losses, peer, up, deliver, arguments)

    def _arrive(self, sent_after: int, peer: str, up: bool, deliver: Delivery, arguments: tuple[Any, ...]) -> None:
        if sent_after != self._num_losses:
            return
        if peer in self.partitioned:
            self._hold(peer, up, deliver, arguments)
        else:
            deliver(*arguments)

    def _hold(self, peer: str, up: bool, deliver: Delivery, arguments: tuple[Any, ...]) -> None:
        delayed = self._delayed.get(peer)
        if delayed is not None:
            delayed.append((up, deliver, arguments))
