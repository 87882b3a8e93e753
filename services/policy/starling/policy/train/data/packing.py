"""Stop 7 of the walk, pack: the sequences of a step become microbatches of tensors.

A sequence is a prompt and one completion. A *block* is a prompt followed by one or more of its completions, and is what
`starling.algo.packing` puts into rows: with several completions the prompt is computed once for all of them. A
completion attends to its prompt and itself, never to its siblings or another block, so each sequence is computed as if
it were alone. Legend of shapes: R rows, L row length, N trained tokens of the microbatch, T of the step, C completion
tokens of the step, trained or not.

The images of a prompt are repeated with each of its blocks, in the order of their tokens: row by row.

The last token of a completion predicts nothing and is therefore no input: a block takes prompt + sum(completion - 1)
token slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from starling.algo import packing
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.tensors import POSITION_IDS
from starling.policy.train.data.groups import Flags, IntArray

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlock:
    """A prompt and its trained completions, as [start, stop) spans of the step's C tokens."""

    prompt_ids: IntArray
    spans: tuple[tuple[int, int], ...]
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Model inputs of the prompt's images, and token positions; see `ScoredGroup`."""

    @property
    def num_token_slots(self) -> int:
        """Input tokens of the block."""
        return len(self.prompt_ids) + sum(stop - start - 1 for start, stop in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The sequences of a step, packed: microbatches of blocks."""

    blocks: tuple[PromptBlock, ...]
    plan: tuple[packing.Microbatch, ...]
    padding_waste: float
    """Share of token slots that are empty."""

    @property
    def lengths(self) -> list[int]:
        """Token slots of each block: no block attends to another."""
        return [block.num_token_slots for block in self.blocks]

    @property
    def num_sequences(self) -> int:
        """Completions of all blocks."""
        return sum(len(block.spans) for block in self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchInputs:
    """Model inputs of one microbatch, and which outputs are trained."""

    input_ids: Tensor
    """int64 [R, L]; 0 in empty slots."""
    position_ids: Tensor
    """int64 [R, L], from 0 in each sequence; [3, R, L] (time, height, width) where a prompt has images."""
    attention_mask: Tensor
    """[R or 1, 1, L, L], added to the attention scores: 0 where attention is allowed, else the least finite number."""
    source: Tensor
    """int64 [N]: the slot of R x L whose output predicts each trained token."""
    targets: Tensor
    """int64 [N]: the trained tokens."""
    tokens: Index
    """int64 [N], on the CPU: index of each trained token among the step's T tokens."""
    segments: Index
    """int64 [R * L], on the CPU: the segment (a prompt, or a completion without its last token) of each slot; -1 in
    empty slots."""
    sequences: Index
    """int64 [S, 2], on the CPU: the segments of the prompt and of the completion of each sequence."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further model arguments by name: the pixels of all prompts, end to end."""


def check_lengths(blocks: Sequence[PromptBlock], longest: int | None) -> None:
    """Refuse sequences of more than `longest` tokens, the model's limit.

    Raises:
        ConfigError: names the length and the limit.
    """
    for block in blocks:
        tokens = len(block.prompt_ids) + max(stop - start for start, stop in block.spans)
        if longest is not None and tokens > longest:
            raise ConfigError(
                f"a sequence of {counted(tokens, 'token')} exceeds the {longest} that the model can attend to: "
                "shorten the prompts or lower max_tokens"
            )


def pack_sequences(
    prompts: Sequence[PromptBlock],
    tokens_per_microbatch: int,
    *,
    share_prompts: bool = True,
    together: bool = False,
    pair_cost: float = packing.PAIR_COST,
) -> PackedBatch:
    """Divide the step's completions over blocks, rows and microbatches, at the least cost.

    With `share_prompts`, blocks of 1, 2, 4, ... and all completions of a prompt are tried. Sharing saves the slots of
    prompts; longer blocks cost more attention. See `starling.algo.packing.plan_microbatches` for the cost. A prompt
    with images, which cost most, is always shared by as many completions as the budget allows. With `together`, all
    completions of a prompt are in one block at any cost, because a loss compares them.
    """
    most = max((len(prompt.spans) for prompt in prompts), default=1) if share_prompts or together else 1
    sizes = {most} if together else {min(2**power, most) for power in range(most.bit_length() + 1)}
    best: tuple[float, PackedBatch] | None = None
    for size in sorted(sizes):
        blocks = tuple(
            block
            for prompt in prompts
            for block in (
                _split_to_budget(prompt, tokens_per_microbatch)
                if prompt.extra and share_prompts and not together
                else _split(prompt, size)
            )
        )
        lengths = [block.num_token_slots for block in blocks]
        if best is not None and max(lengths) > tokens_per_microbatch:
            break  # Sharing must not make a block that exceeds the budget.
        plan = packing.plan_microbatches(lengths, tokens_per_microbatch, pair_cost=pair_cost)
        cost = packing.cost(plan, pair_cost)
        if best is None or cost < best[0]:
            best = cost, PackedBatch(blocks, tuple(plan), packing.padding_waste(plan, lengths))
    assert best is not None
    return best[1]


def to_tensors(
    batch: PackedBatch,
    microbatch: packing.Microbatch,
    token_ids: IntArray,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trained: Flags | None = None,
) -> MicrobatchInputs:
    """Return the tensors of one microbatch.

    Args:
        batch: of the step.
        microbatch: one of its plan.
        token_ids: the step's completion tokens, [C], to which the blocks' spans refer.
        dtype: of the attention mask: the model's.
        device: of the model.
        trained: which of the C tokens are the T trained ones; the others are context. None where all are.
    """
    shape = (len(microbatch.rows), microbatch.row_tokens)
    pieces, segments, spans, with_images = _lay_out(batch, microbatch, token_ids)
    slots = _ranges(segments.slot, segments.length)
    ids = np.zeros(shape[0] * shape[1], dtype=np.int64)
    ids[slots] = np.concatenate(pieces)
    tokens = _ranges(spans.start, spans.length)
    source = _ranges(spans.slot - 1, spans.length)
    # The first token of a completion is predicted by its prompt's last slot, wherever the completion itself lies.
    source[np.cumsum(spans.length) - spans.length] = spans.prompt_end
    targets, numbers = token_ids[tokens], tokens
    if trained is not None:
        wanted = trained[tokens]
        source, targets = source[wanted], targets[wanted]
        numbers = (np.cumsum(trained, dtype=np.int64) - 1)[tokens[wanted]]
    is_completion = segments.parent != np.arange(len(segments.parent))
    return MicrobatchInputs(
        input_ids=torch.from_numpy(ids).view(shape).to(device),
        position_ids=torch.from_numpy(_positions(segments, slots, shape, with_images)).to(device),
        attention_mask=_attention_mask(segments, slots, shape, dtype).to(device),
        source=torch.from_numpy(source).to(device),
        targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        tokens=numbers,
        segments=segments.of_slots(slots, shape[0] * shape[1]),
        sequences=np.stack([segments.parent[is_completion], np.flatnonzero(is_completion)], axis=1),
        extra={name: torch.from_numpy(array).to(device) for name, array in _join_extra(with_images).items()},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """Runs of input tokens: prompts, and completions without their last token."""

    slot: Index
    length: Index
    position: Index
    """Position id of the first token."""
    parent: Index
    """Number of the segment that this one attends to besides itself: its prompt; a prompt's own number."""

    def of_slots(self, slots: Index, num_slots: int) -> Index:
        """Return the segment of each of `num_slots` slots, of which `slots` are taken; -1 in the others."""
        own = np.full(num_slots, -1, dtype=np.int64)
        own[slots] = np.repeat(np.arange(len(self.length)), self.length)
        return own


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Completions: their positions among the step's tokens and in the rectangle."""

    start: Index
    length: Index
    slot: Index
    prompt_end: Index


_ImageBlock = tuple[int, PromptBlock]
"""A block with images, and its first slot."""


def _lay_out(
    batch: PackedBatch, microbatch: packing.Microbatch, token_ids: IntArray
) -> tuple[list[IntArray], _Segments, _Spans, list[_ImageBlock]]:
    pieces: list[IntArray] = []
    segments: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    with_images: list[_ImageBlock] = []
    for row, indices in enumerate(microbatch.rows):
        slot = row * microbatch.row_tokens
        for index in indices:
            block = batch.blocks[index]
            prompt, width = len(segments), len(block.prompt_ids)
            pieces.append(block.prompt_ids)
            segments.append((slot, width, 0, prompt))
            after = width
            if block.extra:
                with_images.append((slot, block))
                after = int(block.extra[POSITION_IDS][:, -1].max()) + 1
            slot += width
            prompt_end = slot - 1
            for start, stop in block.spans:
                pieces.append(token_ids[start : stop - 1])
                segments.append((slot, stop - start - 1, after, prompt))
                spans.append((start, stop - start, slot, prompt_end))
                slot += stop - start - 1
    return pieces, _Segments(*_columns(segments)), _Spans(*_columns(spans)), with_images


def _positions(segments: _Segments, slots: Index, shape: tuple[int, int], with_images: Sequence[_ImageBlock]) -> Index:
    """Return the positions of all slots: [R, L], or [3, R, L] with images."""
    positions = np.zeros(shape[0] * shape[1], dtype=np.int64)
    positions[slots] = _ranges(segments.position, segments.length)
    if not with_images:
        return positions.reshape(shape)
    positions = np.repeat(positions[None], 3, axis=0)
    for slot, block in with_images:
        positions[:, slot : slot + len(block.prompt_ids)] = block.extra[POSITION_IDS]
    return positions.reshape(3, *shape)


def _join_extra(with_images: Sequence[_ImageBlock]) -> dict[str, npt.NDArray[Any]]:
    """Return the pixels and grids of all blocks, end to end."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for _, block in with_images:
        for name, array in block.extra.items():
            if name != POSITION_IDS:
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def _columns(rows: list[tuple[int, int, int, int]]) -> list[Index]:
    return list(np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def _ranges(start: Index, length: Index) -> Index:
    """Return start[0], start[0] + 1, ... (length[0] of them), start[1], ..."""
    ends = np.cumsum(length)
    return np.repeat(start - (ends - length), length) + np.arange(ends[-1], dtype=np.int64)


def _attention_mask(segments: _Segments, slots: Index, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    num_rows, row_tokens = shape
    visible = torch.ones(row_tokens, row_tokens, dtype=torch.bool).tril()[None]
    if len(segments.parent) > 2 * num_rows:
        # Empty slots belong to segment -1; they attend to each other, so that no row of the scores is fully masked.
        own = segments.of_slots(slots, num_rows * row_tokens)
        parent = np.append(segments.parent, -1)[own]
        own_RL, parent_RL = (torch.from_numpy(array).view(shape) for array in (own, parent))
        source_R1L = own_RL[:, None, :]
        visible = visible & ((source_R1L == own_RL[:, :, None]) | (source_R1L == parent_RL[:, :, None]))
    # Else each row holds one prompt and one completion from its first slot: causality alone hides the empty slots.
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def _split(prompt: PromptBlock, size: int) -> list[PromptBlock]:
    """Split the completions of a prompt into the fewest blocks of at most `size`, as evenly as possible."""
    count = -(-len(prompt.spans) // size)
    bounds = [len(prompt.spans) * part // count for part in range(count + 1)]
    return [
        PromptBlock(prompt.prompt_ids, prompt.spans[start:stop], prompt.extra)
        for start, stop in itertools.pairwise(bounds)
    ]


def _split_to_budget(prompt: PromptBlock, budget: int) -> list[PromptBlock]:
    """Split the completions of a prompt into the fewest blocks within the budget, or one each if none is."""
    for size in range(len(prompt.spans), 1, -1):
        blocks = _split(prompt, size)
        if max(block.num_token_slots for block in blocks) <= budget:
            return blocks
    return _split(prompt, 1)
