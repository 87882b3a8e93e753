"""Stop 7 of the walk, pack: the sequences of a step become microbatches of tensors.

A sequence is a prompt and one completion. A microbatch is one row of tokens without padding, and a forest of segments
(`starling.algo.attention.forest`): what sequences begin with in common is in the row once, and each sequence is
computed as if it were alone. For models that cannot attend by a forest, each sequence has a row to itself, padded at
its end.
Legend of shapes: R rows, L row length, N trained tokens of the microbatch, T of the step, C completion tokens of the
step, trained or not.

The images of a prompt are repeated in each microbatch with one of its completions, in the order of their tokens.

The last token of a completion predicts nothing and is therefore no input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from starling.algo import packing
from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend
from starling.algo.routing import Experts, join_experts
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.tensors import POSITION_IDS
from starling.policy.train.data.groups import Flags, IntArray
from starling.policy.train.data.prefixes import PrefixForest, build_trees, divide, restrict
from starling.policy.train.data.replay import Replay
from starling.policy.train.data.share import TokenShare

Index = npt.NDArray[np.int64]

Layout = Literal["forest", "rows"]
"""Of a microbatch: one row with a forest of segments, or a padded row for each sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptBlock:
    """A prompt and its trained completions, as [start, stop) spans of the step's C tokens."""

    prompt_ids: IntArray
    spans: tuple[tuple[int, int], ...]
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Model inputs of the prompt's images, and token positions; see `ScoredGroup`."""
    routing: Experts | None = None
    """The recorded experts of the prompt's tokens, [prompt, M, K]; None where they were not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """A prompt with one of its completions."""

    prompt: PromptBlock
    span: tuple[int, int]
    """Of the completion among the step's C tokens."""
    input_ids: IntArray
    """The prompt, and the completion without its last token."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Sequences of one forward pass."""

    sequences: tuple[int, ...]
    """Numbers of the sequences."""
    prefixes: PrefixForest | None
    """The segments; None where each sequence has a row."""
    num_token_slots: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The sequences of a step, divided over microbatches."""

    sequences: tuple[PackedSequence, ...]
    plan: tuple[Microbatch, ...]
    token_ids: IntArray
    """The step's completion tokens, [C]."""
    routing: Experts | None = None
    """The recorded experts of these, [C, M, K]; None where nothing is replayed."""

    @property
    def num_sequences(self) -> int:
        """Completions of all prompts."""
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment that is computed."""
        return [length for microbatch in self.plan for length in self._forest(microbatch).lengths]

    @property
    def reach(self) -> list[int]:
        """See `Forest.reach`, for the segments of `lengths`."""
        return [reach for microbatch in self.plan for reach in self._forest(microbatch).reach]

    @property
    def padding_waste(self) -> float:
        """Share of token slots that are empty."""
        slots = sum(microbatch.num_token_slots for microbatch in self.plan)
        return 1.0 - sum(self.lengths) / slots if slots else 0.0

    @property
    def num_unshared(self) -> int:
        """Input tokens of all sequences, shared ones counted in each."""
        return sum(len(sequence.input_ids) for sequence in self.sequences)

    def _forest(self, microbatch: Microbatch) -> Forest:
        if microbatch.prefixes is not None:
            return microbatch.prefixes.forest
        return Forest.of_documents([len(self.sequences[number].input_ids) for number in microbatch.sequences])


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchInputs:
    """Model inputs of one microbatch, and which outputs are trained.

    Slots are numbered in the whole microbatch, also where several ranks compute it.
    """

    input_ids: Tensor
    """int64 [R, L]; 0 in empty slots. With a share only those of this rank, likewise of the positions."""
    position_ids: Tensor
    """int64 [R, L], from 0 in each sequence; [3, R, L] (time, height, width) where a prompt has images."""
    structure: Forest | None
    """Segments of the row; None where each sequence has a row, in which attention is causal."""
    source: Tensor
    """int64 [N]: the slot of R x L whose output predicts each trained token."""
    targets: Tensor
    """int64 [N]: the trained tokens, sequence by sequence."""
    tokens: Index
    """int64 [N], on the CPU: index of each trained token among the step's T tokens."""
    segments: Index
    """int64 [R * L], on the CPU: the segment of each slot; -1 in empty slots."""
    sequences: Index
    """int64 [M, 2], on the CPU: sequences, numbered from 0, each with every segment that it consists of."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further model arguments by name: the pixels of all prompts, end to end."""
    backend: Backend = "segments"
    """Of the attention."""
    share: TokenShare | None = None
    """The tokens of this rank, where several compute the microbatch together; None for all of them."""
    replay: Replay | None = None
    """The experts that the routers are made to choose; None for their own choice."""

    @property
    def own_source(self) -> Tensor:
        """int64: `source` among this rank's tokens, of the trained tokens that these predict."""
        return self.source if self.share is None else self.share.trained.slots


