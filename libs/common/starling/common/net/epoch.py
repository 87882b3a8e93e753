"""The number of an incarnation."""

from __future__ import annotations

import time


def make_epoch() -> int:
    """Return milliseconds since 1970: greater than the epoch of any earlier start, if nobody set the clock back.

    If somebody did, the new incarnation is heard as soon as the earlier one is known to be gone.
    """
    return time.time_ns() // 1_000_000
