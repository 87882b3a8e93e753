"""Allowances of peers: how much of something each may cause, at once and over time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

MAX_NAMES: Final = 10_000
"""Peers whose allowances are remembered. Without CURVE a peer may have any name."""


@dataclass(slots=True)
class Allowances:
    """A token bucket for each name, full at first.

    Args:
        burst: what a peer may cause at once.
        per_s: and after that each second.
    """

    burst: float
    per_s: float
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """By name: what is left, and when that was."""

    def take(self, name: str, amount: float, now: float) -> bool:
        """Use up `amount` of what `name` may still cause at `now`, in seconds. Returns False if it may not cause any.

        What is left may become negative: the last one counts as a whole, however large it is.
        """
        left, before = self._left.get(name, (self.burst, now))
        if now > before:
            left += (now - before) * self.per_s
            if left > self.burst:
                left = self.burst
        self._left[name] = (left - amount if left > 0 else left), now
        self._left.move_to_end(name)
        if len(self._left) > MAX_NAMES:
            self._left.popitem(last=False)
        return left > 0

    def charge(self, name: str, amount: float) -> None:
        """Use up `amount` more of what `name` may cause, whatever is left of it, after `take` allowed something."""
        left, before = self._left[name]
        self._left[name] = left - amount, before
