"""Memory of a rank of a mesh, estimated from sizes alone. Pure.

`starling run --dry-run` observes the activations of the real model's code on one device; this is for comparing meshes,
and for models that are not there. `tests/unit/policy/plan/test_plan_memory.py` holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starling.policy.plan.sizes import ModelSizes
from starling.policy.plan.stages import num_in_flight, num_received, sizes_of_rank, stages_of_rank
from starling.policy.plan.traffic import FLOAT32, Update, held_elements, num_copies, padded
from starling.policy.settings.memory import few_probabilities
from starling.policy.settings.parallel import ParallelSettings

_MOMENTS: Final = 2 * FLOAT32
"""Of AdamW, for each element."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank at its peak."""

    states: float
    """Weights, gradients, moments and, of a model in 16 bits, float32 masters."""
    gathered: float
    """Whole parameters of FSDP's current and next block, and of the ends, with their gradients; with pp of all blocks,
    which stay gathered for an update."""
    activations: float
    """What all blocks keep for the backward pass, of all microbatches in flight, and what one needs to compute."""
    received: float
    """Buffers for what the stages of a pipeline receive, of all microbatches."""
    logits: float
    """Of one chunk of tokens, with their gradient, in float32."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.states + self.gathered + self.activations + self.received + self.logits


def memory_of(
    sizes: ModelSizes, parallel: ParallelSettings, update: Update, *, chunk_tokens: int, offloads: bool = False
) -> RankMemory:
    """Return the memory of the rank that has the most.

    Args:
        sizes: of the model.
        parallel: the mesh.
        update: passes of a rank.
        chunk_tokens: `policy.memory.logprob_chunk_tokens`.
        offloads: the moments lie in host memory (`policy.memory.offload_optimizer`).
    """
    moments = 0 if offloads else _MOMENTS
    of_places = (_of_place(sizes, parallel, update, place, chunk_tokens, moments) for place in range(parallel.pp))
    return max(of_places, key=lambda one: one.total)


def _of_place(
    sizes: ModelSizes, parallel: ParallelSettings, update: Update, place: int, chunk_tokens: int, moments: int
) -> RankMemory:
    """Return the memory of the ranks at one place of pp."""
    own = sizes_of_rank(sizes, parallel, place)
    item, shards = update.item_bytes, parallel.num_shards > 1
    weights = FLOAT32 if shards or item == FLOAT32 else item + FLOAT32
    computed = _block_bytes(sizes, parallel, update)
    between = update.num_tokens / (parallel.cp * parallel.tp) * sizes.hidden * item
    kept = between if update.recomputes else computed
    in_flight, is_last = 1.0, True
    if parallel.pp > 1:
        in_flight = num_in_flight(parallel, place, update.num_passes)
        is_last = parallel.num_stages - 1 in stages_of_rank(parallel, place)
    num_trained = update.num_tokens / parallel.cp
    logits = 3 * FLOAT32 * min(chunk_tokens, num_trained) * sizes.vocabulary / parallel.tp
    is_whole = item == FLOAT32 and parallel.tp == parallel.pp == 1
    if is_whole and few_probabilities(num_trained, sizes.vocabulary, chunk_tokens):
        logits = max(logits, FLOAT32 * num_trained * sizes.vocabulary)  # they are kept for the backward pass
    return RankMemory(
        states=held_elements(own, parallel) * (weights + FLOAT32 + moments),
        gathered=_gathered_bytes(own, parallel, item) if shards else 0.0,
        activations=in_flight * own.num_blocks * kept + computed,
        received=num_received(parallel, place) * update.num_passes * between,
        logits=logits if is_last else 0.0,
    )


def _gathered_bytes(sizes: ModelSizes, parallel: ParallelSettings, item: int) -> float:
    """Return what FSDP has whole at a time: of experts that `ep` divides those of this rank, where others have them."""
    gathers_experts = parallel.ep == 1 or num_copies(parallel) > 1
    of_blocks = [
        sum(one.held(parallel, sizes.key_heads).num_elements for one in block if gathers_experts or not one.is_expert)
        for block, _ in sizes.blocks
    ]
    ends = padded(sizes, sizes.ends, parallel)
    if parallel.pp > 1:
        whole = ends + sum(count * size for (_, count), size in zip(sizes.blocks, of_blocks, strict=True))
        return whole * (item + FLOAT32)
    largest = max(of_blocks)
    return (2 * largest + 2 * ends) * item + largest * item


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