def shared_token_fraction(batches: Sequence[PackedBatch]) -> float:
    """Return the share of the sequences' input tokens that are not computed again, because several share them."""
    total = sum(batch.num_unshared for batch in batches)
    return 1.0 - sum(sum(batch.lengths) for batch in batches) / total if total else 0.0


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
    token_ids: IntArray,
    tokens_per_microbatch: int,
    *,
    layout: Layout = "forest",
    share: bool = True,
    together: bool = False,
    routing: Experts | None = None,
) -> PackedBatch:
    """Divide the step's completions over microbatches of at most `tokens_per_microbatch` token slots.

    A sequence that is longer has a microbatch to itself.

    Args:
        prompts: of the step, with the spans of their completions.
        token_ids: the step's completion tokens, [C].
        tokens_per_microbatch: the budget.
        layout: what the model can compute.
        share: compute common beginnings once; those of prompts with images, and those with recorded experts, within a
            group only: the experts of another group may be those of another rollout.
        together: keep the completions of a prompt in one microbatch, because a loss compares them.
        routing: the recorded experts of the step's completion tokens, [C, M, K]; None where nothing is replayed.
    """
    owners = [(number, prompt, span) for number, prompt in enumerate(prompts) for span in prompt.spans]
    text_domains = [0 if routing is None else number for number in range(len(prompts))]
    domains = [
        ((-1 - number if prompt.extra else text_domains[number]) if share else index)
        for index, (number, prompt, _) in enumerate(owners)
    ]
    # One array for all of them, of which each is a part.
    pieces = [part for _, prompt, (start, stop) in owners for part in (prompt.prompt_ids, token_ids[start : stop - 1])]
    tokens = np.concatenate(pieces) if pieces else token_ids[:0]
    ends = np.cumsum([len(one) + len(other) for one, other in zip(pieces[::2], pieces[1::2], strict=True)]).tolist()
    paths = [tokens[start:end] for start, end in zip([0, *ends][:-1], ends, strict=True)]
    sequences = [PackedSequence(prompt, span, path) for (_, prompt, span), path in zip(owners, paths, strict=True)]
    units = _units(prompts) if together else None
    plan = (
        _pack_rows(paths, tokens_per_microbatch, units)
        if layout == "rows"
        else _pack_forests(paths, domains, tokens_per_microbatch, units)
    )
    return PackedBatch(tuple(sequences), tuple(plan), token_ids, routing)


def to_tensors(
    batch: PackedBatch,
    microbatch: Microbatch,
    device: torch.device | str = "cpu",
    trained: Flags | None = None,
    backend: Backend = "segments",
) -> MicrobatchInputs:
    """Return the tensors of one microbatch.

    Args:
        batch: of the step.
        microbatch: one of its plan.
        device: of the model.
        trained: which of the C tokens are the T trained ones; the others are context. None where all are.
        backend: of the attention.
    """
    rows = _forest_rows(batch, microbatch) if microbatch.prefixes is not None else _padded_rows(batch, microbatch)
    spans = np.array([batch.sequences[number].span for number in microbatch.sequences], dtype=np.int64)
    tokens = _ranges(spans[:, 0], spans[:, 1] - spans[:, 0])
    source = rows.source
    targets, numbers = batch.token_ids[tokens], tokens
    if trained is not None:
        wanted = trained[tokens]
        source, targets = source[wanted], targets[wanted]
        numbers = (np.cumsum(trained, dtype=np.int64) - 1)[tokens[wanted]]
    return MicrobatchInputs(
        input_ids=torch.from_numpy(rows.input_ids).to(device),
        position_ids=torch.from_numpy(_positions(rows)).to(device),
        structure=None if microbatch.prefixes is None else microbatch.prefixes.forest,
        source=torch.from_numpy(source).to(device),
        targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        tokens=numbers,
        segments=rows.segments,
        sequences=rows.sequences,
        extra={name: torch.from_numpy(array).to(device) for name, array in _join_extra(rows.images).items()},
        backend=backend,
        replay=None if rows.routing is None else Replay.of(rows.routing, device),
    )


