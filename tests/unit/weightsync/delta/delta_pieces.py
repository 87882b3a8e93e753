"""Pieces for the tests of deltas: random bits, and ways to change some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from starling.weightsync.delta.format import BLOCK, CELL, ITEM_TYPES

Piece = npt.NDArray[np.unsignedinteger[Any]]

NUM_ELEMENTS = (1, 2, 255, 257, 4099, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + CELL + 3)
SHARES = (0.0, 0.0003, 0.003, 0.01, 0.05, 0.11, 0.3, 0.9)


def random_piece(rng: np.random.Generator, num_elements: int, item_bytes: int) -> Piece:
    """Return random bits: some are NaN, infinite or -0.0 when read as numbers."""
    return np.frombuffer(rng.bytes(num_elements * item_bytes), ITEM_TYPES[item_bytes]).copy()


def changed(rng: np.random.Generator, piece: Piece, share: float, run: int = 1) -> Piece:
    """Return a copy of which about this share differs, in runs of `run` elements."""
    new = piece.copy()
    starts = rng.random(-(-len(piece) // run)) < share
    where = np.flatnonzero(np.repeat(starts, run)[: len(piece)])
    # Any bit of an element may be the one that differs.
    bits = rng.integers(0, 8 * piece.itemsize, len(where)).astype(piece.dtype)
    new[where] ^= np.left_shift(piece.dtype.type(1), bits)
    return new


def patchwork(rng: np.random.Generator, item_bytes: int, shares: tuple[float, ...], tail: int) -> tuple[Piece, Piece]:
    """Return a piece and its successor of which each block changes by a share of its own; the last has `tail`."""
    base = random_piece(rng, BLOCK * len(shares) + tail, item_bytes)
    parts = np.split(base, np.arange(BLOCK, len(base), BLOCK))
    return base, np.concatenate([changed(rng, part, shares[i % len(shares)]) for i, part in enumerate(parts)])


def runs_at_block_ends(rng: np.random.Generator) -> tuple[Piece, Piece]:
    """Return a piece of 6 blocks and its successor, with runs of changes that end at or cross block ends."""
    base = random_piece(rng, 6 * BLOCK, 2)
    new = base.copy()
    new[BLOCK - 300 : BLOCK + 400] ^= 1
    new[2 * BLOCK - 300 : 3 * BLOCK] ^= 1
    # The place after the last of one block is the first of the next.
    new[3 * BLOCK + 100 : 3 * BLOCK + 400] ^= 1
    new[4 * BLOCK + 400 : 4 * BLOCK + 900] ^= 1
    new[5 * BLOCK :] ^= 1
    return base, new


@st.composite
def versions(draw: st.DrawFn, count: int = 2) -> list[Piece]:
    """So many versions of one piece, with few or many changes, alone or in runs, from one to the next."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    item_bytes = draw(st.sampled_from(tuple(ITEM_TYPES)))
    found = [random_piece(rng, draw(st.sampled_from(NUM_ELEMENTS)), item_bytes)]
    for _ in range(count - 1):
        found.append(changed(rng, found[-1], draw(st.sampled_from(SHARES)), draw(st.sampled_from((1, 1, 3, 700)))))
    return found
