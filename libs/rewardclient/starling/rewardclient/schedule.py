"""When a request is sent again, and how long each try may take. Pure: times and random numbers are arguments.

Two kinds of repetition, which must not be confused. A *retry* repeats a request that failed on its way: a few times,
with growing, jittered delays. A *poll* asks whether a result is there: any number of times, until the deadline of the
sample. A refusal for lack of room (429 with `Retry-After`) is neither: the service is well, and says when to come back,
so the request is repeated until the deadline, and counts against no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final

from starling.common.errors import ConfigError

MAX_RETRY_AFTER_S: Final = 86_400.0
MB: Final = 1 << 20
ANSWER_S: Final = 0.25
"""Before the deadline a service that waits has to say that there is no result."""
MAX_STEPS: Final = 100
"""Beyond so many steps delays do not grow; each has reached its maximum, and a float its limit."""


class Verdict(Enum):
    """What follows from the status of a reply."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    """The service or something before it failed: a retry."""
    BUSY = "busy"
    """There is no room now."""
    FINAL = "final"
    """Refused for good."""


def judge(status: int, *, retry_after_s: float | None, accepted: frozenset[int]) -> Verdict:
    """Return what follows from the `status` of a reply, of which those in `accepted` are expected."""
    if status in accepted:
        return Verdict.ACCEPTED
    if status >= 500:
        return Verdict.RETRY
    if status == 429 and retry_after_s is not None:
        return Verdict.BUSY
    return Verdict.FINAL


def retry_after_s(value: str | None, wall_s: float) -> float | None:
    """Return the delay that a `Retry-After` header asks for, in seconds; None without one that can be understood.

    Args:
        value: the header: seconds, or a date.
        wall_s: the present time, seconds since 1970.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), MAX_RETRY_AFTER_S)
    try:
        delay_s = parsedate_to_datetime(text).timestamp() - wall_s
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        return None
    return min(max(0.0, delay_s), MAX_RETRY_AFTER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Retries of a request that failed on its way.

    The delay before a retry is between the half and the whole of `first_s`, which doubles each time up to `max_s`:
    clients that failed together do not come back together.
    """

    max_retries: int = 4
    first_s: float = 0.5
    max_s: float = 15.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_retries <= 1000:
            raise ConfigError(f"max_retries is {self.max_retries}; give a number from 0 to 1000")
        check_seconds("first_s", self.first_s)
        check_seconds("max_s", self.max_s)

    def backoff_s(self, num_before: int, uniform: float) -> float:
        """Return the delay after `num_before` delays in a row, given a random number from 0 to 1."""
        return min(self.max_s, self.first_s * 2.0 ** min(num_before, MAX_STEPS)) * (0.5 + 0.5 * uniform)


class RetryState:
    """The tries of one request.

    Args:
        retries: the limits.
    """

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self.num_failed = 0
        """Tries that failed on their way."""
        self._num_delays = 0

    def delay_s(self, verdict: Verdict, retry_after_s: float | None, uniform: float) -> float | None:
        """Return how long to wait before the next try, in seconds; None if there is none.

        Args:
            verdict: RETRY or BUSY.
            retry_after_s: what the service asked for, if anything; the delay is longer, since all who were refused
                were told the same.
            uniform: random number from 0 to 1.
        """
        if verdict is Verdict.RETRY:
            self.num_failed += 1
            if self.num_failed > self._retries.max_retries:
                return None
        backoff_s = self._retries.backoff_s(self._num_delays, uniform)
        self._num_delays += 1
        return (retry_after_s or 0.0) + backoff_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of one try, in seconds."""

    connect_s: float = 100.0
    """Of a connection."""
    base_s: float = 30.0
    per_mb_s: float = 3.0
    """The samples of a request may take `base_s` and `per_mb_s` for each MiB, within `min_s` and `max_s`."""
    min_s: float = 60.0
    max_s: float = 600.0
    fixed_s: float | None = None
    """Instead of these four."""
    poll_s: float = 10.0
    """Of asking for a result, besides the time that the service is asked to wait."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "min_s", "max_s", "poll_s"):
            check_seconds(name, getattr(self, name))
        for name in ("base_s", "per_mb_s"):
            check_seconds(name, getattr(self, name), least=0.0)
        if self.fixed_s is not None:
            check_seconds("fixed_s", self.fixed_s)
        if self.min_s > self.max_s:
            raise ConfigError(f"the least time limit min_s {self.min_s:g} is above max_s {self.max_s:g}; swap them")

    def enqueue_s(self, num_bytes: int) -> float:
        """Return how long the service may take to accept a body of `num_bytes`."""
        if self.fixed_s is not None:
            return self.fixed_s
        return min(max(self.base_s + self.per_mb_s * num_bytes / MB, self.min_s), self.max_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """How results are asked for.

    Where the service can wait (`/v1/rewards`), it is asked to, up to `wait_s`. Otherwise there is a pause between two
    questions, `first_s` at first and `growth` times as long each time up to `max_s`.
    """

    wait_s: float = 30.0
    first_s: float = 0.1
    growth: float = 1.5
    max_s: float = 2.0

    def __post_init__(self) -> None:
        check_seconds("wait_s", self.wait_s, least=0.0, most=60.0)
        check_seconds("first_s", self.first_s)
        check_seconds("max_s", self.max_s)
        if not 1.0 <= self.growth <= 100.0:
            raise ConfigError(f"growth is {self.growth:g}; give a factor from 1 to 100")

    def pause_s(self, num_before: int, uniform: float) -> float:
        """Return the pause after `num_before` pauses, given a random number from 0 to 1."""
        grown_s = self.first_s * self.growth ** min(num_before, MAX_STEPS)
        return min(self.max_s, grown_s) * (0.75 + 0.25 * uniform)

    def long_poll_s(self, num_waiting: int, num_slots: int, left_s: float) -> float:
        """Return how long the service is asked to wait for one result.

        Args:
            num_waiting: results that are waited for.
            num_slots: how many can be asked for at a time: with more than that, each has to wait for its turn.
            left_s: until the deadline, in seconds.
        """
        share = min(1.0, num_slots / max(1, num_waiting))
        return max(0.0, min(self.wait_s * share, left_s - ANSWER_S))


def check_seconds(name: str, value: float, *, least: float = 0.001, most: float = 1e6) -> None:
    """Raise ConfigError unless `value` is a number of seconds from `least` to `most`."""
    if not (isinstance(value, int | float) and least <= value <= most):
        raise ConfigError(f"{name} is {value!r}; give seconds from {least:g} to {most:g}")
