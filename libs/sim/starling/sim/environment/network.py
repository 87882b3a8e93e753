"""The network between the controller and its replicas: it delays, loses, doubles, reorders, and parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from starling.sim.environment.clock import SimulatedClock
from starling.sim.scenario.faults import Faults

DELAY_S = 0.01
"""Most seconds that a message takes where nothing is wrong."""


class SimulatedNetwork:
    """Carries messages over lines, each one way between the controller and one replica."""

    def __init__(self, clock: SimulatedClock, rng: random.Random, faults: Faults) -> None:
        self._clock, self._rng, self._faults = clock, rng, faults
        self._last: dict[tuple[bool, str], float] = {}
        self.parted: dict[str, int] = {}
        """The replicas that the controller does not hear, nor they it: by how many partitions."""
        self._held_up: dict[str, list[tuple[bool, Callable[..., None], tuple[Any, ...]]]] = {}
        """What the lines of parted replicas keep until these are heard again; of others what is said is lost."""
        self.num_messages = 0

    def part(self, peers: list[str], *, late: bool = False) -> None:
        """Cut these replicas off; `late`: what they and the controller say to each other comes in the end."""
        for peer in peers:
            self.parted[peer] = self.parted.get(peer, 0) + 1
            if late:
                self._held_up.setdefault(peer, [])

    def heal(self, peers: list[str]) -> None:
        """End a partition."""
        for peer in peers:
            self.parted[peer] -= 1
            if not self.parted[peer]:
                del self.parted[peer]
                for up, arrive, arguments in self._held_up.pop(peer, ()):
                    self._clock.after(self._delay(peer, up), self._arrive, peer, up, arrive, arguments)

    def carry(self, peer: str, up: bool, arrive: Callable[..., None], *arguments: Any) -> None:
        """Call `arrive` when a message has come over the line of `peer`: to the controller, if `up`, or from it."""
        faults, rng = self._faults, self._rng
        if peer in self.parted:
            self._hold_up(peer, up, arrive, arguments)
            return
        if faults.loss and rng.random() < faults.loss:
            return
        self.num_messages += 1
        for _ in range(1 + (faults.duplicates > 0 and rng.random() < faults.duplicates)):
            self._clock.after(self._delay(peer, up), self._arrive, peer, up, arrive, arguments)

    def _delay(self, peer: str, up: bool) -> float:
        """Return how long a message takes; unless they are reordered, it overtakes none on its line."""
        if self._faults.reorder:
            return self._rng.choice((0.01, 0.1, 0.5, 2.0)) * self._rng.random()
        now = self._clock.now
        at = max(now + DELAY_S * self._rng.random(), self._last.get((up, peer), 0.0))
        self._last[up, peer] = at
        return at - now

    def _arrive(self, peer: str, up: bool, arrive: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if peer in self.parted:
            self._hold_up(peer, up, arrive, arguments)
        else:
            arrive(*arguments)

    def _hold_up(self, peer: str, up: bool, arrive: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        held_up = self._held_up.get(peer)
        if held_up is not None:
            held_up.append((up, arrive, arguments))
