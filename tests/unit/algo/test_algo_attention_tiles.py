"""Attention by tiles, as ranks compute it that hold a part of a row each: that of the whole row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_rows import dense, forests, inputs_of, plain, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend
from starling.algo.attention.merge import Merged, sink_gradient
from starling.algo.attention.tiled import TiledAttention
from starling.algo.attention.tiles import Ranges, Tile, tile_levels

torch.set_num_threads(1)

WINDOWS = st.none() | st.integers(1, 20)


def divided(num_tokens: int, num_ranks: int) -> list[Ranges]:
    """Return two pieces of a row for each rank, from either end, of about one size; of few tokens some are empty."""
    bounds = np.linspace(0, num_tokens, 2 * num_ranks + 1).astype(int).tolist()
    pieces = list(pairwise(bounds))
    return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]


def tokens_of(ranges: Ranges) -> Tensor:
    """Return the tokens of ranges in the order in which they are stored."""
    return torch.cat([torch.arange(first, last) for first, last in ranges])


@given(forests(), WINDOWS, st.sampled_from([0, 10, 1000]), st.integers(1, 3))
def test_tiles_cover_each_attended_pair_once(
    forest: Forest, window: int | None, masked_tokens: int, num_ranks: int
) -> None:
    """Whatever ranks hold the queries and the keys."""
    found = np.zeros((forest.num_tokens, forest.num_tokens), dtype=np.int64)
    ranks = divided(forest.num_tokens, num_ranks)
    for queries in ranks:
        for keys in ranks:
            tile = Tile(queries, keys)
            for level in tile_levels(forest, tile, window, masked_tokens):
                rows_of_level = np.zeros(forest.num_tokens, dtype=np.int64)
                for part in level:
                    rows, columns = np.arange(part.num_queries)[:, None], np.arange(part.num_keys)[None]
                    if part.mode == "masked":
                        seen = forest.visible(part.key, part.key + part.num_keys, window)
                    else:
                        seen = {"causal": columns <= rows, "full": columns >= 0, "reversed": columns >= rows}[part.mode]
                    found[part.query : part.query + part.num_queries, part.key : part.key + part.num_keys] += seen
                    rows_of_level[part.query : part.query + part.num_queries] += 1
                    for place, start, count in (
                        (tile.query_place, part.query, part.num_queries),
                        (tile.key_place, part.key, part.num_keys),
                    ):
                        assert place(start + count - 1) == place(start) + count - 1, "stored one behind another"
                assert (rows_of_level <= 1).all()
    assert (found == dense(forest, window)).all()


def check(
    forest: Forest,
    window: int | None,
    heads: tuple[int, int],
    num_ranks: int,
    softcap: float | None = None,
    backend: Backend = "segments",
) -> None:
    """Compute all tiles of a row, forward and backward, and compare with a dense mask. There are sinks."""
    inputs = inputs_of(forest, heads, 8, torch.float64)
    sinks = torch.linspace(-2.0, 3.0, heads[0], dtype=torch.float64, requires_grad=True)
    row = TiledAttention(forest, 0.3, window, softcap, backend)
    expected = results(plain(inputs, dense(forest, window), 0.3, softcap, sinks), [*inputs, sinks])
    weights = torch.linspace(-1.0, 1.0, expected[0].numel(), dtype=torch.float64).view_as(expected[0])
    query, key, value = (one.detach() for one in inputs)
    ranks = divided(forest.num_tokens, num_ranks)
    found = [torch.zeros_like(one) for one in expected]
    for ranges in ranks:
        own = tokens_of(ranges)
        tiles = [(Tile(ranges, keys), tokens_of(keys)) for keys in ranks]
        merged = Merged.empty(query[own])
        for tile, keys in tiles:
            row.add(merged, tile, (query[own], key[keys], value[keys]))
        merged.add_sinks(sinks.detach())
        outputs = merged.output[:-1], merged.logsumexp
        found[0][own] = outputs[0]
        found[4] += sink_gradient(weights[own], sinks.detach(), outputs)
        for tile, keys in tiles:
            parts = row.gradients(weights[own], tile, (query[own], key[keys], value[keys]), outputs)
            for total, tokens, part in zip(found[1:4], (own, keys, keys), parts, strict=True):
                total[tokens] += part
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-11)


@settings(max_examples=settings().max_examples // 2)
@given(forests(most=12) | forests(most=90), WINDOWS, st.sampled_from([(1, 1), (6, 2)]), st.integers(1, 4))
def test_values_and_gradients_of_tiles_equal_a_dense_mask(
    forest: Forest, window: int | None, heads: tuple[int, int], num_ranks: int
) -> None:
    """Merged, and summed."""
    check(forest, window, heads, num_ranks)


@settings(max_examples=settings().max_examples // 4)
@given(forests(most=40), WINDOWS, st.integers(1, 4))
def test_tiles_by_variable_length_calls_equal_a_dense_mask(forest: Forest, window: int | None, num_ranks: int) -> None:
    """With the calls of flash attention."""
    check(forest, window, (4, 2), num_ranks, backend="varlen")


@pytest.mark.parametrize("window", [None, 33, 150])
@pytest.mark.parametrize("softcap", [None, 0.4])
def test_tiles_of_large_segments_equal_a_dense_mask(window: int | None, softcap: float | None) -> None:
    """Parts that are read in place, with soft caps too."""
    check(Forest((200, 170, 3, 2, 90, 110), (-1, 0, 1, 1, 0, -1)), window, (2, 1), 3, softcap)


def test_tokens_of_another_tile_are_rejected() -> None:
    """A part that is cut wrongly must not read another token's numbers."""
    with pytest.raises(ValueError, match="token 7 is not in the tile"):
        Tile(((0, 4),), ((0, 8),)).query_place(7)
