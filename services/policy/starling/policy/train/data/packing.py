"""Stop 7 of the walk, pack: the sequences of a step become microbatches of tensors.

A sequence is a prompt and one completion, of whose tokens those count that the model sampled. A *block* is a prompt
followed by one or more of its completions, and is what `starling.algo.packing` puts into rows: with several completions
the prompt is computed once for all of them. A completion sees its prompt and itself, never its siblings nor another
block, so each sequence is computed as if it were alone. Legend of shapes: R rows, L row length, N trained tokens of the
microbatch, T of the step, C completion tokens of the step, trained or not.

The images of a prompt come with each of its blocks, in the order in which the model meets their tokens: row by row.

The last token of a completion predicts nothing and is therefore no input: a block has prompt + sum(completion - 1)
cells.
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
from starling.common.errors import ConfigError
from starling.policy.train.data.groups import POSITIONS, Flags, IntArray

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlock:
    """A prompt and those of its completions that are trained, as [start, stop) spans of the step's C tokens."""

    prompt_ids: IntArray
    spans: tuple[tuple[int, int], ...]
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """What the model takes of the prompt's images, and their positions; see `Group`."""

    @property
    def num_cells(self) -> int:
        """Input tokens of one block that holds all of this."""
        return len(self.prompt_ids) + sum(stop - start - 1 for start, stop in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The sequences of a step, laid out: microbatches of blocks."""

    blocks: tuple[PromptBlock, ...]
    plan: tuple[packing.Microbatch, ...]
    padding_waste: float
    """Share of cells without a token."""

    @property
    def lengths(self) -> list[int]:
        """Cells of each block: none attends to another's."""
        return [block.num_cells for block in self.blocks]


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchInputs:
    """One microbatch as the model takes it, and which of its outputs matter."""

    input_ids: Tensor
    """int64 [R, L]; 0 where a cell is empty."""
    position_ids: Tensor
    """int64 [R, L], from 0 in each sequence; [3, R, L] (time, height, width) where a prompt has images."""
    attention_mask: Tensor
    """[R or 1, 1, L, L], added to the attention scores: 0 where a cell may be seen, else the least finite number."""
    source: Tensor
    """int64 [N]: the cell of R x L whose output predicts each trained token."""
    targets: Tensor
    """int64 [N]: the trained tokens."""
    tokens: Index
    """int64 [N], on the CPU: where each trained token lies among the step's T tokens."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """What the model takes besides, by the names of its arguments: the pixels of all prompts, end to end."""


def check_lengths(prompted: Sequence[PromptBlock], longest: int | None) -> None:
    """Refuse sequences of more than `longest` tokens, the most that the model can take.

    Raises:
        ConfigError: names the length and the limit.
    """
    for item in prompted:
        tokens = len(item.prompt_ids) + max(stop - start for start, stop in item.spans)
        if longest is not None and tokens > longest:
            raise ConfigError(
                f"a sequence of {tokens} tokens exceeds the {longest} that the model can attend to: "
                "shorten the prompts or lower max_tokens"
            )


def pack_sequences(
    prompted: Sequence[PromptBlock],
    tokens_per_microbatch: int,
    *,
    share_prompts: bool = True,
    together: bool = False,
    pair_cost: float = packing.PAIR_COST,
) -> PackedBatch:
    """Divide the step's completions over blocks, rows and microbatches, at the least cost.

    With `share_prompts` the completions of a prompt are tried 1, 2, 4, ... and all to a block. Sharing saves the cells
    of prompts; longer blocks cost more attention. See `starling.algo.packing.plan_microbatches` for the cost. A prompt
    with images, which cost most, is always shared by as many as the budget allows. With `together` all of a prompt's
    completions are in one block, whatever that costs: a loss compares them.
    """
    most = max((len(item.spans) for item in prompted), default=1) if share_prompts or together else 1
    sizes = {most} if together else {min(2**power, most) for power in range(most.bit_length() + 1)}
    best: tuple[float, PackedBatch] | None = None
    for size in sorted(sizes):
        blocks = tuple(
            block
            for item in prompted
            for block in (
                _shared(item, tokens_per_microbatch)
                if item.extra and share_prompts and not together
                else _split(item, size)
            )
        )
        lengths = [block.num_cells for block in blocks]
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
    """Make the tensors of one microbatch.

    Args:
        batch: the layout of the step.
        microbatch: one of its plan.
        token_ids: the step's completion tokens, [C], to which the blocks' spans refer.
        dtype: of the attention mask: the model's.
        device: where the model is.
        trained: which of the C tokens are the T trained ones; the others are context. None where all are.
    """
    shape = (len(microbatch.rows), microbatch.row_tokens)
    pieces, segments, spans, seen = _segments(batch, microbatch, token_ids)
    cells = _ranges(segments.cell, segments.length)
    ids = np.zeros(shape[0] * shape[1], dtype=np.int64)
    ids[cells] = np.concatenate(pieces)
    tokens = _ranges(spans.start, spans.length)
    source = _ranges(spans.cell - 1, spans.length)
    # The first token of a completion is predicted by its prompt's last cell, wherever the completion itself lies.
    source[np.cumsum(spans.length) - spans.length] = spans.prompt_end
    targets, numbers = token_ids[tokens], tokens
    if trained is not None:
        wanted = trained[tokens]
        source, targets = source[wanted], targets[wanted]
        numbers = (np.cumsum(trained, dtype=np.int64) - 1)[tokens[wanted]]
    return MicrobatchInputs(
        input_ids=torch.from_numpy(ids).view(shape).to(device),
        position_ids=torch.from_numpy(_positions(segments, cells, shape, seen)).to(device),
        attention_mask=_attention_mask(segments, cells, shape, dtype).to(device),
        source=torch.from_numpy(source).to(device),
        targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        tokens=numbers,
        extra={name: torch.from_numpy(array).to(device) for name, array in _joined(seen).items()},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """Runs of input tokens: prompts, and completions without their last token."""

    cell: Index
    length: Index
    position: Index
    """Position id of the first token."""
    parent: Index
    """Number of the segment that this one sees besides itself: its prompt; a prompt's own number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Completions: where they lie among the step's tokens, and in the rectangle."""

    start: Index
    length: Index
    cell: Index
    prompt_end: Index


_Seen = tuple[int, PromptBlock]
"""A block with images, and its first cell."""


def _segments(
    batch: PackedBatch, microbatch: packing.Microbatch, token_ids: IntArray
) -> tuple[list[IntArray], _Segments, _Spans, list[_Seen]]:
    pieces: list[IntArray] = []
    segments: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    seen: list[_Seen] = []
    for row, indices in enumerate(microbatch.rows):
        cell = row * microbatch.row_tokens
        for index in indices:
            block = batch.blocks[index]
            prompt, width = len(segments), len(block.prompt_ids)
            pieces.append(block.prompt_ids)
            segments.append((cell, width, 0, prompt))
            after = width
            if block.extra:
                seen.append((cell, block))
                after = int(block.extra[POSITIONS][:, -1].max()) + 1
            cell += width
            prompt_end = cell - 1
            for start, stop in block.spans:
                pieces.append(token_ids[start : stop - 1])
                segments.append((cell, stop - start - 1, after, prompt))
                spans.append((start, stop - start, cell, prompt_end))
                cell += stop - start - 1
    return pieces, _Segments(*_columns(segments)), _Spans(*_columns(spans)), seen


def _positions(segments: _Segments, cells: Index, shape: tuple[int, int], seen: Sequence[_Seen]) -> Index:
    """Return the positions of all cells: [R, L], or [3, R, L] with images."""
    positions = np.zeros(shape[0] * shape[1], dtype=np.int64)
    positions[cells] = _ranges(segments.position, segments.length)
    if not seen:
        return positions.reshape(shape)
    positions = np.repeat(positions[None], 3, axis=0)
    for cell, block in seen:
        positions[:, cell : cell + len(block.prompt_ids)] = block.extra[POSITIONS]
    return positions.reshape(3, *shape)


def _joined(seen: Sequence[_Seen]) -> dict[str, npt.NDArray[Any]]:
    """Return the pixels and grids of all blocks, end to end."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for _, block in seen:
        for name, array in block.extra.items():
            if name != POSITIONS:
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def _columns(rows: list[tuple[int, int, int, int]]) -> list[Index]:
    return list(np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def _ranges(start: Index, length: Index) -> Index:
    """Return start[0], start[0] + 1, ... (length[0] of them), start[1], ..."""
    ends = np.cumsum(length)
    return np.repeat(start - (ends - length), length) + np.arange(ends[-1], dtype=np.int64)


def _attention_mask(segments: _Segments, cells: Index, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    num_rows, row_tokens = shape
    visible = torch.ones(row_tokens, row_tokens, dtype=torch.bool).tril()[None]
    if len(segments.parent) > 2 * num_rows:
        # Empty cells belong to segment -1; they see each other, so that no row of the scores is wholly masked.
        own, parent = (np.full(num_rows * row_tokens, -1, dtype=np.int64) for _ in range(2))
        own[cells] = np.repeat(np.arange(len(segments.length)), segments.length)
        parent[cells] = np.repeat(segments.parent, segments.length)
        own_RL, parent_RL = (torch.from_numpy(array).view(shape) for array in (own, parent))
        seen_R1L = own_RL[:, None, :]
        visible = visible & ((seen_R1L == own_RL[:, :, None]) | (seen_R1L == parent_RL[:, :, None]))
    # Else each row holds one prompt and one completion from its first cell: causality alone hides the empty cells.
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def _split(item: PromptBlock, size: int) -> list[PromptBlock]:
    """Cut the completions of a prompt into the fewest blocks of at most `size`, as evenly as can be."""
    count = -(-len(item.spans) // size)
    bounds = [len(item.spans) * part // count for part in range(count + 1)]
    return [
        PromptBlock(item.prompt_ids, item.spans[start:stop], item.extra) for start, stop in itertools.pairwise(bounds)
    ]


def _shared(item: PromptBlock, budget: int) -> list[PromptBlock]:
    """Cut the completions of a prompt into the fewest blocks that keep the budget, one each where none does."""
    for size in range(len(item.spans), 1, -1):
        blocks = _split(item, size)
        if max(block.num_cells for block in blocks) <= budget:
            return blocks
    return _split(item, 1)
