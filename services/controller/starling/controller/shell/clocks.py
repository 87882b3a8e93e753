"""Clocks of the replicas' machines, compared with that of the controller.

A replica says in each `Hello` what time it is. A `Hello` may have waited, which makes its sender's clock seem to be
behind, never ahead; and the sender repeats it until it is welcomed. So the greatest difference of an incarnation is the
nearest to the truth, and it is reported once no further `Hello` follows. Nothing in a run depends on these clocks but
the times in logs and metrics, the order of a replica's incarnations, and what others check, such as object stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from starling.common.wire.messages import Hello

MAX_SKEW_S: Final = 30.0
"""Difference from which on a clock is wrong: NTP keeps it below a tenth of a second, and a `Hello` waits seldom so
long."""
SETTLED_S: Final = 2.0
"""Time after the last `Hello` of a replica, which repeats it twice a second, when its difference is reported."""


@dataclass
class _Clock:
    incarnation: int
    ahead_s: float
    """By how much it is ahead of the controller's; negative for one that is behind."""
    heard_at: float
    is_reported: bool = False


class ReplicaClocks:
    """The clocks of all replicas that have said `Hello`."""

    def __init__(self) -> None:
        self._clocks: dict[str, _Clock] = {}

    def note(self, name: str, incarnation: int, hello: Hello, now: float, wall_s: float) -> None:
        """Take note of a `Hello` that arrived at the time `now`, when the controller's clock said `wall_s`."""
        ahead_s = hello.clock_s - wall_s
        if hello.clock_s <= 0 or not math.isfinite(ahead_s):
            return
        known = self._clocks.get(name)
        if known is None or known.incarnation != incarnation:
            self._clocks[name] = _Clock(incarnation, ahead_s, now)
        else:
            known.ahead_s, known.heard_at = max(known.ahead_s, ahead_s), now

    def new_faults(self, now: float, members: Collection[str]) -> list[tuple[str, float]]:
        """Return the members whose clocks have turned out to be wrong, with the seconds that they are ahead; once each.

        Replicas that have left are forgotten.
        """
        found = []
        for name, clock in list(self._clocks.items()):
            if now - clock.heard_at < SETTLED_S:
                continue
            if name not in members:
                del self._clocks[name]
            elif abs(clock.ahead_s) > MAX_SKEW_S and not clock.is_reported:
                clock.is_reported = True
                found.append((name, clock.ahead_s))
        return found

    def faults(self) -> tuple[str, ...]:
        """Return in words all clocks that were reported."""
        wrong = sorted((name, clock.ahead_s) for name, clock in self._clocks.items() if clock.is_reported)
        return tuple(skew_text(name, ahead_s) for name, ahead_s in wrong)


def skew_text(name: str, ahead_s: float) -> str:
    """Return in words that a clock is wrong."""
    where = "ahead of" if ahead_s > 0 else "behind"
    return f"the clock of {name} is {abs(ahead_s):.0f} s {where} the controller's; set both by NTP"
