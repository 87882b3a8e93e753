"""KV cache of all running rows, of any lengths, in one buffer per layer.

Rows are right-aligned at their newest token. All rows write the next token into the same column, `cursor`; the oldest
token of row r is in column `starts[r]`, and the columns left of it are masked. So a decode step writes one column,
reads the columns from the longest row's start on, and the mask changes only when rows join or leave.

    column     0  1  2  3  4  5  6  7  8
    row 0      .  .  a0 a1 a2 a3 a4 |        starts = 2
    row 1      .  .  .  .  b0 b1 b2 |        starts = 4
                     ^ left         ^ cursor, the next column to write

Used under `torch.inference_mode` only. All values in the buffers are finite, masked or not: a masked NaN would still
make its row NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache

HEADROOM_COLUMNS: Final = 64
"""Fewest columns to grow by, if the rows may still need them, so that the buffers are rarely moved."""


@dataclass(slots=True)
class _Layer:
    """Buffers of one layer, [rows, heads, columns, dim], and this step's views of them."""

    keys: torch.Tensor
    values: torch.Tensor
    key_slot: torch.Tensor | None = None
    value_slot: torch.Tensor | None = None
    key_view: torch.Tensor | None = None
    value_view: torch.Tensor | None = None


class RowCache(Cache):  # type: ignore[misc]
    """A KV cache that rows join and leave between decode steps."""

    def __init__(self, mask_dtype: torch.dtype, window: int | None = None) -> None:
        """Create an empty cache; `window` is the size of the sliding window, the current token included."""
        super().__init__(layers=[])
        self.num_rows = 0
        self.cursor = 0
        self._buffers: list[_Layer] = []
        self._capacity_rows = 0
        self._capacity_columns = 0
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._mask_dtype = mask_dtype
        self._window = window
        self._mask: torch.Tensor | None = None

    @property
    def left(self) -> int:
        """First column that any row uses."""
        return int(self._starts.min()) if self.num_rows else self.cursor

    @property
    def width(self) -> int:
        """Columns in use: the length of the longest row."""
        return self.cursor - self.left

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns in use (transformers asks for it by this name)."""
        return self.width

    # --- one decode step -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Set every layer's views for the column that this step writes; grow the buffers if they are full."""
        if self.cursor == self._capacity_columns:
            self._reallocate(self.num_rows, self.width)
        left, stop, rows = self.left, self.cursor + 1, self.num_rows
        for layer in self._buffers:
            keys, values = layer.keys[:rows], layer.values[:rows]
            layer.key_slot, layer.value_slot = keys[:, :, stop - 1 : stop], values[:, :, stop - 1 : stop]
            layer.key_view, layer.value_view = keys[:, :, left:stop], values[:, :, left:stop]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row, [rows, heads, 1, dim]; return the keys and values to attend to."""
        layer = self._buffers[layer_idx]
        assert layer.key_slot is not None
        assert layer.value_slot is not None
        assert layer.key_view is not None
        assert layer.value_view is not None
        layer.key_slot.copy_(key_states)
        layer.value_slot.copy_(value_states)
        return layer.key_view, layer.value_view

    def masks(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this step's additive masks [rows, 1, 1, width + 1] for full and for sliding layers, if any."""
        if self._mask is None:
            columns = torch.arange(self._capacity_columns, device=device)
            starts = torch.from_numpy(self._starts).to(device)
            self._mask = torch.zeros(
                (self.num_rows, 1, 1, self._capacity_columns), dtype=self._mask_dtype, device=device
            )
            self._mask.masked_fill_(columns < starts[:, None, None, None], -torch.inf)
        left, stop = self.left, self.cursor + 1
        full = self._mask[..., left:stop]
        if self._window is None:
            return full, None
        num_hidden = max(0, stop - self._window - left)
        sliding = full.clone()
        sliding[..., :num_hidden] = -torch.inf
        return full, sliding

    def advance(self) -> None:
        """Advance past the column that every layer has written."""
        self.cursor += 1

    # --- rows join and leave -------------------------------------------------------------------------------------

    def join(
        self,
        prefilled: DynamicCache,
        which: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        limits: npt.NDArray[np.int64],
    ) -> None:
        """Append rows that continue prefilled prompts.

        Args:
            prefilled: the prompts' keys and values, right-aligned, [prompts, heads, columns, dim] per layer.
            which: the prompt of each new row; rows of one group share one prefill.
            lengths: the number of tokens of each new row's prompt.
            limits: the maximum number of tokens that each new row may ever hold.
        """
        columns = prefilled.layers[0].keys.shape[2]
        first, rows = self.num_rows, self.num_rows + len(which)
        width = max(self.width, columns)
        if not self._buffers:
            self._buffers = [
                _Layer(*(states.new_zeros((0, states.shape[1], 0, states.shape[3])) for states in pair))
                for pair in ((layer.keys, layer.values) for layer in prefilled.layers)
            ]
        shift = self.cursor - lengths
        self._starts = np.concatenate((self._starts, shift))
        self._ends = np.concatenate((self._ends, shift + limits))
        if rows > self._capacity_rows or columns > self.cursor or self.cursor >= self._capacity_columns:
            self._reallocate(rows, width)
        self.num_rows = rows
        index = torch.from_numpy(which).to(self._buffers[0].keys.device)
        window = slice(self.cursor - columns, self.cursor)
        for layer, source in zip(self._buffers, prefilled.layers, strict=True):
            layer.keys[first:rows, :, window] = source.keys.index_select(0, index)
            layer.values[first:rows, :, window] = source.values.index_select(0, index)
        self._forget_views()

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Keep only the rows in `order`: row i becomes the former row `order[i]`, with `order[i] >= i` throughout."""
        self._starts, self._ends = self._starts[order], self._ends[order]
        if not len(order):
            self.num_rows = self.cursor = self._capacity_rows = self._capacity_columns = 0
            self._buffers = []
            self._forget_views()
            return
        left = self.left if self.num_rows else 0
        moved = np.flatnonzero(order != np.arange(len(order)))
        if moved.size:
            device = self._buffers[0].keys.device
            source, target = (torch.from_numpy(rows).to(device) for rows in (order[moved], moved))
            for layer in self._buffers:
                for buffer in (layer.keys, layer.values):
                    used = buffer[:, :, left : self.cursor]
                    used[target] = used[source]
        self.num_rows = len(order)
        if 2 * self.num_rows <= self._capacity_rows:
            self._reallocate(self.num_rows, self.width)
        self._forget_views()

    def _reallocate(self, rows: int, width: int) -> None:
        """Move the used part into new buffers of `rows` rows and `width` columns plus headroom, layer by layer."""
        kept, left = self.num_rows, self._used_left()
        used = self.cursor - left
        still_needed = int(self._ends.max()) - self.cursor
        columns = width + max(1, min(still_needed, max(HEADROOM_COLUMNS, width)))
        for layer in self._buffers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
                new[:kept, :, width - used : width] = old[:kept, :, left : self.cursor]
                setattr(layer, name, new)
        self._starts += width - self.cursor
        self._ends += width - self.cursor
        self.cursor = width
        self._capacity_rows, self._capacity_columns = rows, columns
        self._forget_views()

    def _used_left(self) -> int:
        """First column used by the rows that are in the buffers already, joining rows excluded."""
        return int(self._starts[: self.num_rows].min()) if self.num_rows else self.cursor

    def _forget_views(self) -> None:
        self._mask = None
        for layer in self._buffers:
            layer.key_slot = layer.value_slot = layer.key_view = layer.value_view = None
