"""Packing: exact isolation of sequences, alignment of targets, completeness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.packing import Microbatch
from starling.common.errors import ConfigError
from starling.policy.train.data.packing import PackedBatch, PromptBlock, check_lengths, pack_sequences, to_tensors
from starling.policy.train.loss.logprobs import token_logprobs

torch.set_num_threads(1)

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=6
)


def sequences(shapes: list[tuple[int, list[int]]], seed: int = 0) -> tuple[list[PromptBlock], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    prompted, end = [], 0
    for prompt, lengths in shapes:
        spans = []
        for length in lengths:
            spans.append((end, end + length))
            end += length
        prompted.append(PromptBlock(generator.integers(31, size=prompt).astype(np.int32), tuple(spans)))
    return prompted, generator.integers(31, size=end).astype(np.int32)


def one_row(prompted: list[PromptBlock]) -> PackedBatch:
    rows = (tuple(range(len(prompted))),)
    return PackedBatch(tuple(prompted), (Microbatch(rows, sum(item.num_token_slots for item in prompted)),), 0.0)


def packed_logprobs(model: Any, batch: PackedBatch, token_ids: np.ndarray[Any, Any]) -> Tensor:
    """Log-probabilities of the step's tokens, in their order."""
    result = torch.full((len(token_ids),), torch.nan)
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch, token_ids)
        with torch.no_grad():
            logprobs, _ = token_logprobs(model, inputs, chunk_tokens=16)
        result[torch.from_numpy(inputs.tokens)] = logprobs
    return result


def plain_logprobs(model: Any, prompted: list[PromptBlock], token_ids: np.ndarray[Any, Any]) -> Tensor:
    """The same, one sequence at a time, by the model alone."""
    parts = []
    for item in prompted:
        for start, stop in item.spans:
            ids = torch.from_numpy(np.concatenate([item.prompt_ids, token_ids[start:stop]]).astype(np.int64))[None]
            logits = model(ids).logits[0, len(item.prompt_ids) - 1 : -1]
            parts.append(logits.log_softmax(-1).gather(-1, ids[0, len(item.prompt_ids) :, None])[:, 0])
    return torch.cat(parts)


@given(SHAPES, st.integers(1, 60), st.booleans())
def test_packing_places_trained_tokens_after_their_context(
    shapes: list[tuple[int, list[int]]], budget: int, share: bool
) -> None:
    prompted, token_ids = sequences(shapes)
    batch = pack_sequences(prompted, budget, share_prompts=share)
    seen = []
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch, token_ids)
        flat_ids, flat_positions = inputs.input_ids.flatten(), inputs.position_ids.flatten()
        row_tokens = inputs.input_ids.shape[1]
        mask = inputs.attention_mask.expand(len(inputs.input_ids), -1, -1, -1)[:, 0] == 0
        for token, source, target in zip(
            inputs.tokens.tolist(), inputs.source.tolist(), inputs.targets.tolist(), strict=True
        ):
            seen.append(token)
            assert target == token_ids[token]
            item, start = next(
                (item, start) for item in prompted for start, stop in item.spans if start <= token < stop
            )
            context = [*item.prompt_ids.tolist(), *token_ids[start:token].tolist()]
            row, column = divmod(source, row_tokens)
            visible = torch.nonzero(mask[row, column]).flatten() + row * row_tokens
            # What the source cell attends to is the sequence up to it, at positions 0, 1, 2, ...
            assert flat_ids[visible].tolist() == context
            assert flat_positions[visible].tolist() == list(range(len(context)))
    assert sorted(seen) == list(range(len(token_ids)))


@given(SHAPES, st.booleans())
def test_packing_every_slot_attends_to_itself(shapes: list[tuple[int, list[int]]], share: bool) -> None:
    prompted, token_ids = sequences(shapes)
    batch = pack_sequences(prompted, 1000, share_prompts=share)
    for microbatch in batch.plan:
        mask = to_tensors(batch, microbatch, token_ids).attention_mask[:, 0]
        assert (mask.diagonal(dim1=-2, dim2=-1) == 0).all()
        later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
        assert (mask[:, later] == torch.finfo(mask.dtype).min).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [40, 10_000])
