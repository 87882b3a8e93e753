"""Paged KV cache: blocks of tokens from one pool per layer, a block table per row, and prompts shared by their rows.

The pool of a layer is one tensor of blocks. Blocks of one row lie densely at its beginning, and those that the rows of
a group share, which hold its prompt, densely at its end; between them is free space. A block that is released is filled
with the last one of its side, so that no holes are left. Ids of shared blocks are negative, counted from the end.

    pool        [0: row 0] [1: row 1] [2: row 0] [ free ... ] [-2: prompt] [-1: prompt]
    row 0       -1 -2 0 2
    row 1       -1 -2 1

Every block has its own number of tokens (`fill`), so that a partly filled block of a prompt stays shared and is never
copied: each row continues in a block of its own.

A decode step reads the blocks in place: all blocks of a side in one batched product with the queries of the rows that
hold them, and then merges the results of each row's blocks by their maxima (as flash attention does). Rows do not pay
for longer ones, and a shared block is read once for all rows. Small caches are gathered into one padded tensor instead,
which takes fewer operations; so are those of models whose attention cannot be replaced.

Legend of shapes: R rows, H query heads, G key heads, F = H / G, N tokens of a block, D head dimension. Used under
`torch.inference_mode` only. All values in the pools are finite: a masked NaN would still make its row NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention

Index = npt.NDArray[np.int64]

BLOCK_TOKENS: Final = 32
GATHERED_BYTES: Final = 4 << 20
"""Most bytes of a layer's keys and values, in single precision and padded, that a decode step gathers instead of
reading them in place: what a core has in its cache."""
KEPT_BYTES: Final = 16 << 20
"""Size below which the pools do not shrink when rows leave, not even for the last one: new ones take milliseconds."""
WIDENED_TOKENS: Final = 8192
"""Tokens of one head, in half precision, that are widened together: what a core has in its cache."""
HIDDEN: Final = -1e30
"""Score of a token that a row does not see: finite, as a row may see no token of a block."""


class CacheFullError(Exception):
    """The blocks that a call needs exceed the limit."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one token in a layer."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """Tokens to cache for one or more new rows, after those of a prompt."""

    prompt: int
    """Number of the prompt; sequences with the same number share its blocks."""
    prompt_tokens: int
    own_tokens: int
    """Tokens after the prompt; 0 if there are several rows."""
    num_rows: int


