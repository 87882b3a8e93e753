"""Packing: exact isolation of sequences, alignment of targets, completeness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.data.packing import (
    Layout,
    MicrobatchInputs,
    PackedBatch,
    PromptBlock,
    check_lengths,
    pack_sequences,
    shared_token_fraction,
    to_tensors,
)
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


def visible(inputs: MicrobatchInputs, slot: int) -> list[int]:
    """Return the slots that a slot attends to, itself included, in the order of their positions."""
    row_tokens = inputs.input_ids.shape[1]
    if inputs.structure is None:
        return list(range(slot // row_tokens * row_tokens, slot + 1))
    forest = inputs.structure
    path = forest.path(int(forest.segment_of_tokens[slot]))
    ranges = [range(forest.starts[one], forest.starts[one] + forest.lengths[one]) for one in path]
    return [token for tokens in ranges for token in tokens if token <= slot]


def packed_logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """Log-probabilities of the step's tokens, in their order."""
    result = torch.full((len(batch.token_ids),), torch.nan)
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch)
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


@given(SHAPES, st.integers(1, 60), st.booleans(), st.sampled_from(["forest", "rows"]))
def test_packing_places_trained_tokens_after_their_context(
    shapes: list[tuple[int, list[int]]], budget: int, share: bool, layout: Layout
) -> None:
    prompted, token_ids = sequences(shapes)
    batch = pack_sequences(prompted, token_ids, budget, share=share, layout=layout)
    seen = []
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch)
        flat_ids, flat_positions = inputs.input_ids.flatten(), inputs.position_ids.flatten()
        for token, source, target in zip(
            inputs.tokens.tolist(), inputs.source.tolist(), inputs.targets.tolist(), strict=True
        ):
            seen.append(token)
            assert target == token_ids[token]
            item, start = next(
                (item, start) for item in prompted for start, stop in item.spans if start <= token < stop
            )
            context = [*item.prompt_ids.tolist(), *token_ids[start:token].tolist()]
            # The source slot attends to the sequence up to it, at positions 0, 1, 2, ...
            slots = visible(inputs, source)
            assert flat_ids[slots].tolist() == context
            assert flat_positions[slots].tolist() == list(range(len(context)))
    assert sorted(seen) == list(range(len(token_ids)))


@pytest.mark.parametrize(
    ("kind", "tied", "share", "budget"), covering(KINDS, [True, False], [True, False], [40, 10_000])
)
def test_packed_logprobs_equal_single_sequences(
    tiny: Callable[..., Any], kind: str, tied: bool, share: bool, budget: int
) -> None:
    model = tiny(kind, tied=tied)
    prompted, token_ids = sequences([(5, [3, 1, 7, 4]), (1, [2]), (9, [8, 8, 1]), (2, [30])])
    with torch.no_grad():
        expected = plain_logprobs(model, prompted, token_ids)
    for layout in ("forest", "rows"):
        batch = pack_sequences(prompted, token_ids, budget, share=share, layout=layout)
        torch.testing.assert_close(packed_logprobs(model, batch), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "tied", "budget"), covering(KINDS, [True, False], [60, 10_000]))
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
    batch, parts = pack_sequences(prompted, token_ids, budget), []
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch)
        logprobs, _ = token_logprobs(model, inputs, chunk_tokens=16)
        parts.append((logprobs * weights[torch.from_numpy(inputs.tokens)]).sum())
    for name, found, expected in zip(names, gradients(*parts), alone, strict=True):
        assert torch.linalg.vector_norm(found - expected) <= 2e-6 * torch.linalg.vector_norm(expected), name


@pytest.mark.parametrize(("kind", "layout", "lengths"), covering(KINDS, ["forest", "rows"], [[5, 6], [40, 70]]))
def test_packing_isolates_sequences_bitwise(
    tiny: Callable[..., Any], kind: str, layout: Layout, lengths: list[int]
) -> None:
    model = tiny(kind)
    prompted, token_ids = sequences([(4, lengths), (3, lengths), (6, [9])])
    spans = [span for item in prompted for span in item.spans]
    for number, (start, _) in enumerate(spans):
        token_ids[start] = number  # no two sequences share a token of a completion, before or after a change
    before = packed_logprobs(model, pack_sequences(prompted, token_ids, 1000, layout=layout))
    for start, stop in spans:
        changed = token_ids.copy()
        changed[start + 1 : stop] = (changed[start + 1 : stop] + 1) % 31
        after = packed_logprobs(model, pack_sequences(prompted, changed, 1000, layout=layout))
        others = torch.ones(len(token_ids), dtype=torch.bool)
        others[start:stop] = False
        assert torch.equal(after[others], before[others])
        assert not torch.equal(after[start:stop], before[start:stop])