def _units(prompts: Sequence[PromptBlock]) -> list[list[int]]:
    """Return the numbers of each prompt's sequences."""
    ends = np.cumsum([len(prompt.spans) for prompt in prompts]).tolist()
    return [list(range(start, end)) for start, end in zip([0, *ends][:-1], ends, strict=True)]


def _pack_forests(
    paths: Sequence[IntArray], domains: Sequence[int], budget: int, units: list[list[int]] | None
) -> Iterator[Microbatch]:
    if not paths:
        return
    trees = build_trees(paths, domains)
    if units is None:
        parts = divide(trees, budget)
    else:
        sizes = [restrict(trees, unit).forest.num_tokens for unit in units]
        parts = [[number for unit in row for number in units[unit]] for row in packing.pack(sizes, budget)]
    for part in parts:
        prefixes = restrict(trees, part)
        yield Microbatch(tuple(part), prefixes, prefixes.forest.num_tokens)


def _pack_rows(paths: Sequence[IntArray], budget: int, units: list[list[int]] | None) -> Iterator[Microbatch]:
    units = units or [[number] for number in range(len(paths))]
    longest = [max(len(paths[number]) for number in unit) for unit in units]
    for part in packing.pad(longest, [len(unit) for unit in units], budget):
        numbers = [number for unit in part for number in units[unit]]
        yield Microbatch(tuple(numbers), None, len(numbers) * max(longest[unit] for unit in part))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Contents of the token slots."""

    input_ids: Index
    """[R, L]"""
    depths: Index
    """[R * L]: the position of each slot's token in its sequence, counted in tokens."""
    source: Index
    """Slot that predicts each token of the completions, sequence by sequence."""
    segments: Index
    sequences: Index
    images: list[_Images]
    routing: Experts | None
    """[R * L, M, K]; None where nothing is replayed."""


_Images = tuple[Index, PromptBlock, bool]
"""The slots of a segment or row with tokens of a sequence with images, its prompt, and whether they begin with it."""


def _forest_rows(batch: PackedBatch, microbatch: Microbatch) -> _Rows:
    assert microbatch.prefixes is not None
    prefixes = microbatch.prefixes
    forest = prefixes.forest
    pieces = [batch.sequences[number].input_ids[start:stop] for number, start, stop in prefixes.sources]
    # The token of a completion at a place of its sequence is predicted by the slot of the token before it.
    starts, lengths, members = list[int](), list[int](), list[tuple[int, int]]()
    for index, number in enumerate(microbatch.sequences):
        sequence = batch.sequences[number]
        first = len(sequence.prompt.prompt_ids) - 1
        for segment in forest.path(prefixes.last_segments[number]):
            members.append((index, segment))
            depth, length = forest.depths[segment], forest.lengths[segment]
            skipped = max(0, first - depth)
            if skipped < length:
                starts.append(forest.starts[segment] + skipped)
                lengths.append(length - skipped)
    images = []
    for segment, (number, start, _) in enumerate(prefixes.sources):
        if batch.sequences[number].prompt.extra:
            slots = np.arange(forest.starts[segment], forest.starts[segment] + forest.lengths[segment], dtype=np.int64)
            images.append((slots, batch.sequences[number].prompt, start == 0))
            assert start or len(slots) >= len(batch.sequences[number].prompt.prompt_ids)
    return _Rows(
        input_ids=np.concatenate(pieces, dtype=np.int64)[None],
        depths=forest.positions,
        source=_ranges(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)),
        segments=forest.segment_of_tokens,
        sequences=np.array(members, dtype=np.int64),
        images=images,
        routing=join_experts(
            (_routing(batch, batch.sequences[number], start, stop), stop - start)
            for number, start, stop in prefixes.sources
        ),
    )


