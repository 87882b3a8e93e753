"""Hedged requests: a second request for the same samples when the first one is slower than most. Pure.

The delay is a quantile of the times of recent requests, so that about `1 - quantile` of all requests are sent twice
while the service is as fast as before. When it slows down altogether, all requests exceed the old quantile. `max_share`
bounds how many are then sent twice, so that hedging cannot double the load of a service that is overloaded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from starling.common.errors import ConfigError
from starling.rewardclient.schedule import check_seconds

MAX_TOKENS: Final = 10.0
"""Second requests that may be sent at once after a time without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedging:
    """When a second request is sent."""

    quantile: float = 0.95
    """Of the times of recent requests: the first request gets so much time before the second one is sent."""
    min_delay_s: float = 0.05
    """The least delay."""
    min_observed: int = 20
    """Requests whose times must be known; before that, there is no second one."""
    window: int = 256
    """Requests whose times are remembered."""
    max_share: float = 0.1
    """Second requests per request, in the long run."""

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise ConfigError(f"quantile is {self.quantile:g}; give a number between 0 and 1, such as 0.95")
        if not 1 <= self.min_observed <= self.window <= 100_000:
            raise ConfigError(
                f"min_observed is {self.min_observed} and window {self.window}; give numbers from 1 to 100000, the "
                "window not below the other"
            )
        if not 0.0 < self.max_share <= 1.0:
            raise ConfigError(f"max_share is {self.max_share:g}; give a share above 0 and up to 1")
        check_seconds("min_delay_s", self.min_delay_s, least=0.0)


class HedgeState:
    """Times of recent requests, and how many second ones may be sent.

    Args:
        hedging: the settings; None for no second requests.
    """

    def __init__(self, hedging: Hedging | None) -> None:
        self._hedging = hedging
        self._times_s: deque[float] = deque(maxlen=hedging.window if hedging else 1)
        self._tokens = 1.0

    def start(self) -> float | None:
        """Count a request; return after which time a second one may be sent, in seconds, None for never."""
        if self._hedging is None:
            return None
        self._tokens = min(MAX_TOKENS, self._tokens + self._hedging.max_share)
        if len(self._times_s) < self._hedging.min_observed:
            return None
        times_s = sorted(self._times_s)
        return max(self._hedging.min_delay_s, times_s[math.ceil(self._hedging.quantile * len(times_s)) - 1])

    def take(self) -> bool:
        """Return whether a second request may be sent now, and count it."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def observe(self, time_s: float) -> None:
        """Remember how long a request took, in seconds, from its start to the first answer."""
        self._times_s.append(time_s)


class Rotation:
    """Which replica of a service gets the next request: in turn, those that failed lately only where no other is left.

    Args:
        num: replicas.
        cooldown_s: how long one that failed is avoided.
    """

    def __init__(self, num: int, cooldown_s: float = 10.0) -> None:
        self._num, self._cooldown_s = num, cooldown_s
        self._next = 0
        self._failed_until = [-math.inf] * num

    def choose(self, now: float, avoid: int | None = None) -> int:
        """Return the index of a replica, at `now`, other than `avoid` if there are several."""
        turns = [(self._next + offset) % self._num for offset in range(self._num)]
        others = [index for index in turns if index != avoid] or turns
        well = (index for index in others if self._failed_until[index] <= now)
        chosen = next(well, None)
        if chosen is None:
            chosen = min(others, key=lambda index: self._failed_until[index])
        self._next = (chosen + 1) % self._num
        return chosen

    def report(self, index: int, now: float, *, has_failed: bool) -> None:
        """Remember whether a request to a replica failed on its way, at `now`."""
        self._failed_until[index] = now + self._cooldown_s if has_failed else -math.inf