def test_packing_isolates_prompts_bitwise(tiny: Callable[..., Any]) -> None:
    model = tiny()
    prompted, token_ids = sequences([(4, [5, 6]), (3, [7]), (6, [9])])
    for number, item in enumerate(prompted):
        item.prompt_ids[0] = number
    before = packed_logprobs(model, pack_sequences(prompted, token_ids, 1000))
    changed = (prompted[1].prompt_ids + np.array([0, 1, 1], np.int32)) % 31
    prompted[1] = PromptBlock(changed, prompted[1].spans)
    after = packed_logprobs(model, pack_sequences(prompted, token_ids, 1000))
    start, stop = prompted[1].spans[0]
    assert torch.equal(after[:start], before[:start])
    assert torch.equal(after[stop:], before[stop:])
    assert not torch.equal(after[start:stop], before[start:stop])


def test_packing_shared_prompt_saves_slots() -> None:
    prompted, token_ids = sequences([(50, [5] * 8)])
    for number, (start, _) in enumerate(prompted[0].spans):
        token_ids[start] = number
    shared = pack_sequences(prompted, token_ids, 1000)
    apart = pack_sequences(prompted, token_ids, 1000, share=False)
    assert sum(microbatch.num_token_slots for microbatch in shared.plan) == 50 + 8 * 4
    assert sum(microbatch.num_token_slots for microbatch in apart.plan) == 8 * 54
    assert shared_token_fraction([shared]) == pytest.approx(1 - 82 / (8 * 54))
    assert shared_token_fraction([apart]) == 0.0


def test_packing_shares_turns_of_a_conversation_and_documents_of_several_prompts() -> None:
    document = np.arange(40, dtype=np.int32)
    first, second = (np.array([*document, 50 + n, 51, 52], dtype=np.int32) for n in range(2))
    turns = np.array([*first, *range(60, 90)], dtype=np.int32)  # the first prompt, its reply, and the next question
    prompted = [PromptBlock(first, ((0, 31),)), PromptBlock(second, ((31, 36),)), PromptBlock(turns, ((36, 39),))]
    token_ids = np.array([*range(60, 91), 7, 7, 7, 7, 7, 8, 8, 8], dtype=np.int32)
    batch = pack_sequences(prompted, token_ids, 1000)
    (microbatch,) = batch.plan
    assert microbatch.num_token_slots == 40 + (3 + 30) + (3 + 4) + 2
    assert batch.num_unshared == 73 + 47 + 75


@pytest.mark.parametrize("layout", ["forest", "rows"])
def test_packing_stays_within_budget(layout: Layout) -> None:
    prompted, token_ids = sequences([(50, [20] * 8)])
    for budget in range(69, 220, 7):
        plan = pack_sequences(prompted, token_ids, budget, layout=layout).plan
        assert all(microbatch.num_token_slots <= budget for microbatch in plan)


@pytest.mark.parametrize("layout", ["forest", "rows"])
def test_packing_together_keeps_completions_of_a_prompt_in_one_microbatch(layout: Layout) -> None:
    prompted, token_ids = sequences([(5, [3, 9]), (7, [2, 2]), (3, [8, 1])])
    batch = pack_sequences(prompted, token_ids, 20, layout=layout, together=True)
    assert len(batch.plan) > 1
    for microbatch in batch.plan:
        assert all((number ^ 1) in microbatch.sequences for number in microbatch.sequences)


def test_packing_too_long_sequence_is_refused() -> None:
    prompted, _ = sequences([(5, [3, 8])])
    check_lengths(prompted, 13)
    check_lengths(prompted, None)
    with pytest.raises(ConfigError, match="13 tokens exceeds the 12"):
        check_lengths(prompted, 12)