def test_packed_logprobs_equal_single_sequences(
    tiny: Callable[..., Any], kind: str, tied: bool, share: bool, budget: int
) -> None:
    model = tiny(kind, tied=tied)
    prompted, token_ids = sequences([(5, [3, 1, 7, 4]), (1, [2]), (9, [8, 8, 1]), (2, [30])])
    batch = pack_sequences(prompted, budget, share_prompts=share)
    with torch.no_grad():
        expected = plain_logprobs(model, prompted, token_ids)
    torch.testing.assert_close(packed_logprobs(model, batch, token_ids), expected, rtol=2e-6, atol=1e-6)
    everything = one_row(prompted)
    torch.testing.assert_close(packed_logprobs(model, everything, token_ids), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [60, 10_000])
def test_packed_gradients_equal_single_sequences(tiny: Callable[..., Any], kind: str, tied: bool, budget: int) -> None:
    # Weights of the usual size: wider ones make the gradients themselves more sensitive to rounding than 2e-6.
    model = tiny(kind, tied=tied, initializer_range=0.05)
    prompted, token_ids = sequences([(5, [3, 1, 7, 4]), (1, [2]), (9, [8, 8, 1]), (2, [30])])
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(len(token_ids))).float()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients(*parts: Tensor) -> list[Tensor]:
        each = [torch.autograd.grad(part, parameters) for part in parts]
        return [torch.stack(found).sum(dim=0) for found in zip(*each, strict=True)]

    alone = gradients((plain_logprobs(model, prompted, token_ids) * weights).sum())
    batch, parts = pack_sequences(prompted, budget), []
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch, token_ids)
        logprobs, _ = token_logprobs(model, inputs, chunk_tokens=16)
        parts.append((logprobs * weights[torch.from_numpy(inputs.tokens)]).sum())
    for name, found, expected in zip(names, gradients(*parts), alone, strict=True):
        assert torch.linalg.vector_norm(found - expected) <= 2e-6 * torch.linalg.vector_norm(expected), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[5, 6], [40, 70]])
def test_packing_isolates_sequences_bitwise(
    tiny: Callable[..., Any], kind: str, attention: str, lengths: list[int]
) -> None:
    model = tiny(kind)
    model.set_attn_implementation(attention)
    prompted, token_ids = sequences([(4, lengths), (3, lengths), (6, [9])])
    batch = one_row(prompted)
    before = packed_logprobs(model, batch, token_ids)
    for start, stop in [span for item in prompted for span in item.spans]:
        changed = token_ids.copy()
        changed[start:stop] = (changed[start:stop] + 1) % 31
        after = packed_logprobs(model, batch, changed)
        others = torch.ones(len(token_ids), dtype=torch.bool)
        others[start:stop] = False
        assert torch.equal(after[others], before[others])
        assert not torch.equal(after[start:stop], before[start:stop])


def test_packing_isolates_blocks_bitwise(tiny: Callable[..., Any]) -> None:
    model = tiny()
    prompted, token_ids = sequences([(4, [5, 6]), (3, [7]), (6, [9])])
    before = packed_logprobs(model, one_row(prompted), token_ids)
    prompted[1] = PromptBlock((prompted[1].prompt_ids + 1) % 31, prompted[1].spans)
    after = packed_logprobs(model, one_row(prompted), token_ids)
    start, stop = prompted[1].spans[0]
    assert torch.equal(after[:start], before[:start])
    assert torch.equal(after[stop:], before[stop:])
    assert not torch.equal(after[start:stop], before[start:stop])


def test_packing_shared_prompt_saves_slots() -> None:
    prompted, _ = sequences([(50, [5] * 8)])
    shared = pack_sequences(prompted, 1000)
    apart = pack_sequences(prompted, 1000, share_prompts=False)
    assert sum(batch.num_token_slots for batch in shared.plan) == 50 + 8 * 4
    assert sum(batch.num_token_slots for batch in apart.plan) == 8 * 54


def test_packing_sharing_stays_within_budget() -> None:
    prompted, _ = sequences([(50, [20] * 8)])
    for budget in range(69, 220, 7):
        assert all(batch.num_token_slots <= budget for batch in pack_sequences(prompted, budget).plan)


def test_packing_too_long_sequence_is_refused() -> None:
    prompted, _ = sequences([(5, [3, 8])])
    check_lengths(prompted, 13)
    check_lengths(prompted, None)
    with pytest.raises(ConfigError, match="13 tokens exceeds the 12"):
        check_lengths(prompted, 12)
