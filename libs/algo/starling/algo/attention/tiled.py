"""Attention of some queries of a row to keys that come tile by tile, for ranks that hold a part of the row each.

What the tiles give merges by log-sum-exp, like the parts of a row (`starling.algo.attention.merge`). FlexAttention has
no tiles; what it would compute is computed by segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from starling.algo.attention.calls import kernel_calls
from starling.algo.attention.capped import CappedKernel
from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend
from starling.algo.attention.kernels import Inputs, Outputs, kernel_for
from starling.algo.attention.merge import GradientSum, Levels, Merged, Runner
from starling.algo.attention.segments import padded_runner
from starling.algo.attention.tiles import Tile
from starling.algo.attention.varlen import varlen_calls, varlen_runner


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """The attention of a row; see `starling.algo.attention.interface.attention` for the fields."""

    structure: Forest
    scale: float
    window: int | None = None
    softcap: float | None = None
    backend: Backend = "segments"

    def add(self, merged: Merged, tile: Tile, inputs: Inputs) -> None:
        """Merge the attention of a tile's queries, those of `merged`, to its keys.

        Args:
            merged: receives it.
            tile: of the row.
            inputs: query [Q, H, D] of the tile, key and value [K, G, D]; see `kernel_inputs`.
        """
        levels, runner = self._calls(tile, inputs)
        for calls in levels:
            for call in calls:
                merged.add(call, *runner.forward(call, inputs))

    def gradients(self, gradient: Tensor, tile: Tile, inputs: Inputs, outputs: Outputs) -> Inputs:
        """Return what a tile contributes to the gradients of its queries, keys and values, in single precision.

        Args:
            gradient: of the output of the tile's queries, [Q, H, D].
            tile: of the row.
            inputs: see `add`.
            outputs: of the tile's queries, merged over all tiles: [Q, H, D], and [Q, H] or more rows.
        """
        levels, runner = self._calls(tile, inputs)
        sums = [GradientSum.empty(one) for one in inputs]
        for calls in levels:
            for call in calls:
                of_query, *others = runner.backward(call, gradient, inputs, outputs)
                sums[0].add(call.query, call.queries, None, of_query, first=False)
                for total, own in zip(sums[1:], others, strict=True):
                    total.add(call.key, call.keys, None, own, first=False)
        return sums[0].total(), sums[1].total(), sums[2].total()

    def _calls(self, tile: Tile, inputs: Inputs) -> tuple[Levels, Runner]:
        query, key, _ = inputs
        if self.backend == "varlen" and self.softcap is None:
            levels = varlen_calls(self.structure, self.window, query.device, own_windows=False, tile=tile)
            return levels, varlen_runner(query, self.scale)
        kernel = kernel_for(query) if self.softcap is None else CappedKernel(self.softcap)
        calls = kernel_calls(self.structure, self.window, query.device, with_bias=kernel.takes_bias, tile=tile)
        return calls, padded_runner(kernel, query, key, self.scale)
