"""Attention over forests of segments: the pairs, values and gradients of a dense mask, in memory linear in tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.common.errors import ConfigError

torch.set_num_threads(1)


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


WINDOWS = st.none() | st.integers(1, 20)


def dense(forest: Forest, window: int | None) -> npt.NDArray[np.bool_]:
    """Return which keys (second axis) each query sees, from the path of each segment."""
    segments, positions = forest.segment_of_tokens, forest.positions
    on_path = np.zeros((len(forest.lengths), len(forest.lengths)), dtype=np.bool_)
    for segment in range(len(forest.lengths)):
        on_path[segment, forest.path(segment)] = True
    distances = positions[:, None] - positions[None]
    seen: npt.NDArray[np.bool_] = on_path[segments][:, segments] & (distances >= 0)
    return seen if window is None else seen & (distances < window)


@given(forests(), WINDOWS, st.sampled_from([0, 0, 10, 30, 1000]))
def test_parts_cover_each_attended_pair_once(forest: Forest, window: int | None, masked_tokens: int) -> None:
    found = np.zeros((forest.num_tokens, forest.num_tokens), dtype=np.int64)
    for number, level in enumerate(forest.levels(window, masked_tokens)):
        queries = np.zeros(forest.num_tokens, dtype=np.int64)
        for part in level:
            rows, columns = np.arange(part.num_queries)[:, None], np.arange(part.num_keys)[None]
            if part.mode == "masked":
                assert part.num_keys <= masked_tokens
                seen = forest.visible(part.key, part.key + part.num_keys, window)
            else:
                seen = {"causal": columns <= rows, "full": columns >= 0, "reversed": columns >= rows}[part.mode]
            found[part.query : part.query + part.num_queries, part.key : part.key + part.num_keys] += seen
            queries[part.query : part.query + part.num_queries] += 1
            assert part.mode == "full" or part.num_queries == part.num_keys
        assert (queries == 1).all() if number == 0 else (queries <= 1).all()
    expected = dense(forest, window)
    assert (found == expected).all()
    assert forest.num_pairs(window) == expected.sum()


@given(forests())
def test_reach_of_a_sequence_adds_up_to_its_square(forest: Forest) -> None:
    for segment in range(len(forest.lengths)):
        path = forest.path(segment)
        tokens = sum(forest.lengths[one] for one in path)
        assert sum(forest.lengths[one] * forest.reach[one] for one in path) == tokens**2


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


def plain(inputs: list[Tensor], seen: npt.NDArray[np.bool_], scale: float) -> Tensor:
    query, key, value = inputs
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    weights = scores.masked_fill(~torch.from_numpy(seen), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(repeats, 1))


def check(forest: Forest, window: int | None, heads: tuple[int, int], value_size: int = 8) -> None:
    inputs = inputs_of(forest, heads, value_size, torch.float64)
    found = results(attention(*inputs, forest, 0.3, window=window), inputs)
    expected = results(plain(inputs, dense(forest, window), 0.3), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-11)


@settings(max_examples=settings().max_examples // 2)
@given(forests(most=12) | forests(most=90), WINDOWS, st.sampled_from([(1, 1), (3, 3), (6, 2)]), st.sampled_from([8, 5]))
def test_values_and_gradients_equal_a_dense_mask(
    forest: Forest, window: int | None, heads: tuple[int, int], value_size: int
) -> None:
    check(forest, window, heads, value_size)


@pytest.mark.parametrize("window", [None, 33, 150])
def test_large_segments_equal_a_dense_mask(window: int | None) -> None:
    """Parts too large for a batched call, and small ones beside them."""
    check(Forest((200, 170, 3, 2, 90, 110), (-1, 0, 1, 1, 0, -1)), window, (2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_exact_as_its_arithmetic(dtype: torch.dtype) -> None:
    forest = Forest((40, 9, 5, 5, 12), (-1, 0, 1, 1, 0))
    inputs = inputs_of(forest, (4, 2), 8, dtype)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    found = results(attention(*inputs, forest, 0.3), inputs)
    expected = results(plain(wide, dense(forest, None), 0.3), wide)
    bound = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert torch.linalg.vector_norm(one.double() - other) <= bound * torch.linalg.vector_norm(other)


def test_memory_is_linear_in_tokens() -> None:
    """A segment of 3,000 tokens over 6,000 of ancestors: no number for each pair exists, forward or backward."""
    forest = Forest((6000, 3000), (-1, 0))
    inputs = [one.detach().float().requires_grad_() for one in inputs_of(forest, (1, 1), 8, torch.float32)]

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple | list) else (found,):
                if isinstance(one, Tensor):
                    self.elements = max(self.elements, one.numel())
            return found

    with Largest() as largest:
        results(attention(*inputs, forest, 0.3), inputs)
    assert largest.elements <= 2 * 9000 * 8


@pytest.mark.parametrize(
    ("lengths", "parents", "reason"),
    [((2, 0), (-1, 0), "has 0 tokens"), ((2, 3), (-1,), "1 parents"), ((1, 1, 1), (-1, -1, 0), "the parent 0")],
)
def test_invalid_forests_are_rejected(lengths: tuple[int, ...], parents: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Forest(lengths, parents)


def test_devices_without_a_fused_kernel_are_refused() -> None:
    rows = torch.zeros(3, 1, 8, device="meta")
    with pytest.raises(ConfigError, match=r"float32 on meta.*model\.device"):
        attention(rows, rows, rows, Forest((3,), (-1,)), 1.0)
