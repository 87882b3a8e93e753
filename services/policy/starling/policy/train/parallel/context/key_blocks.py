"""Attention of this rank's queries to the keys of all ranks: gathered, or passed around a ring, one block at a time.

In a ring (arXiv:2310.01889) a rank passes the block of keys that it computes with to the next rank meanwhile; in the
backward pass the gradients of a block travel with it, and arrive at its owner last. Gathered keys take memory for the
whole row, and their gradients are summed by one reduction.

Legend of shapes: l tokens of this rank, c ranks, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from starling.algo.attention.kernels import Inputs
from starling.algo.attention.merge import Merged, sink_gradient
from starling.algo.attention.tiled import TiledAttention
from starling.algo.attention.tiles import Ranges, Tile

_BLOCKS, _GRADIENTS = 0, 1
"""Tags of messages."""


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The tokens of each rank, and how their keys come to the others."""

    group: dist.ProcessGroup
    ranges: tuple[Ranges, ...]
    """Tokens of the row that each rank has, as many as the others."""
    method: Literal["all_gather", "ring"]

    @property
    def rank(self) -> int:
        """This rank of the group."""
        return self.group.rank()

    def attention(self, inputs: Inputs, row: TiledAttention, sinks: Tensor | None) -> Tensor:
        """Return the attention of this rank's tokens, [l, H, D].

        Args:
            inputs: query [l, H, D], key and value [l, G, D] of this rank's tokens; see `kernel_inputs`.
            row: the attention of the whole row.
            sinks: score of each query head's sink, [H]; None for none.
        """
        output: Tensor = _BlockAttention.apply(*inputs, sinks, row, self)  # type: ignore[no-untyped-call]
        return output

    def forward(self, block: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the keys and values of all ranks, [2, K, G, D], with what they are of the row; see `gradients`.

        Args:
            block: of this rank, [2, l, G, D].
        """
        own = self.ranges[self.rank]
        if self.method == "all_gather":
            yield self._whole(own), self._gathered(block)
            return
        for step in range(len(self.ranges)):
            passing = self._pass_on(block, _BLOCKS) if step + 1 < len(self.ranges) else None
            yield Tile(own, self.ranges[self.rank - step]), block
            if passing is not None:
                block = passing()

    def gradients(self, block: Tensor, compute: Callable[[Tile, Tensor], Tensor]) -> Tensor:
        """Return the gradient of this rank's block, [2, l, G, D]: the sum of what each rank computes.

        Args:
            block: of this rank.
            compute: returns the gradient of keys and values, [2, K, G, D], from what a tile's queries contribute.
        """
        if self.method == "all_gather":
            return self._reduced(compute(self._whole(self.ranges[self.rank]), self._gathered(block)))
        arriving: Callable[[], Tensor] | None = None
        for tile, keys in self.forward(block):
            gradient = compute(tile, keys)
            if arriving is not None:
                gradient += arriving()
            arriving = self._pass_on(gradient, _GRADIENTS)
        assert arriving is not None
        return arriving()

    def _whole(self, queries: Ranges) -> Tile:
        return Tile(queries, ((0, sum(last - first for ranges in self.ranges for first, last in ranges)),))

    def _gathered(self, block: Tensor) -> Tensor:
        """Return the blocks of all ranks, [2, L, G, D], in the order of the row."""
        blocks = [torch.empty_like(block) for _ in self.ranges]
        dist.all_gather(blocks, block, group=self.group)
        pieces = {
            first: piece
            for one, ranges in zip(blocks, self.ranges, strict=True)
            for (first, _), piece in zip(ranges, torch.split(one, _sizes(ranges), dim=1), strict=True)
        }
        return torch.cat([pieces[first] for first in sorted(pieces)], dim=1)

    def _reduced(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of the sum of `gradient`, [2, L, G, D], over the ranks."""
        parts = [torch.cat([gradient[:, first:last] for first, last in ranges], dim=1) for ranges in self.ranges]
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, parts, group=self.group)
        return summed

    def _pass_on(self, tensor: Tensor, tag: int) -> Callable[[], Tensor]:
        """Begin to send `tensor` to the next rank. Returns what waits for that of the rank before."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        following, before = (
            dist.get_global_rank(self.group, (self.rank + step) % len(self.ranges)) for step in (1, -1)
        )
        operations = [
            dist.P2POp(dist.isend, tensor.contiguous(), following, self.group, tag),
            dist.P2POp(dist.irecv, received, before, self.group, tag),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            operations.clear()  # Until now the tensor to be sent has been needed.
            return received

        return wait


def _sizes(ranges: Ranges) -> list[int]:
    return [last - first for first, last in ranges]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        row: TiledAttention,
        blocks: KeyBlocks,
    ) -> Tensor:
        merged = Merged.empty(query)
        block = torch.stack([key, value])
        for tile, (keys, values) in blocks.forward(block):
            row.add(merged, tile, (query, keys, values))
        if sinks is not None:
            merged.add_sinks(sinks)
        result = merged.output[: len(query)].to(query.dtype)
        ctx.row, ctx.blocks = row, blocks
        ctx.save_for_backward(query, block, result, merged.logsumexp, sinks)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, block, output, logsumexp, sinks = ctx.saved_tensors
        row: TiledAttention = ctx.row
        of_queries = list[Tensor]()

        def compute(tile: Tile, keys: Tensor) -> Tensor:
            inputs = query, keys[0], keys[1]
            of_query, *of_keys = row.gradients(gradient, tile, inputs, (output, logsumexp))
            of_queries.append(of_query)
            return torch.stack(of_keys)

        of_block = ctx.blocks.gradients(block, compute).to(block.dtype)
        of_query = torch.stack(of_queries).sum(0).to(query.dtype)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = sink_gradient(gradient, sinks, (output, logsumexp))
        return of_query, of_block[0], of_block[1], of_sinks, None, None
