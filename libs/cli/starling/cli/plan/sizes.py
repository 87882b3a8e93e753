"""Sizes and times of a plan, in words."""

from __future__ import annotations

import math


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{math.floor(num_bytes)} B"
