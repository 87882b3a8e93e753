"""Rows of segments, and their attention by a dense mask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.attention.forest import Forest


@st.composite
def forests(draw: st.DrawFn, *, most: int = 12) -> Forest:
    """Draw a forest of up to nine segments: each begins a tree, or continues one on the path of the one before it."""
    lengths: list[int] = []
    parents: list[int] = []
    for number in range(draw(st.integers(1, 9))):
        choices, segment = [-1], number - 1
        while segment >= 0:
            choices.append(segment)
            segment = parents[segment]
        parents.append(draw(st.sampled_from(choices)))
        lengths.append(draw(st.integers(1, most)))
    return Forest(tuple(lengths), tuple(parents))


def dense(forest: Forest, window: int | None) -> npt.NDArray[np.bool_]:
    """Return which keys (second axis) each query sees, from the path of each segment."""
    segments, positions = forest.segment_of_tokens, forest.positions
    on_path = np.zeros((len(forest.lengths), len(forest.lengths)), dtype=np.bool_)
    for segment in range(len(forest.lengths)):
        on_path[segment, forest.path(segment)] = True
    distances = positions[:, None] - positions[None]
    seen: npt.NDArray[np.bool_] = on_path[segments][:, segments] & (distances >= 0)
    return seen if window is None else seen & (distances < window)


def inputs_of(forest: Forest, heads: tuple[int, int], value_size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(forest.num_tokens)
    shapes = ((heads[0], 8), (heads[1], 8), (heads[1], value_size))
    return [
        torch.randn(forest.num_tokens, *shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes
    ]


def results(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of a sum with fixed weights."""
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def plain(
    inputs: list[Tensor],
    seen: npt.NDArray[np.bool_],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    query, key, value = inputs
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks[:, None, None].expand(-1, len(query), -1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(repeats, 1))
