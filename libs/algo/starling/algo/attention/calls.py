"""Kernel calls: the parts of a forest's attention, batched where many of them are small.

A large part is a call of its own and reads slices of the row in place. Small parts of about one size are padded into
one batched call, because a call costs more than their arithmetic: their tokens are gathered, and a query that is
padding repeats the part's last one. Causal parts need no mask for that, since padding lies behind all keys that a query
sees; of a rectangle with fewer keys the others get a bias of minus infinity, one number per key. Subtrees of a few
tokens are squares with a mask, which take memory for the square of their own tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from starling.algo.attention.forest import Forest, Index, Part
from starling.algo.attention.tiles import Tile, tile_levels

MASKED_TOKENS: Final = 192
"""Tokens up to which a subtree is one square with a mask: one product of matrices instead of many tiny ones."""
CALL_PAIRS: Final = 8192
"""Query-key pairs of padding, of one head, that cost about as much as one more call."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One batch of parts of equal size, B parts of `num_queries` x `num_keys`."""

    causal: bool
    num_parts: int
    num_queries: int
    num_keys: int
    query: int
    """First query token of a single part that is read in place."""
    key: int
    queries: Tensor | None
    """int64 [B * num_queries]: the query tokens, padding included; None where a single part is read in place."""
    keys: Tensor | None
    """int64 [B * num_keys], likewise."""
    targets: Tensor | None
    """int64 [B * num_queries]: `queries` with the row's length in place of padding."""
    padding: Tensor | None
    """int64: which of the queries are padding; None where there is none."""
    hidden: Tensor | None
    """bool [B, 1, num_queries or 1, num_keys]: keys that a query does not see; None where it sees all."""
    biases: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores: 0, or minus infinity where `hidden`; None for nothing."""
        if self.hidden is None:
            return None
        if dtype not in self.biases:
            zeros = torch.zeros_like(self.hidden, dtype=dtype)
            self.biases[dtype] = zeros.masked_fill_(self.hidden, -torch.inf)
        return self.biases[dtype]


@lru_cache(maxsize=64)
def kernel_calls(
    forest: Forest, window: int | None, device: torch.device, *, with_bias: bool, tile: Tile | None = None
) -> tuple[tuple[KernelCall, ...], ...]:
    """Return the calls of each level of the attention of `forest`; see `Forest.levels`.

    Args:
        forest: of the row.
        window: see `Forest.levels`.
        device: of the index tensors.
        with_bias: whether keys can be hidden: in squares with a mask, and to pad rectangles.
        tile: of the row; None for all of it.
    """
    masked_tokens = MASKED_TOKENS if with_bias else 0
    if tile is None:
        levels, tile = forest.levels(window, masked_tokens), Tile.of_row(forest.num_tokens)
    else:
        levels = tile_levels(forest, tile, window, masked_tokens)
    return tuple(
        tuple(_call(parts, forest, tile, window, device) for parts in _batches(level, pad_keys=with_bias))
        for level in levels
    )


def _batches(level: Sequence[Part], *, pad_keys: bool) -> Iterator[list[Part]]:
    """Divide the parts of a level into batches, each led by its largest part."""
    for mode in ("causal", "full", "reversed", "masked"):
        batch: list[Part] = []
        waste = 0
        parts = [part for part in level if part.mode == mode]
        for part in sorted(parts, key=lambda part: (-part.num_keys, -part.num_queries, part.query)):
            if batch:
                most = max(batch[0].num_queries, part.num_queries)
                grown = (most - batch[0].num_queries) * batch[0].num_keys * len(batch)
                waste += grown + most * batch[0].num_keys - part.num_queries * part.num_keys
                fits = (
                    part.num_keys == batch[0].num_keys or (pad_keys and mode == "full") or mode in ("causal", "masked")
                )
                if not fits or waste > CALL_PAIRS or _is_large(part):
                    yield batch
                    batch, waste = [], 0
                elif grown:
                    batch.insert(0, part)
                    continue
            batch.append(part)
        if batch:
            yield batch


def _is_large(part: Part) -> bool:
    return part.num_queries * part.num_keys > 16 * CALL_PAIRS


def _call(parts: Sequence[Part], forest: Forest, tile: Tile, window: int | None, device: torch.device) -> KernelCall:
    first = parts[0]
    query, key = tile.query_place(first.query), tile.key_place(first.key)
    num_queries = max(part.num_queries for part in parts)
    num_keys = max(part.num_keys for part in parts)
    causal = first.mode in ("causal", "reversed")
    if len(parts) == 1 and first.mode in ("causal", "full"):
        return KernelCall(causal, 1, num_queries, num_keys, query, key, None, None, None, None, None)
    places = [(tile.query_place(part.query), part.num_queries) for part in parts]
    queries, no_queries = _gathered(places, num_queries)
    keys, no_keys = _gathered([(tile.key_place(part.key), part.num_keys) for part in parts], num_keys)
    if first.mode == "reversed":  # of both, so that a query sees the keys up to its own offset
        queries, keys = queries[:, ::-1], keys[:, ::-1]
    targets = np.where(no_queries, tile.num_queries, queries) if first.mode != "reversed" else queries

    def on_device(array: Index) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    hidden = no_keys[:, None, None, :] if not causal and no_keys.any() else None
    if first.mode == "masked":
        hidden = np.ones((len(parts), 1, num_queries, num_keys), dtype=np.bool_)
        for number, part in enumerate(parts):
            size = part.num_keys
            hidden[number, 0, :size, :size] = ~forest.visible(part.key, part.key + size, window)
            hidden[number, 0, size:] = hidden[number, 0, size - 1]
    return KernelCall(
        causal,
        len(parts),
        num_queries,
        num_keys,
        0,
        0,
        on_device(queries.ravel()),
        on_device(keys.ravel()),
        on_device(targets.ravel()),
        on_device(np.flatnonzero(no_queries)) if no_queries.any() else None,
        None if hidden is None else torch.from_numpy(hidden).to(device),
    )


def _gathered(
    ranges: Sequence[tuple[int, int]], width: int
) -> tuple[Index, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Return the tokens of each range, [B, width], the last one repeated, and which of them are repetitions."""
    starts, lengths = np.array(ranges, dtype=np.int64).T[:, :, None]
    offsets = np.arange(width, dtype=np.int64)[None]
    return starts + np.minimum(offsets, lengths - 1), offsets >= lengths
