"""Memory of a rank of a mesh, estimated from sizes alone. Pure.

`starling run --dry-run` observes the activations of the real model's code on one device; this is for comparing meshes,
and for models that are not there. `tests/unit/policy/plan/test_plan_memory.py` holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starling.policy.plan.sizes import ModelSizes
from starling.policy.plan.traffic import FLOAT32, Update, padded
from starling.policy.settings.parallel import ParallelSettings

_MOMENTS: Final = 2 * FLOAT32
"""Of AdamW, for each element."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank at its peak."""

    states: float
    """Weights, gradients, moments and, of a model in 16 bits, float32 masters."""
    gathered: float
    """Whole parameters of FSDP's current and next block, and of the ends, with their gradients."""
    activations: float
    """What all blocks keep for the backward pass, and what one needs to compute."""
    logits: float
    """Of one chunk of tokens, with their gradient, in float32."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.states + self.gathered + self.activations + self.logits


def memory_of(sizes: ModelSizes, parallel: ParallelSettings, update: Update, *, chunk_tokens: int) -> RankMemory:
    """Return the memory of the rank that has the most.

    Args:
        sizes: of the model.
        parallel: the mesh.
        update: passes of a rank.
        chunk_tokens: `policy.memory.logprob_chunk_tokens`.
    """
    ends = padded(sizes, sizes.ends, parallel)
    num_padded = ends + sum(count * padded(sizes, block, parallel) for block, count in sizes.blocks)
    item, shards = update.item_bytes, parallel.num_shards > 1
    weights = FLOAT32 if shards or item == FLOAT32 else item + FLOAT32
    largest = max(padded(sizes, block, parallel) for block, _ in sizes.blocks)
    computed = _block_bytes(sizes, parallel, update)
    kept = _kept_bytes(sizes, parallel, update) if update.recomputes else computed
    return RankMemory(
        states=num_padded / parallel.num_shards * (weights + FLOAT32 + _MOMENTS),
        gathered=(2 * largest + 2 * ends) * item + largest * item if shards else 0.0,
        activations=sizes.num_blocks * kept + computed,
        logits=3 * FLOAT32 * min(chunk_tokens, update.num_tokens / parallel.cp) * sizes.vocabulary / parallel.tp,
    )


def _kept_bytes(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> float:
    """Return what a block keeps that is computed again: its input, of this rank's tokens."""
    return update.num_tokens / (parallel.cp * parallel.tp) * sizes.hidden * update.item_bytes


def _block_bytes(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> float:
    """Return what the operations of a block keep for their gradients.

    Of a token: the inputs of both norms, also in float32, and what they return; queries and keys before and after the
    rotation, and where they are normed that as well; values, the output of the attention; and of the feed-forward block
    gate, activation, the other factor and the product.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.key_heads * sizes.head_dim
    kept = 6 * sizes.hidden + 3 * query + 3 * key + 4 * sizes.inner
    if sizes.norms_heads:
        kept += 3 * (query + key)
    return update.num_tokens * update.item_bytes * kept / (parallel.cp * parallel.tp)
