"""Tiles of a packed row: some of its queries and some of its keys, for ranks that hold a part of the row each.

A tile's attention consists of the parts of the forest (`starling.algo.attention.forest`), cut to it. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from starling.algo.attention.forest import Forest, Part, band, in_levels

Ranges = tuple[tuple[int, int], ...]
"""Tokens of a row as ranges [first, last), in the order in which they are stored."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of a row, which are stored without those of other tiles."""

    queries: Ranges
    keys: Ranges

    @classmethod
    def of_row(cls, num_tokens: int) -> Tile:
        """Return the tile that is the whole row."""
        return cls(((0, num_tokens),), ((0, num_tokens),))

    @property
    def num_queries(self) -> int:
        """Stored queries."""
        return sum(last - first for first, last in self.queries)

    @property
    def num_keys(self) -> int:
        """Stored keys."""
        return sum(last - first for first, last in self.keys)

    def query_place(self, token: int) -> int:
        """Return where a query of the row is stored."""
        return _place(self.queries, token)

    def key_place(self, token: int) -> int:
        """Return where a key of the row is stored."""
        return _place(self.keys, token)

    def holds(self, start: int, end: int) -> bool:
        """Return whether the tokens from `start` to `end` are stored one behind another, as queries and as keys."""
        return all(
            any(first <= start and end <= last for first, last in ranges) for ranges in (self.queries, self.keys)
        )


def _place(ranges: Ranges, token: int) -> int:
    before = 0
    for first, last in ranges:
        if first <= token < last:
            return before + token - first
        before += last - first
    raise ValueError(f"token {token} is not in the tile")


@lru_cache(maxsize=256)
def tile_levels(
    forest: Forest, tile: Tile, window: int | None = None, masked_tokens: int = 0
) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of a tile's attention in levels; those of a level have no query in common.

    Each part is within one range of queries and one of keys; a query of the tile may be in none.

    Args:
        forest: of the row.
        tile: of it.
        window: see `Forest.levels`.
        masked_tokens: see `Forest.levels`.
    """
    parts = [
        own
        for part in forest.parts(window, masked_tokens, may_mask=tile.holds)
        for queries, keys in product(tile.queries, tile.keys)
        for own in _cut(part, queries, keys)
    ]
    return in_levels(parts, forest.num_tokens)


def _cut(part: Part, queries: tuple[int, int], keys: tuple[int, int]) -> Iterator[Part]:
    """Yield what is of `part` in a range of queries and one of keys."""
    size = part.num_queries
    first, last = max(queries[0] - part.query, 0), min(queries[1] - part.query, size)
    key_first, key_last = max(keys[0] - part.key, 0), min(keys[1] - part.key, part.num_keys)
    if first >= last or key_first >= key_last:
        return
    if part.mode in ("full", "masked"):  # The tile holds the whole of what has a mask.
        yield Part(part.query + first, last - first, part.key + key_first, key_last - key_first, part.mode)
        return
    if part.mode == "reversed":  # It is causal counted from the end.
        first, last, key_first, key_last = size - last, size - first, size - key_last, size - key_first
    for start, stop, key_start, key_stop, mode in band((first, last), (key_first, key_last), size):
        own, own_key = start, key_start
        if part.mode == "reversed":
            own, own_key = size - stop, size - key_stop
            mode = "reversed" if mode == "causal" else mode
        yield Part(part.query + own, stop - start, part.key + own_key, key_stop - key_start, mode)