class PagedCache(Cache):  # type: ignore[misc]
    """A KV cache that rows join and leave between decode steps."""

    def __init__(
        self, shapes: Sequence[LayerShape], device: torch.device, *, window: int | None = None, max_bytes: int = 0
    ) -> None:
        """Create an empty cache.

        Args:
            shapes: of the layers.
            device: of the pools.
            window: size of the sliding window, the current token included; None if no layer has one.
            max_bytes: limit on the pools of all layers; 0 for none.
        """
        super().__init__(layers=[])
        self._shapes, self._device, self._window = tuple(shapes), device, window
        self._block_bytes = sum(
            BLOCK_TOKENS * one.num_heads * (one.key_dim + one.value_dim) * one.dtype.itemsize for one in shapes
        )
        self.max_blocks: int | None = max_bytes // self._block_bytes if max_bytes else None
        """Limit on the blocks; None for none."""
        self._num_own = self._num_shared = self._capacity = 0
        self._fill, self._base, self._refs = (np.zeros(0, np.int64) for _ in range(3))
        """Tokens of each block, the index of its first one in its sequence, and the rows that hold it; [capacity]."""
        self._tables: Index = np.zeros((0, 0), np.int64)
        """Block ids of each row in the order of its tokens, [rows, most blocks]."""
        self._counts: Index = np.zeros(0, np.int64)
        self._lengths: Index = np.zeros(0, np.int64)
        self._pools = [self._new_pool(shape, 0) for shape in shapes]
        self._layer = 0
        self._step = _Step(self, replaceable=False)

    @property
    def num_rows(self) -> int:
        """Rows in the cache."""
        return len(self._counts)

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return int(self._lengths.max(initial=0))

    @property
    def size_bytes(self) -> int:
        """Bytes of all pools."""
        return self._capacity * self._block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that rows hold."""
        return self._num_own + self._num_shared

    @property
    def num_free_blocks(self) -> int | None:
        """Blocks that can still be allocated; None without a limit."""
        return None if self.max_blocks is None else self.max_blocks - self.num_blocks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest row (transformers asks for it by this name)."""
        return self.width

    # --- one decode step -----------------------------------------------------------------------------------------

    def num_missing_blocks(self) -> int:
        """Return by how many blocks the next decode step exceeds the limit."""
        return 0 if self.num_free_blocks is None else max(0, int(self._is_tail_full().sum()) - self.num_free_blocks)

    def begin(self, *, replaceable: bool) -> None:
        """Give every row a place for its next token.

        Args:
            replaceable: whether the model calls `attend`; else its layers get padded keys and values.

        Raises:
            CacheFullError: the limit on blocks is reached.
        """
        full = np.flatnonzero(self._is_tail_full())
        if full.size:
            self._append_blocks(full, self._allocate_own(len(full)), self._lengths[full])
        tails = self._tails()
        self._fill[tails] += 1
        self._lengths += 1
        self._step = _Step(self, replaceable=replaceable)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token per row, [R, G, 1, D]; return what to attend to, unless the model calls `attend`."""
        self._layer = layer_idx
        self.write(layer_idx, self._step.targets(key_states.shape[1]), key_states, value_states)
        return (key_states, value_states) if self._step.replaceable else self._gather(layer_idx)

    def masks(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return this step's additive masks [R, 1, 1, tokens] for full and for sliding layers, if any."""
        full = self._step.padded_mask(None).to(dtype)
        return full, None if self._window is None else self._step.padded_mask(self._window).to(dtype)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Attend from `query` [R, H, 1, D] to the rows' blocks in the layer that was updated last.

        Returns:
            [R, 1, H, E].
        """
        return self._attend(self._layer, query[:, :, 0], scale, window)[:, None]

    def attend_newest(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write one token per row, with keys and values [R, G, D], and attend from `query` [R, H, D].

        Returns:
            [R, H, E].
        """
        self.write(layer, self._step.targets(key.shape[1]), key, value)
        return self._attend(layer, query, scale, window)

    def _gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, padded to the longest row: [R, G, tokens, D]."""
        heads, rows = self._pools[layer][0].shape[1], self._step.num_rows
        index = self._step.gathered(heads)
        keys, values = (
            pool.view(-1, pool.shape[-1]).index_select(0, index).view(rows, heads, -1, pool.shape[-1])
            for pool in self._pools[layer]
        )
        return keys, values

    def _attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Attend from `query` [R, H, D] to the rows' blocks of a layer; return [R, H, E]."""
        attended = self._attend_in_place if self._step.in_place else self._attend_gathered
        return attended(layer, query * scale, window).to(query.dtype)

    def _attend_gathered(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        rows, heads, dim = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = (gathered.flatten(0, 1).to(wide) for gathered in self._gather(layer))
        scores = torch.bmm(query.to(wide).reshape(len(keys), -1, dim), keys.transpose(1, 2))
        scores.view(rows, heads, -1).add_(self._step.padded_mask(window)[:, :, 0])
        return torch.bmm(scores.softmax(-1), values).view(rows, heads, -1)

    def _attend_in_place(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        keys, values = self._pools[layer]
        rows, heads, _ = query.shape
        groups = keys.shape[1]
        grouped = query.reshape(rows, groups, heads // groups, -1)
        parts = [part.attend(grouped, keys, values, window) for part in self._step.parts]
        tops, sums, outputs = (torch.cat(some) if len(some) > 1 else some[0] for some in zip(*parts, strict=True))
        owners = self._step.owners
        top = tops.index_select(0, self._step.pairs).view(rows, -1, heads).amax(1)
        # One row more takes the padding of shared blocks, and is dropped.
        weights = (tops - top.index_select(0, self._step.clipped_owners)).exp_()
        total = sums.new_zeros(rows + 1, heads).index_add_(0, owners, sums.mul_(weights))
        output = outputs.new_zeros(rows + 1, heads, outputs.shape[-1])
        output.index_add_(0, owners, outputs.mul_(weights[:, :, None]))
        return output[:rows] / total[:rows, :, None]

    # --- rows join and leave -------------------------------------------------------------------------------------

    def num_blocks_of(self, sequences: Sequence[CachedSequence]) -> int:
        """Return the blocks that `join` needs for `sequences`."""
        lone = _lone_prompts(sequences)
        prompts = {one.prompt: one.prompt_tokens for one in sequences if one.prompt not in lone}
        own = [
            _blocks(one.prompt_tokens + one.own_tokens) if one.prompt in lone else one.num_rows * _own_blocks(one)
            for one in sequences
        ]
        return sum(map(_blocks, prompts.values())) + sum(own)

    def join(self, sequences: Sequence[CachedSequence]) -> list[tuple[Index, Index]]:
        """Append rows for `sequences`, in order, whose tokens are then written by `PrefillCache`.

        Returns:
            For each sequence the places of the prompt's tokens and of its own: block ids x `BLOCK_TOKENS` + offset.

        Raises:
            CacheFullError: the limit on blocks is reached; nothing has changed.
        """
        lone = _lone_prompts(sequences)
        num_rows = {one.prompt: 0 for one in sequences}
        for one in sequences:
            num_rows[one.prompt] += one.num_rows
        prompts = {one.prompt: one.prompt_tokens for one in sequences if one.prompt not in lone}
        self._reserve(self.num_blocks_of(sequences))
        shared = {prompt: self._allocate_shared(tokens, num_rows[prompt]) for prompt, tokens in prompts.items()}
        places, tables, lengths = [], [], []
        for one in sequences:
            first = 0 if one.prompt in lone else one.prompt_tokens
            length = one.prompt_tokens + one.own_tokens
            count = _blocks(length) if one.prompt in lone else _own_blocks(one)
            own = self._allocate_own(count * one.num_rows).reshape(one.num_rows, count)
            base = first + BLOCK_TOKENS * np.arange(count)
            self._base[own], self._fill[own] = base, np.clip(length - base, 0, BLOCK_TOKENS)
            blocks = shared.get(one.prompt, np.zeros(0, np.int64))
            tables += [np.concatenate((blocks, row)) for row in own]
            lengths += [length] * one.num_rows
            held = _places(own[0], length - first)
            prompt = held[: one.prompt_tokens] if one.prompt in lone else _places(blocks, one.prompt_tokens)
            places.append((prompt, held[one.prompt_tokens - first :]))
        self._append_rows(tables, lengths)
        return places

    def keep(self, order: Index) -> None:
        """Keep only the rows in `order`: row i becomes the former row `order[i]`."""
        is_left = np.ones(self.num_rows, np.bool_)
        is_left[order] = False
        held = self._tables[is_left][_is_held(self._tables, self._counts)[is_left]]
        np.subtract.at(self._refs, held, 1)
        self._tables, self._counts, self._lengths = self._tables[order], self._counts[order], self._lengths[order]
        released = np.unique(held)
        released = released[self._refs[released] == 0]
        self._num_own -= self._close(released[released >= 0], self._num_own, is_shared=False)
        self._num_shared -= self._close(released[released < 0], self._num_shared, is_shared=True)
        if 2 * self.num_blocks <= self._capacity and self.size_bytes > KEPT_BYTES:
            self.shrink()

    def shrink(self) -> None:
        """Free all memory but that of the rows' blocks."""
        self._resize(self.num_blocks)

    def clear_free(self) -> None:
        """Overwrite the free blocks, which may hold values that are not finite."""
        for pair in self._pools:
            for pool in pair:
                pool[self._num_own : self._capacity - self._num_shared].zero_()

    def write(self, layer: int, target: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of tokens, [T, G, D], at `target` [T * G], from `targets_of`."""
        for pool, states in zip(self._pools[layer], (keys, values), strict=True):
            pool.view(-1, pool.shape[-1]).index_copy_(0, target, states.reshape(-1, pool.shape[-1]))

    def targets_of(self, places: Index, heads: int) -> Tensor:
        """Return the rows of a pool as [tokens, D] that hold `places`, by head: int64 [len(places) * G]."""
        return torch.from_numpy(self._by_head(places, heads).reshape(-1)).to(self._device)

    # --- blocks --------------------------------------------------------------------------------------------------

    def _by_head(self, places: Index, heads: int) -> Index:
        """Return the rows of a pool as [tokens, D] that hold `places`, [len(places), heads]."""
        blocks, offsets = places // BLOCK_TOKENS % self._capacity, places % BLOCK_TOKENS
        by_head: Index = (blocks[:, None] * heads + np.arange(heads)) * BLOCK_TOKENS + offsets[:, None]
        return by_head

    def _tails(self) -> Index:
        tails: Index = self._tables[np.arange(self.num_rows), self._counts - 1]
        return tails

    def _is_tail_full(self) -> npt.NDArray[np.bool_]:
        """Return which rows need a new block for their next token."""
        full: npt.NDArray[np.bool_] = self._fill[self._tails()] == BLOCK_TOKENS
        return full

    def _append_rows(self, tables: Sequence[Index], lengths: Sequence[int]) -> None:
        counts = np.array([len(table) for table in tables], np.int64)
        width = max(self._tables.shape[1], int(counts.max()))
        joined = np.zeros((self.num_rows + len(tables), width), np.int64)
        joined[: self.num_rows, : self._tables.shape[1]] = self._tables
        for row, table in enumerate(tables, self.num_rows):
            joined[row, : len(table)] = table
        self._tables = joined
        self._counts = np.concatenate((self._counts, counts))
        self._lengths = np.concatenate((self._lengths, np.array(lengths, np.int64)))

    def _append_blocks(self, rows: Index, blocks: Index, base: Index) -> None:
        """Append one empty block to each of `rows`."""
        self._base[blocks], self._fill[blocks] = base, 0
        if int(self._counts[rows].max()) == self._tables.shape[1]:
            self._tables = np.pad(self._tables, ((0, 0), (0, max(4, self._tables.shape[1] // 2))))
        self._tables[rows, self._counts[rows]] = blocks
        self._counts[rows] += 1

    def _allocate_own(self, count: int) -> Index:
        self._reserve(count)
        blocks = np.arange(self._num_own, self._num_own + count)
        self._num_own += count
        self._refs[blocks] = 1
        return blocks

    def _allocate_shared(self, num_tokens: int, num_rows: int) -> Index:
        """Return blocks for a prompt that `num_rows` rows share."""
        count = _blocks(num_tokens)
        self._reserve(count)
        blocks = -1 - np.arange(self._num_shared, self._num_shared + count)
        self._num_shared += count
        self._refs[blocks] = num_rows
        self._base[blocks] = base = BLOCK_TOKENS * np.arange(count)
        self._fill[blocks] = np.minimum(num_tokens - base, BLOCK_TOKENS)
        return blocks

    def _reserve(self, count: int) -> None:
        """Make room for `count` more blocks."""
        used = self.num_blocks + count
        if self.max_blocks is not None and used > self.max_blocks:
            raise CacheFullError(f"{used} blocks are needed, and the limit is {self.max_blocks}")
        if used > self._capacity:
            grown = used + used // 2
            self._resize(grown if self.max_blocks is None else min(grown, self.max_blocks))

    def _resize(self, capacity: int) -> None:
        """Move the blocks into pools of `capacity` blocks, layer by layer."""
        own, shared = slice(0, self._num_own), slice(capacity - self._num_shared, capacity)
        old_shared = slice(self._capacity - self._num_shared, self._capacity)
        for number, shape in enumerate(self._shapes):
            new = self._new_pool(shape, capacity)
            for old_pool, pool in zip(self._pools[number], new, strict=True):
                pool[own], pool[shared] = old_pool[own], old_pool[old_shared]
            self._pools[number] = new
        for name in ("_fill", "_base", "_refs"):
            old, array = getattr(self, name), np.zeros(capacity, np.int64)
            array[own], array[shared] = old[own], old[old_shared]
            setattr(self, name, array)
        self._capacity = capacity

    def _new_pool(self, shape: LayerShape, capacity: int) -> tuple[Tensor, Tensor]:
        sizes = ((capacity, shape.num_heads, BLOCK_TOKENS, dim) for dim in (shape.key_dim, shape.value_dim))
        keys, values = (torch.zeros(size, dtype=shape.dtype, device=self._device) for size in sizes)
        return keys, values

    def _close(self, released: Index, used: int, *, is_shared: bool) -> int:
        """Move the last blocks of a side into `released` ones; return the number of these."""
        if not released.size:
            return 0
        places = -1 - released if is_shared else released
        left = used - len(places)
        is_used = np.ones(used, np.bool_)
        is_used[places] = False
        sources, targets = left + np.flatnonzero(is_used[left:]), np.sort(places[places < left])
        if sources.size:
            moved = np.arange(used)
            moved[sources] = targets
            if is_shared:
                sources, targets = -1 - sources, -1 - targets
            for array in (self._fill, self._base, self._refs):
                array[targets] = array[sources]
            is_side = _is_held(self._tables, self._counts) & ((self._tables < 0) == is_shared)
            old = self._tables[is_side]
            self._tables[is_side] = -1 - moved[-1 - old] if is_shared else moved[old]
            device = self._device
            source, target = (torch.from_numpy(ids % self._capacity).to(device) for ids in (sources, targets))
            for pair in self._pools:
                for pool in pair:
                    pool.index_copy_(0, target, pool.index_select(0, source))
        return len(places)


class PrefillCache(Cache):  # type: ignore[misc]
    """The cache of one prefill of packed sequences: it writes their keys and values into a `PagedCache`."""

    def __init__(self, cache: PagedCache, places: Index) -> None:
        """Create it; `places` [T], from `PagedCache.join`, are those of the packed tokens."""
        super().__init__(layers=[])
        self._cache, self._places = cache, places
        self._targets: dict[int, Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the tokens have none before them."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the packed tokens, [1, G, T, D], and return them."""
        self._write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states

    def attend(
        self, forest: Forest, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write keys and values [T, G, D], and attend from `query` [T, H, D] to the segments of `forest`.

        Returns:
            [T, H, E].
        """
        self._write(layer, key, value)
        return attention(query, key, value, forest, scale, window=window)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        heads = keys.shape[1]
        if heads not in self._targets:
            self._targets[heads] = self._cache.targets_of(self._places, heads)
        self._cache.write(layer, self._targets[heads], keys, values)


class _Step:
    """What the layers of one decode step have in common; computed when the first of them needs it.

    It keeps to the rows that the cache has when the step begins: others may join meanwhile, to be prefilled in the same
    pass of the model.
    """

    def __init__(self, cache: PagedCache, *, replaceable: bool) -> None:
        self.replaceable, self._cache = replaceable, cache
        # Rows that join get tables of their own, and blocks beside these.
        self.tables, self._counts, self.lengths = cache._tables, cache._counts, cache._lengths
        self._num_blocks = cache._num_own, cache._num_shared
        self._targets: dict[int, Tensor] = {}
        self._gathered: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}

    def on_device(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._cache._device)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self._counts)

    @cached_property
    def width(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def in_place(self) -> bool:
        """Whether `PagedCache.attend` reads the blocks in place."""
        largest = max(
            one.num_heads * (one.key_dim + one.value_dim) * max(one.dtype.itemsize, 4) for one in self._cache._shapes
        )
        return self.num_rows * self.width * largest > GATHERED_BYTES

    def targets(self, heads: int) -> Tensor:
        """Return where the newest token of each row is written, by head: int64 [R * G]."""
        if heads not in self._targets:
            tails = self.tables[np.arange(self.num_rows), self._counts - 1]
            places = tails * BLOCK_TOKENS + self._cache._fill[tails] - 1
            self._targets[heads] = self._cache.targets_of(places, heads)
        return self._targets[heads]

    def gathered(self, heads: int) -> Tensor:
        """Return which rows of a pool, as [tokens, D], the padded tensor has: int64 [R * G * longest row]."""
        if heads not in self._gathered:
            cache, tokens = self._cache, self._padded_places
            by_head = cache._by_head(tokens.reshape(-1), heads).reshape(*tokens.shape, heads)
            self._gathered[heads] = self.on_device(by_head.transpose(0, 2, 1).reshape(-1))
        return self._gathered[heads]

    @cached_property
    def _padded_places(self) -> Index:
        """Places of the tokens of each row, [R, longest row]; shorter rows repeat their first one."""
        tables = self.tables[:, : int(self._counts.max())]
        held = np.where(_is_held(tables, self._counts), self._cache._fill[tables], 0)
        offsets = np.arange(BLOCK_TOKENS)
        places = tables[:, :, None] * BLOCK_TOKENS + offsets
        padded = np.repeat(places[:, 0, :1], self.width, axis=1)
        # Both masks select the tokens in the order of rows and positions.
        padded[np.arange(self.width) < self.lengths[:, None]] = places[offsets < held[:, :, None]]
        return padded

    def padded_mask(self, window: int | None) -> Tensor:
        """Return the additive mask of the padded tensor, float32 [R, 1, 1, longest row]."""
        if window not in self._masks:
            lengths, tokens = self.lengths[:, None], np.arange(self.width)
            seen = tokens < lengths
            if window is not None:
                seen &= tokens >= lengths - window
            mask = np.where(seen, np.float32(0), np.float32(-np.inf))
            self._masks[window] = self.on_device(mask.reshape(len(lengths), 1, 1, -1))
        return self._masks[window]

    @cached_property
    def parts(self) -> list[_Part]:
        """The blocks of both sides, as far as there are any."""
        capacity = self._cache._capacity
        rows, columns = np.nonzero(_is_held(self.tables, self._counts))
        blocks = self.tables[rows, columns]
        found = []
        for is_shared, count in zip((False, True), self._num_blocks, strict=True):
            side = (blocks < 0) == is_shared
            if count:
                begin = capacity - count if is_shared else 0
                found.append(_Part(self, begin, count, blocks[side] % capacity - begin, rows[side]))
        return found

    @cached_property
    def owners(self) -> Tensor:
        """Return the row of each pair of a block and a row, in the order of the parts; R for padding: int64 [pairs]."""
        return self.on_device(np.concatenate([part.owners.reshape(-1) for part in self.parts]))

    @cached_property
    def clipped_owners(self) -> Tensor:
        """`owners`, with any row in place of padding."""
        return self.owners.clamp(max=self.num_rows - 1)

    @cached_property
    def pairs(self) -> Tensor:
        """Return the pairs of each row, padded with its first one: int64 [R * most pairs]."""
        owners = np.concatenate([part.owners.reshape(-1) for part in self.parts])
        order = np.argsort(owners, kind="stable")[: int((owners < self.num_rows).sum())]
        counts = self._counts
        starts = np.cumsum(counts) - counts
        columns = np.arange(int(counts.max()))
        index = starts[:, None] + np.where(columns < counts[:, None], columns, 0)
        return self.on_device(order[index].reshape(-1))


class _Part:
    """The blocks of one side in a decode step, and the rows that hold them."""

    def __init__(self, step: _Step, begin: int, count: int, blocks: Index, rows: Index) -> None:
        """Describe `count` blocks from `begin` on; row `rows[i]` holds block `begin + blocks[i]`."""
        self._step, self._begin, self._count = step, begin, count
        order = np.argsort(blocks, kind="stable")
        blocks, rows = blocks[order], rows[order]
        holders = np.bincount(blocks, minlength=count)
        starts = np.cumsum(holders) - holders
        self.owners: Index = np.full((count, int(holders.max())), step.num_rows)
        """Rows of each block, padded by R: [blocks, most rows of a block]."""
        self.owners[blocks, np.arange(len(blocks)) - starts[blocks]] = rows
        self._queries = step.on_device(np.minimum(self.owners, step.num_rows - 1).reshape(-1))
        self._biases: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from `query` [R, G, F, D] to each block alone, with keys [blocks, G, N, D] of the whole pool.

        Returns:
            For each pair of a block and a row: the largest score and the sum of the exponentials [pairs, H], and the
            sum of the values [pairs, H, E], in at least single precision.
        """
        _, groups, heads, dim = query.shape
        own = query.index_select(0, self._queries)
        if self.owners.shape[1] > 1:
            own = own.view(self._count, -1, groups, heads, dim).transpose(1, 2)
        own = own.reshape(self._count * groups, -1, dim)
        blocks, bias = slice(self._begin, self._begin + self._count), self._bias(groups, heads, window)
        inputs = own, keys[blocks].flatten(0, 1), values[blocks].flatten(0, 1), bias
        is_half = keys.dtype in (torch.bfloat16, torch.float16)
        size = max(1, WIDENED_TOKENS // BLOCK_TOKENS) if is_half else len(own)
        chunks = zip(*(torch.split(one, size) for one in inputs), strict=True)
        found = [_attend_blocks(*chunk) for chunk in chunks]
        tops, sums, outputs = (torch.cat(some) if len(some) > 1 else some[0] for some in zip(*found, strict=True))
        return self._by_pair(tops, groups), self._by_pair(sums, groups), self._by_pair(outputs, groups)

    def _by_pair(self, found: Tensor, groups: int) -> Tensor:
        """Return [blocks * G, rows of a block * F, ...] as [pairs, H, ...]."""
        holders = self.owners.shape[1]
        if holders == 1:
            return found.reshape(self._count, -1, *found.shape[2:])
        found = found.view(self._count, groups, holders, -1, *found.shape[2:]).transpose(1, 2)
        return found.reshape(self._count * holders, -1, *found.shape[4:])

    def _bias(self, groups: int, heads: int, window: int | None) -> Tensor:
        """Return what is added to the scores: `HIDDEN` where a row does not see a token."""
        key = groups, heads, window
        if key not in self._biases:
            cache, offsets = self._step._cache, np.arange(BLOCK_TOKENS)
            blocks = np.arange(self._begin, self._begin + self._count)
            seen = (offsets < cache._fill[blocks][:, None])[:, None]
            if window is not None:
                oldest = np.append(self._step.lengths, 0)[self.owners] - window
                seen = seen & (cache._base[blocks][:, None, None] + offsets >= oldest[:, :, None])
            bias = self._step.on_device(np.where(seen, np.float32(0), np.float32(HIDDEN)))
            expanded = bias[:, None, :, None].expand(-1, groups, -1, heads if window is not None else 1, -1)
            self._biases[key] = expanded.reshape(self._count * groups, -1, BLOCK_TOKENS)
        return self._biases[key]


def _attend_blocks(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from `query` [B, Q, D] to blocks with `keys` [B, N, D], `values` [B, N, E] and `bias` [B, 1 or Q, N].

    Half precision is widened, as fused kernels keep scores and sums in single precision, too.

    Returns:
        The largest scores and the sums of the exponentials [B, Q], and the sums of the values [B, Q, E].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.bmm(query.to(wide), keys.to(wide).transpose(1, 2))
    scores += bias
    tops = scores.amax(-1, keepdim=True)
    scores.sub_(tops).exp_()
    return tops[..., 0], scores.sum(-1), torch.bmm(scores, values.to(wide))


def _is_held(tables: Index, counts: Index) -> npt.NDArray[np.bool_]:
    """Return which entries of block tables are blocks: bool [rows, most blocks]."""
    held: npt.NDArray[np.bool_] = np.arange(tables.shape[1]) < counts[:, None]
    return held


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def _own_blocks(sequence: CachedSequence) -> int:
    """Return the blocks of each row of a sequence, after the shared ones of its prompt."""
    return max(1, _blocks(sequence.own_tokens))


def _lone_prompts(sequences: Sequence[CachedSequence]) -> set[int]:
    """Return the prompts that only one row holds; their blocks are the row's own."""
    rows: dict[int, int] = {}
    for one in sequences:
        rows[one.prompt] = rows.get(one.prompt, 0) + one.num_rows
    return {prompt for prompt, count in rows.items() if count == 1}


def _places(blocks: Index, num_tokens: int) -> Index:
    """Return the places of consecutive tokens in `blocks`."""
    tokens = np.arange(num_tokens)
    places: Index = blocks[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
    return places
