"""Attention with a soft cap on the scores, in blocks: for devices whose fused kernels have none.

The scores are ``cap * tanh(score / cap)``, as in Gemma 2 (arXiv:2408.00118). A block of queries meets one block of keys
at a time, and the results merge by log-sum-exp as in flash attention, so that no tensor has an element for each pair of
tokens of a long part. Shapes: see `starling.algo.attention.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from starling.algo.attention.kernels import Inputs, Outputs

BLOCK: Final = 256
"""Queries and keys of a block of scores."""


@dataclass(frozen=True, slots=True)
class CappedKernel:
    """Attention with the soft cap `cap`; see `starling.algo.attention.kernels.Kernel`."""

    cap: float
    takes_bias: bool = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Outputs:
        """Return output and log-sum-exp."""
        wide = torch.promote_types(query.dtype, torch.float32)
        outputs, sums = list[Tensor](), list[Tensor]()
        for rows in _blocks(query.shape[2]):
            queries = query[:, :, rows].to(wide)
            shape = queries.shape[:-1]
            output = queries.new_zeros((*shape, value.shape[-1]))
            logsumexp = queries.new_full(shape, -torch.inf)
            for columns in _blocks(key.shape[2], rows.stop if causal else None):
                scores, _ = self._scores(queries, key, bias, rows, columns, causal=causal, scale=scale)
                merged = torch.logaddexp(logsumexp, scores.logsumexp(-1))
                output *= (logsumexp - merged).exp_()[..., None]
                output += (scores - merged[..., None]).exp_() @ value[:, :, columns].to(wide)
                logsumexp = merged
            outputs.append(output.to(query.dtype))
            sums.append(logsumexp)
        return torch.cat(outputs, 2), torch.cat(sums, 2)

    def backward(
        self, gradient: Tensor, inputs: Inputs, outputs: Outputs, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Inputs:
        """Return the gradients of query, key and value, from that of the output."""
        query, key, value = inputs
        output, logsumexp = outputs
        wide = torch.promote_types(query.dtype, torch.float32)
        totals = [torch.zeros(one.shape, dtype=wide, device=one.device) for one in inputs]
        for rows in _blocks(query.shape[2]):
            queries, own = query[:, :, rows].to(wide), gradient[:, :, rows].to(wide)
            centre = (own * output[:, :, rows]).sum(-1, keepdim=True)
            for columns in _blocks(key.shape[2], rows.stop if causal else None):
                scores, slope = self._scores(queries, key, bias, rows, columns, causal=causal, scale=scale)
                weights = (scores - logsumexp[:, :, rows, None]).exp_()
                totals[2][:, :, columns] += weights.transpose(-1, -2) @ own
                inner = (own @ value[:, :, columns].to(wide).transpose(-1, -2)).sub_(centre)
                inner *= weights.mul_(slope).mul_(scale)
                totals[0][:, :, rows] += inner @ key[:, :, columns].to(wide)
                totals[1][:, :, columns] += inner.transpose(-1, -2) @ queries
        return totals[0].to(query.dtype), totals[1].to(key.dtype), totals[2].to(value.dtype)

    def _scores(
        self,
        queries: Tensor,
        key: Tensor,
        bias: Tensor | None,
        rows: slice,
        columns: slice,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return a block of capped scores, minus infinity where hidden, and the slope of the cap at each."""
        bent = (queries @ key[:, :, columns].to(queries.dtype).transpose(-1, -2)).mul_(scale / self.cap).tanh_()
        scores = bent * self.cap
        if bias is not None:
            scores += bias[:, :, rows if bias.shape[2] > 1 else slice(None), columns]
        if causal and columns.stop > rows.start + 1:
            positions = torch.arange(max(rows.stop, columns.stop), device=scores.device)
            scores.masked_fill_(positions[columns] > positions[rows, None], -torch.inf)
        return scores, bent.square_().neg_().add_(1.0)


def _blocks(count: int, end: int | None = None) -> Iterator[slice]:
    """Yield blocks of `count` rows, as far as they begin before `end`."""
    for start in range(0, count if end is None else min(count, end), BLOCK):
        yield slice(start, min(start + BLOCK, count))
