"""Files as a power cut may leave them: cut off anywhere, or with zeros or garbage from some byte on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

EVERY = 64 << 10
"""Up to this byte a campaign cuts everywhere; beyond, and without a campaign, at seeded places."""
TAIL = 4096
"""Bytes behind the end that a file system may have reserved."""


NAMES = ("cut at", "zeros from", "garbage from")


def positions(size: int, num: int, seed: str, *, every: bool) -> list[int]:
    """Return where to cut a file of `size` bytes: everywhere up to `EVERY`, or at `num` places; always at both ends."""
    rng = random.Random(f"{seed} {size}")
    everywhere = range(min(size, EVERY)) if every or size <= num else ()
    beyond = range(EVERY, size) if everywhere else range(size)
    drawn = rng.sample(beyond, min(num, len(beyond)))
    return sorted({0, min(1, size), size, max(0, size - 1), *everywhere, *drawn})


def damaged(content: bytes, position: int, seed: str, *, every: bool) -> Iterator[tuple[str, bytes]]:
    """Yield, with a name, what may be left of `content` when everything from `position` on was not yet on disk.

    Where every byte is a position, each has one kind of tail, in turn.
    """
    num_lost = len(content) - position or TAIL
    for number in (position % len(NAMES),) if every else range(len(NAMES)):
        yield f"{NAMES[number]} {position}", content[:position] + _tail(number, num_lost, position, seed)


def _tail(number: int, size: int, position: int, seed: str) -> bytes:
    """Return nothing, zeros, or garbage that differs from position to position."""
    if number == 0:
        return b""
    if number == 1:
        return bytes(size)
    begin = position * 31 % TAIL
    return _garbage(seed, 1 << (size + TAIL).bit_length())[begin : begin + size]


@cache
def _garbage(seed: str, size: int) -> bytes:
    return random.Random(f"{seed} {size}").randbytes(size)
