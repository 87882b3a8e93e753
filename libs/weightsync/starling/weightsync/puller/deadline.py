"""The deadline of a pull, and its cancellation."""

from __future__ import annotations

import time
from collections.abc import Callable

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import LONGEST_WAIT_S


def never() -> bool:
    """Return False: the default for pulls that cannot be cancelled."""
    return False


class Deadline:
    """A point in time by which work must be done, and a callback that may cancel it earlier."""

    def __init__(self, seconds: float, cancelled: Callable[[], bool] = never) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._cancelled = cancelled

    def check(self, doing: str) -> float:
        """Return the longest wait before the next check, in seconds.

        Raises:
            WeightsError: the deadline has passed, or the work was cancelled; `doing` names the work.
        """
        if self._cancelled():
            raise WeightsError(f"Cancelled while {doing}.")
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightsError(f"The deadline of {self._seconds:g} s passed while {doing}.")
        return min(left, LONGEST_WAIT_S)
