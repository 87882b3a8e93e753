"""How long a piece of work may still take, and whether it is wanted at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from starling.common.errors import WeightsError

LONGEST_WAIT_S: Final = 0.05
"""Longest uninterrupted wait, so that a cancellation is noticed."""


def never() -> bool:
    """Nobody cancels."""
    return False


class Deadline:
    """A moment by which work must be done, and a question that may end it earlier."""

    def __init__(self, seconds: float, cancelled: Callable[[], bool] = never) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._cancelled = cancelled

    def check(self, doing: str) -> float:
        """Return how long to wait at most before the next check, in seconds.

        Raises:
            WeightsError: the time is over, or the work was cancelled; `doing` says what was under way.
        """
        if self._cancelled():
            raise WeightsError(f"Cancelled while {doing}.")
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightsError(f"The deadline of {self._seconds:g} s passed while {doing}.")
        return min(left, LONGEST_WAIT_S)
