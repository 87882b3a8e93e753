"""The number of an incarnation."""

from __future__ import annotations

import time


def make_epoch() -> int:
    """Return milliseconds since 1970: greater than the epoch of any earlier start under a sane clock."""
    return time.time_ns() // 1_000_000
