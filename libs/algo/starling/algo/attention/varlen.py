"""Attention by variable-length flash kernels: all parts of one level in one call, cascaded over shared segments.

The first level is causal attention of each segment to itself, one call for the row. Each further level is one call for
the rectangles of tokens and one of their ancestors, whose results merge by log-sum-exp. So a row of documents takes one
call, and a tree one more for each of its levels, however many segments there are. A sliding window within a segment is
the kernel's own; its edge in an ancestor is divided into parts.

CUDA devices have the kernel for half precision. Elsewhere each part is a call of the kernel that `segments` uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from starling.algo.attention.forest import Forest, Part
from starling.algo.attention.kernels import FLASH_HEAD_DIM, Inputs, Kernel, Outputs, kernel_for
from starling.algo.attention.merge import Runner, merged_attention
from starling.algo.attention.tiles import Tile, tile_levels

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class VarlenCall:
    """Parts of one level, one behind another; see `starling.algo.attention.merge.Call`."""

    causal: bool
    window: int | None
    """Of causal parts longer than it; None where each query sees all keys up to its own offset."""
    query_ends: tuple[int, ...]
    """End of each part's queries, counted from the call's first query."""
    key_ends: tuple[int, ...]
    queries: Tensor | None
    """int64; None for all tokens of the row in order."""
    keys: Tensor | None
    query_bounds: Tensor
    """int32 [parts + 1]: 0 and `query_ends`, on the device."""
    key_bounds: Tensor
    query: int = 0
    key: int = 0

    @property
    def num_queries(self) -> int:
        """Queries of all parts."""
        return self.query_ends[-1]

    @property
    def targets(self) -> Tensor | None:
        """The rows of the queries: there is no padding."""
        return self.queries


def supports_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a device has the variable-length kernel for tensors of this type."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and head_dim <= FLASH_HEAD_DIM


def varlen_attention(
    inputs: Inputs, forest: Forest, scale: float, *, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention of a packed row, [T, H, D]; see `starling.algo.attention.interface.attention`."""
    query = inputs[0]
    has_kernel = supports_varlen(query.device, query.dtype, query.shape[-1])
    levels = varlen_calls(forest, window, query.device, own_windows=has_kernel)
    return merged_attention(inputs, levels, varlen_runner(query, scale), sinks)


def varlen_runner(query: Tensor, scale: float) -> Runner:
    """Return what computes calls for tensors like `query`, [..., D]."""
    if supports_varlen(query.device, query.dtype, query.shape[-1]):
        return _Flash(scale)
    return _PartByPart(kernel_for(query), scale)


@lru_cache(maxsize=64)
def varlen_calls(
    forest: Forest, window: int | None, device: torch.device, *, own_windows: bool, tile: Tile | None = None
) -> tuple[tuple[VarlenCall, ...], ...]:
    """Return the calls of each level of the attention of `forest`.

    Args:
        forest: of the row.
        window: see `Forest.levels`.
        device: of the index tensors.
        own_windows: whether the kernel computes windows within a segment; not of a tile.
        tile: of the row; None for all of it.
    """
    if tile is None:
        levels, tile = forest.levels(window, whole_segments=own_windows), Tile.of_row(forest.num_tokens)
    else:
        levels, own_windows = tile_levels(forest, tile, window), False
    found = []
    for number, level in enumerate(levels):
        kinds = ([part for part in level if part.mode != "full"], [part for part in level if part.mode == "full"])
        own = window if own_windows and number == 0 else None
        found.append(tuple(_call(parts, tile, own, device) for parts in kinds if parts))
    return tuple(found)