def _padded_rows(batch: PackedBatch, microbatch: Microbatch) -> _Rows:
    sequences = [batch.sequences[number] for number in microbatch.sequences]
    lengths = np.array([len(sequence.input_ids) for sequence in sequences], dtype=np.int64)
    shape = len(sequences), int(lengths.max())
    firsts = np.arange(shape[0], dtype=np.int64) * shape[1]
    taken = _ranges(firsts, lengths)
    input_ids, segments = np.zeros(shape[0] * shape[1], dtype=np.int64), np.full(shape[0] * shape[1], -1, np.int64)
    input_ids[taken] = np.concatenate([sequence.input_ids for sequence in sequences])
    numbers = np.arange(shape[0], dtype=np.int64)
    segments[taken] = np.repeat(numbers, lengths)
    prompts = np.array([len(sequence.prompt.prompt_ids) for sequence in sequences], dtype=np.int64)
    rows = firsts[:, None] + np.arange(shape[1], dtype=np.int64)
    return _Rows(
        input_ids=input_ids.reshape(shape),
        # Empty slots continue the row: positions that start again would mean another sequence to transformers.
        depths=np.tile(np.arange(shape[1], dtype=np.int64), shape[0]),
        source=_ranges(firsts + prompts - 1, lengths - prompts + 1),
        segments=segments,
        sequences=np.stack([numbers, numbers], axis=1),
        images=[(slots, one.prompt, True) for slots, one in zip(rows, sequences, strict=True) if one.prompt.extra],
        routing=join_experts(
            part
            for one in sequences
            for num in [len(one.input_ids)]
            for part in ((_routing(batch, one, 0, num), num), (None, shape[1] - num))
        ),
    )


def _routing(batch: PackedBatch, sequence: PackedSequence, start: int, stop: int) -> Experts | None:
    """Return the recorded experts of the tokens of a sequence from position `start` to `stop`.

    Tokens that several sequences of a group share have those of one of them.
    """
    if batch.routing is None:
        return None
    prompt, first = len(sequence.prompt.prompt_ids), sequence.span[0]
    begin, end = max(start, prompt), max(stop, prompt)
    own = batch.routing[first + begin - prompt : first + end - prompt]
    known = None if sequence.prompt.routing is None else sequence.prompt.routing[start:stop]
    return join_experts([(known, stop - start - len(own)), (own, len(own))])


def _positions(rows: _Rows) -> Index:
    """Return the positions of all slots: [R, L], or [3, R, L] with images."""
    if not rows.images:
        return rows.depths.reshape(rows.input_ids.shape)
    positions = np.repeat(rows.depths[None], 3, axis=0)
    for slots, prompt, _ in rows.images:
        own = prompt.extra[POSITION_IDS]
        depths = rows.depths[slots]
        after = int(own[:, -1].max()) + 1 - own.shape[1]  # what follows a prompt continues from its greatest position
        positions[:, slots] = np.where(
            depths < own.shape[1], own[:, np.minimum(depths, own.shape[1] - 1)], depths + after
        )
    return positions.reshape(3, *rows.input_ids.shape)


def _join_extra(images: Sequence[_Images]) -> dict[str, npt.NDArray[Any]]:
    """Return the pixels and grids of all prompts, end to end, once for each occurrence of a prompt."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for _, prompt, begins in images:
        if not begins:
            continue
        for name, array in prompt.extra.items():
            if name != POSITION_IDS:
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def _ranges(start: Index, length: Index) -> Index:
    """Return start[0], start[0] + 1, ... (length[0] of them), start[1], ..."""
    ends = np.cumsum(length)
    return np.repeat(start - (ends - length), length) + np.arange(ends[-1], dtype=np.int64)
