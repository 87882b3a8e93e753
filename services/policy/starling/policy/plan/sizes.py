"""Sizes of a model on a mesh: elements of a rank, by block, as tensor parallelism and FSDP divide them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.weights import Cut, Entries, Weight

TENSOR_MODELS: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose traffic and memory with tensor parallelism are estimated, by their `model_type`."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Equal tensors of one block."""

    shape: tuple[int, ...]
    cut: Cut
    is_expert: bool
    count: int

    @property
    def num_elements(self) -> int:
        """Elements of all of them, undivided."""
        return self.count * math.prod(self.shape)

    def held(self, parallel: ParallelSettings, num_key_heads: int) -> Tensors:
        """Return what a rank holds, before FSDP shards it.

        With `tp` the trainer divides no single expert, and no key and value projections of fewer heads than ranks.
        """
        size = parallel.tp
        repeats = self.cut == "key_value" and num_key_heads % size
        if self.is_expert:
            return Tensors(self.shape, self.cut, self.is_expert, -(-self.count // parallel.ep))
        if self.cut == "whole" or repeats:
            return self
        shape = list(self.shape)
        dim = 1 if self.cut == "columns" else 0
        shape[dim] = -(-shape[dim] // size)
        return Tensors(tuple(shape), self.cut, self.is_expert, self.count)

    def padded(self, num_shards: int, *, beside: bool = False) -> int:
        """Return the elements of all shards together: each has as many rows as the largest.

        `beside`: experts are divided by `ep`, and their rows are sharded where that is even.
        """
        rows, *others = self.shape or (1,)
        if self.is_expert and beside and not rows % num_shards:
            return self.num_elements
        if self.is_expert:  # transformers stacks them, and the first dimension counts experts
            return -(-self.count // num_shards) * num_shards * math.prod(self.shape)
        return self.count * -(-rows // num_shards) * num_shards * math.prod(others)


Block = tuple[Tensors, ...]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model by which memory, traffic and time of a mesh are estimated."""

    blocks: tuple[tuple[Block, int], ...]
    """Kinds of transformer blocks, with the number of blocks of each."""
    first: Block
    """The embedding."""
    last: Block
    """The last norm, and the output layer, also where it is the embedding."""
    tied: bool
    """Whether the output layer is the embedding."""
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    inner: int
    """Hidden units of a feed-forward block that a token passes: of all its experts together."""
    num_experts: int
    """Routed experts of a layer; 0 without."""
    num_chosen: int
    """Routed experts that a token passes."""
    has_tensor_plan: bool
    """Whether tensor parallelism is available."""

    @property
    def ends(self) -> Block:
        """Embedding, last norm and output layer; a tied one once."""
        if self.tied and self.first and self.last:
            return self.first + tuple(one for one in self.last if one.cut != "vocabulary")
        return self.first + self.last

    @property
    def active_share(self) -> float:
        """Share of the routed experts that a token passes; 1 without experts."""
        return self.num_chosen / self.num_experts if self.num_experts else 1.0

    @property
    def num_blocks(self) -> int:
        """Transformer blocks."""
        return sum(count for _, count in self.blocks)

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys have norms, head by head."""
        return any(one.shape == (self.head_dim,) for block, _ in self.blocks for one in block)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(count * elements(block) for block, count in self.blocks) + elements(self.ends)

    @property
    def num_active(self) -> float:
        """Parameters that a token is multiplied with: the output layer, and of the experts those that it passes."""
        return self.num_active_in_blocks + self.vocabulary * self.hidden

    @property
    def num_active_in_blocks(self) -> float:
        """Those of all blocks."""
        return sum(
            count * sum(one.num_elements * (self.active_share if one.is_expert else 1.0) for one in block)
            for block, count in self.blocks
        )


def elements(block: Block) -> int:
    """Return the parameters of a block."""
    return sum(one.num_elements for one in block)


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes of the model with the contents `config` of a `config.json`.

    Raises:
        ConfigError: the model has no attention heads in its configuration, or parts besides its blocks.
        WeightsError: the model's family is unknown, or an entry is missing.
    """
    model, read = model_of(config), Entries(config)
    layers: dict[int, list[Weight]] = {}
    first, last, tied = list[Weight](), list[Weight](), False
    for weight in model.weights:
        if weight.tower:
            raise ConfigError(
                f"a model of type {config.get('model_type')!r} has a vision tower, which is not estimated"
            )
        if weight.layer < 0:
            tied = tied or bool(weight.spec.same_as)
            (first if weight.stage == "first" else last).append(weight)
        elif not weight.spec.same_as:
            layers.setdefault(weight.layer, []).append(weight)
    kinds = Counter(_block(weights) for weights in layers.values())
    heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
    if not heads:
        raise ConfigError("num_attention_heads = 0 in the model's configuration is not a model that can be divided")
    inner, chosen = read.size("intermediate_size", 0), 0
    if model.num_experts:
        chosen = read.size("num_experts_per_tok")
        inner = chosen * read.size("moe_intermediate_size", inner)
    return ModelSizes(
        blocks=tuple(kinds.items()),
        first=_block(first),
        last=_block(last),
        tied=tied,
        hidden=hidden,
        heads=heads,
        key_heads=read.size("num_key_value_heads", heads),
        head_dim=read.size("head_dim", hidden // heads),
        vocabulary=read.size("vocab_size"),
        inner=inner,
        num_experts=model.num_experts,
        num_chosen=chosen,
        has_tensor_plan=config.get("model_type") in TENSOR_MODELS,
    )


def _block(weights: list[Weight]) -> Block:
    counts = Counter((weight.spec.shape, weight.cut, weight.expert >= 0) for weight in weights)
    return tuple(Tensors(shape, cut, is_expert, count) for (shape, cut, is_expert), count in counts.items())