def _call(parts: Sequence[Part], tile: Tile, window: int | None, device: torch.device) -> VarlenCall:
    lengths = [(part.num_queries, part.num_keys) for part in parts]
    query_ends, key_ends = np.cumsum(np.array(lengths, dtype=np.int64), axis=0).T.tolist()
    queries = _tokens((tile.query_place(part.query), part.num_queries, part.mode == "reversed") for part in parts)
    keys = _tokens((tile.key_place(part.key), part.num_keys, part.mode == "reversed") for part in parts)

    def on_device(array: np.ndarray[tuple[int, ...], np.dtype[Any]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    all_queries, all_keys = (np.arange(count, dtype=np.int64) for count in (tile.num_queries, tile.num_keys))
    return VarlenCall(
        parts[0].mode != "full",
        window,
        tuple(query_ends),
        tuple(key_ends),
        None if np.array_equal(queries, all_queries) else on_device(queries),
        None if np.array_equal(keys, all_keys) else on_device(keys),
        on_device(np.array([0, *query_ends], dtype=np.int32)),
        on_device(np.array([0, *key_ends], dtype=np.int32)),
    )


def _tokens(ranges: Iterable[tuple[int, int, bool]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the tokens of ranges (first, count, whether backwards), end to end."""
    found = [np.arange(start, start + count, dtype=np.int64)[:: -1 if back else 1] for start, count, back in ranges]
    return np.concatenate(found)


def _take(rows: Tensor, numbers: Tensor | None) -> Tensor:
    return rows if numbers is None else rows.index_select(0, numbers)


@dataclass(frozen=True, slots=True)
class _Flash:
    """Runs calls by the variable-length flash kernel; see `Runner`."""

    scale: float

    def forward(self, call: VarlenCall, inputs: Inputs) -> Outputs:
        query, key, value = inputs
        output, logsumexp, *_ = _aten._flash_attention_forward(
            _take(query, call.queries),
            _take(key, call.keys),
            _take(value, call.keys),
            *_shape_of(call),
            return_debug_mask=False,
            **self._options(call),
        )
        return output, logsumexp.transpose(0, 1)

    def backward(self, call: VarlenCall, gradient: Tensor, inputs: Inputs, outputs: Outputs) -> Inputs:
        query, key, value = inputs
        output, logsumexp = outputs
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout of 0
        found: Inputs = _aten._flash_attention_backward(
            _take(gradient, call.queries).contiguous(),
            _take(query, call.queries),
            _take(key, call.keys),
            _take(value, call.keys),
            _take(output, call.queries),
            _take(logsumexp[: len(query)], call.queries).transpose(0, 1).contiguous(),
            *_shape_of(call),
            seed,
            torch.empty(0, device=query.device),
            **self._options(call),
        )
        return found

    def _options(self, call: VarlenCall) -> dict[str, Any]:
        if call.window is None:
            return {"scale": self.scale, "window_size_left": -1, "window_size_right": 0 if call.causal else -1}
        return {"scale": self.scale, "window_size_left": call.window - 1, "window_size_right": 0}


def _shape_of(call: VarlenCall) -> tuple[Any, ...]:
    """Return bounds, largest parts, dropout, and whether all keys up to a query are seen, as the kernel takes them."""
    most = (max(np.diff(ends, prepend=0).tolist()) for ends in (call.query_ends, call.key_ends))
    return call.query_bounds, call.key_bounds, *most, 0.0, call.causal and call.window is None


@dataclass(frozen=True, slots=True)
class _PartByPart:
    """Runs the parts of a call one after another; see `Runner`."""

    kernel: Kernel
    scale: float

    def forward(self, call: VarlenCall, inputs: Inputs) -> Outputs:
        heads = inputs[0].shape[1] // inputs[1].shape[1]
        found = [
            self.kernel.forward(*_heads_first(part, heads), None, causal=call.causal, scale=self.scale)
            for part in zip(*self._parts(call, inputs), strict=True)
        ]
        outputs, sums = zip(*found, strict=True)
        return torch.cat(outputs, 2)[0].transpose(0, 1), torch.cat(sums, 2)[0].transpose(0, 1)

    def backward(self, call: VarlenCall, gradient: Tensor, inputs: Inputs, outputs: Outputs) -> Inputs:
        query, key, _ = inputs
        heads = query.shape[1] // key.shape[1]
        own = [
            _take(one[: len(query)], call.queries).tensor_split(call.query_ends[:-1])
            for one in (gradient, outputs[0], outputs[1][..., None])
        ]
        found: list[list[Tensor]] = [[], [], []]
        for of_output, output, logsumexp, *part in zip(*own, *self._parts(call, inputs), strict=True):
            gradients = self.kernel.backward(
                of_output.transpose(0, 1)[None],
                _heads_first(part, heads),
                (output.transpose(0, 1)[None], logsumexp[..., 0].transpose(0, 1)[None]),
                None,
                causal=call.causal,
                scale=self.scale,
            )
            for total, one in zip(found, gradients, strict=True):
                total.append(one[0].transpose(0, 1))
        of_query, of_key, of_value = (torch.cat(one) for one in found)
        of_key, of_value = (one.view(len(one), key.shape[1], heads, -1).sum(2) for one in (of_key, of_value))
        return of_query, of_key, of_value

    def _parts(self, call: VarlenCall, inputs: Inputs) -> list[tuple[Tensor, ...]]:
        """Return query, key and value of each part."""
        numbers = (call.queries, call.keys, call.keys)
        ends = (call.query_ends, call.key_ends, call.key_ends)
        return [_take(one, own).tensor_split(end[:-1]) for one, own, end in zip(inputs, numbers, ends, strict=True)]


def _heads_first(part: Sequence[Tensor], repeats: int) -> Inputs:
    """Return query [1, H, Q, D], and key and value [1, H, K, D] once for each query head."""
    query, *others = part
    key, value = (one.repeat_interleave(repeats, 1).transpose(0, 1)[None] for one in others)
    return query.transpose(0, 1)[None], key, value
