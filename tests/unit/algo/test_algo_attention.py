"""Attention over forests of segments: the pairs, values and gradients of a dense mask, in memory linear in tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_rows import dense, forests, inputs_of, plain, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.attention import short
from starling.algo.attention.flex import BLOCK, visible_blocks
from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend, attention, backends_for
from starling.common.errors import ConfigError

torch.set_num_threads(1)


LARGE = Forest((200, 170, 3, 2, 90, 110), (-1, 0, 1, 1, 0, -1))
WINDOWS = st.none() | st.integers(1, 20)


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


@given(forests(), st.integers(1, 20))
def test_parts_of_whole_segments_cover_each_attended_pair_once(forest: Forest, window: int) -> None:
    """The first level is one causal part for each segment, with the window of the kernel."""
    first, *others = forest.levels(window, whole_segments=True)
    found = np.zeros((forest.num_tokens, forest.num_tokens), dtype=np.int64)
    assert [(part.query, part.num_queries, part.mode) for part in first] == [
        (start, length, "causal") for start, length in zip(forest.starts, forest.lengths, strict=True)
    ]
    for part in (*first, *(part for level in others for part in level)):
        rows, columns = np.arange(part.num_queries)[:, None], np.arange(part.num_keys)[None]
        own = (columns <= rows) & (rows - columns < window)
        seen = {"causal": own, "full": columns >= 0, "reversed": columns >= rows}[part.mode]
        found[part.query : part.query + part.num_queries, part.key : part.key + part.num_keys] += seen
    assert (found == dense(forest, window)).all()


@given(forests())
def test_reach_of_a_sequence_adds_up_to_its_square(forest: Forest) -> None:
    for segment in range(len(forest.lengths)):
        path = forest.path(segment)
        tokens = sum(forest.lengths[one] for one in path)
        assert sum(forest.lengths[one] * forest.reach[one] for one in path) == tokens**2


def check(
    forest: Forest,
    window: int | None,
    heads: tuple[int, int],
    value_size: int = 8,
    softcap: float | None = None,
    with_sinks: bool = False,
    backend: Backend = "segments",
) -> None:
    inputs = inputs_of(forest, heads, value_size, torch.float64)
    rows = inputs[:3]
    sinks = torch.linspace(-2.0, 3.0, heads[0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    inputs += [sinks] if sinks is not None else []
    found = results(attention(*rows, forest, 0.3, window=window, softcap=softcap, sinks=sinks, backend=backend), inputs)
    expected = results(plain(rows, dense(forest, window), 0.3, softcap, sinks), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-11)


@pytest.mark.parametrize("short_tokens", [0, 1000], ids=["kernels", "short"])
@settings(max_examples=settings().max_examples // 2)
@given(forests(most=12) | forests(most=90), WINDOWS, st.sampled_from([(1, 1), (3, 3), (6, 2)]), st.sampled_from([8, 5]))
def test_values_and_gradients_equal_a_dense_mask(
    short_tokens: int, forest: Forest, window: int | None, heads: tuple[int, int], value_size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short, "SHORT_TOKENS", short_tokens)
        check(forest, window, heads, value_size)


def test_short_sequences_of_many_sizes_equal_a_dense_mask() -> None:
    """Several batches, as padding all to one size would cost more."""
    lengths = (60, *([4] * 20), 3, *([2] * 30), 90, *([38] * 6), 1)
    parents = (-1, *([0] * 20), -1, *([21] * 30), -1, *([52] * 6), -1)
    check(Forest(lengths, parents), None, (4, 2))
    check(Forest(lengths, parents), 7, (4, 2))


@pytest.mark.parametrize("short_tokens", [0, 128], ids=["kernels", "short"])
@pytest.mark.parametrize(("softcap", "with_sinks", "backend"), [(None, False, "segments"), (0.4, True, "varlen")])
def test_values_wider_than_queries_equal_a_dense_mask(
    short_tokens: int, softcap: float | None, with_sinks: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "SHORT_TOKENS", short_tokens)
    check(Forest((3, 2, 2), (-1, 0, 0)), 4, (4, 2), 13, softcap, with_sinks, backend)


@settings(max_examples=settings().max_examples // 4)
@given(forests(most=40), WINDOWS, st.sampled_from([(3, 3), (6, 2)]), st.booleans())
def test_cascade_over_levels_equals_a_dense_mask(
    forest: Forest, window: int | None, heads: tuple[int, int], with_sinks: bool
) -> None:
    check(forest, window, heads, with_sinks=with_sinks, backend="varlen")


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@settings(max_examples=settings().max_examples // 4)
@given(forests(most=100), st.none() | st.integers(1, 300), st.sampled_from([None, 0.4]), st.booleans())
def test_flex_attention_equals_a_dense_mask(
    forest: Forest, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    inputs = [one.detach() for one in inputs_of(forest, (4, 2), 8, torch.float32)]
    sinks = torch.linspace(-2.0, 3.0, 4) if with_sinks else None
    found = attention(*inputs, forest, 0.3, window=window, softcap=softcap, sinks=sinks, backend="flex")
    expected = plain(inputs, dense(forest, window), 0.3, softcap, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.campaign
@given(forests(most=400), st.none() | st.integers(1, 500))
def test_blocks_of_the_mask_hold_what_is_seen(forest: Forest, window: int | None) -> None:
    some, whole = visible_blocks(forest, window)
    size = len(some) * BLOCK
    seen = np.zeros((size, size), dtype=np.bool_)
    seen[: forest.num_tokens, : forest.num_tokens] = dense(forest, window)
    blocks = seen.reshape(len(some), BLOCK, len(some), BLOCK)
    assert (some >= blocks.any((1, 3))).all()
    if window is None:
        assert (some == blocks.any((1, 3))).all()
    assert (whole == blocks.all((1, 3))).all()


def test_flex_attention_has_no_gradients_on_a_cpu() -> None:
    inputs = inputs_of(LARGE, (2, 1), 8, torch.float32)
    with pytest.raises(ConfigError, match=r"no backward pass on a CPU.*policy\.attention"):
        attention(*inputs, LARGE, 0.3, backend="flex")


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "softcap", "expected"),
    [
        (CPU, torch.bfloat16, 128, None, ("segments",)),
        (CUDA, torch.bfloat16, 128, None, ("varlen", "segments")),
        (CUDA, torch.bfloat16, 512, None, ("segments",)),
        (CUDA, torch.float32, 128, None, ("segments",)),
        (CUDA, torch.bfloat16, 128, 50.0, ("flex", "segments")),
    ],
)
def test_backends_are_chosen_by_device(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None, expected: tuple[str, ...]
) -> None:
    assert backends_for("auto", device, dtype, head_dim, softcap=softcap) == expected
    assert backends_for("segments", device, dtype, head_dim, softcap=softcap) == ("segments",)


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "softcap", "reason"),
    [
        ("flex", CPU, torch.float32, None, "'flex' has no backward pass on cpu"),
        ("varlen", CUDA, torch.float32, None, "'varlen' has no kernel for float32 and heads of 64"),
        ("varlen", CPU, torch.float32, 50.0, "'varlen' has no soft caps"),
    ],
)
def test_backends_that_cannot_compute_a_model_are_refused(
    choice: Any, device: torch.device, dtype: torch.dtype, softcap: float | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        backends_for(choice, device, dtype, 64, softcap=softcap)


@pytest.mark.parametrize("window", [None, 33, 150])
def test_large_segments_equal_a_dense_mask(window: int | None) -> None:
    """Parts too large for a batched call, and small ones beside them."""
    check(LARGE, window, (2, 1))
    check(LARGE, window, (2, 1), backend="varlen")


@pytest.mark.sample(2)
@pytest.mark.parametrize("forest", [LARGE, Forest((1100, 30, 600), (-1, 0, 0)), Forest((5,), (-1,))])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.4, False), (None, True), (3.0, True)])
def test_soft_caps_and_sinks_equal_a_dense_mask(
    forest: Forest, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    check(forest, window, (4, 2), 8, softcap, with_sinks)


def test_many_tiny_segments_below_a_prompt_are_left_to_the_kernels() -> None:
    """Copies of the prompt's keys for each of them would take more memory than all else."""
    assert short.is_short(Forest((100, *([12] * 8)), (-1, *([0] * 8))))
    assert not short.is_short(Forest((100, *([1] * 60)), (-1, *([0] * 60))))


@pytest.mark.parametrize("short_tokens", [0, 128], ids=["kernels", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_exact_as_its_arithmetic(
    dtype: torch.dtype, short_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "SHORT_TOKENS", short_tokens)
    forest = Forest((40, 9, 5, 5, 12), (-1, 0, 1, 1, 0))
    inputs = inputs_of(forest, (4, 2), 8, dtype)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    found = results(attention(*inputs, forest, 0.3), inputs)
    expected = results(plain(wide, dense(forest, None), 0.3), wide)
    bound = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert torch.linalg.vector_norm(one.double() - other) <= bound * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_memory_is_linear_in_tokens(softcap: float | None) -> None:
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
        results(attention(*inputs, forest, 0.3, softcap=softcap), inputs)
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
