"""Bytes that a rank sends for one update, by axis of the mesh, and the collectives that send them.

The formulas are those of algorithms that send the least: of n ranks with an equal part each, one sends its part n - 1
times in a gather, as much in a sum of which each rank keeps a part, and both in a sum that all ranks keep.
`tests/parallel/test_mesh_traffic.py` compares them with what the trainer sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from starling.policy.plan.sizes import Block, ModelSizes
from starling.policy.settings.parallel import ParallelSettings

FLOAT32: Final = 4
_OF_ATTENTION: Final = 4
"""Exchanges of all tokens of a pass: before and after the attention of a block, forward and backward."""
_OF_MLP: Final = 4
_OF_ENDS: Final = 4
"""After the embedding and before the output layer, forward and backward."""


@dataclass(frozen=True, slots=True)
class Update:
    """Passes of one rank between two steps of the optimizer."""

    num_passes: int
    num_tokens: float
    """Of the microbatch of a pass, on average."""
    item_bytes: int
    """Of an element of activations and gathered parameters; gradients are summed in float32."""
    recomputes: bool = False
    """Whether the backward pass computes the blocks again (`policy.memory.checkpointing`)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends along an axis for one update."""

    num_bytes: float
    num_calls: int


def traffic_of(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> dict[str, Traffic]:
    """Return what a rank sends for an update, by axis; axes of one rank are left out."""
    found = {}
    if parallel.cp > 1:
        found["cp"] = _of_context(sizes, parallel, update)
    if parallel.num_shards > 1:
        # Where both have ranks, the shards of cp are those of dp_shard, too.
        axis = "dp_shard" if parallel.dp_shard > 1 else "cp"
        found[axis] = _sum(_of_shards(sizes, parallel, update), found.get(axis))
    if parallel.dp_replicate > 1:
        found["dp_replicate"] = _of_copies(sizes, parallel)
    if parallel.tp > 1:
        found["tp"] = _of_tensors(sizes, parallel, update)
    return found


def _of_shards(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return the gathers of parameters, and the sums of their gradients, in each pass."""
    gathered = summed = float(padded(sizes, sizes.ends, parallel))
    num_calls = 2
    num_frees = {"always": sizes.num_blocks, "default": sizes.num_blocks - 1, "never": 0}[parallel.reshard]
    for block, count in sizes.blocks:
        num_elements = padded(sizes, block, parallel)
        # Which kind the last block is of makes a difference of less than a block.
        freed = num_frees * count / sizes.num_blocks
        gathered += (count + freed) * num_elements
        summed += count * num_elements
        num_calls += 2 * count
    share = (parallel.num_shards - 1) / parallel.num_shards
    num_bytes = share * (gathered * update.item_bytes + summed * FLOAT32)
    return Traffic(update.num_passes * num_bytes, update.num_passes * (num_calls + num_frees))


def _of_copies(sizes: ModelSizes, parallel: ParallelSettings) -> Traffic:
    """Return the sum of the gradients over the copies, once per update."""
    num_elements = sum(count * padded(sizes, block, parallel) for block, count in _all_blocks(sizes))
    num_bytes = _all_reduce(num_elements / parallel.num_shards * FLOAT32, parallel.dp_replicate)
    return Traffic(num_bytes, sizes.num_blocks + 1 if parallel.num_shards > 1 else 1)


def _of_tensors(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return the exchanges of tokens, and the sums of log-probabilities and of gradients of whole tensors."""
    num_exchanges = _OF_ENDS
    for block, count in sizes.blocks:
        of_block = _OF_ATTENTION + (0 if _has_experts(block) else _OF_MLP)
        num_exchanges += count * of_block * (3 if update.recomputes else 2) // 2
    share = (parallel.tp - 1) / parallel.tp
    own = update.num_tokens / parallel.cp
    tokens = own * sizes.hidden * update.item_bytes * share
    logprobs = 3 * _all_reduce(own * FLOAT32, parallel.tp)
    whole = sum(count * _whole(sizes, block, parallel) for block, count in _all_blocks(sizes))
    gradients = _all_reduce(whole / parallel.num_shards * FLOAT32, parallel.tp)
    num_bytes = update.num_passes * (num_exchanges * tokens + logprobs) + gradients
    return Traffic(num_bytes, update.num_passes * (num_exchanges + 3) + 1)


def _of_context(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return what the attention of all blocks exchanges. The numbers of log-probabilities are left out."""
    ranks, item = parallel.cp, update.item_bytes
    own = update.num_tokens / ranks
    query = own * sizes.heads // parallel.tp * sizes.head_dim
    held = max(1, sizes.key_heads // parallel.tp)
    num_forward = sizes.num_blocks * (2 if update.recomputes else 1)
    if parallel.context == "ulysses":
        keys = own * math.lcm(held, ranks) * sizes.head_dim
        exchanged = (num_forward + sizes.num_blocks) * (2 * query + 2 * keys) * item * (ranks - 1) / ranks
        return Traffic(update.num_passes * exchanged, 2 * update.num_passes * (num_forward + sizes.num_blocks))
    keys = 2 * own * held * sizes.head_dim
    gathered = (num_forward + sizes.num_blocks) * (ranks - 1) * keys * item
    # In a ring a gradient returns to its owner, one step more.
    steps = ranks if parallel.context == "ring" else ranks - 1
    summed = sizes.num_blocks * steps * keys * FLOAT32
    num_calls = num_forward + 2 * sizes.num_blocks
    if parallel.context == "ring":
        num_calls = (num_forward + sizes.num_blocks) * (ranks - 1) + sizes.num_blocks * ranks
    return Traffic(update.num_passes * (gathered + summed), update.num_passes * num_calls)


def _sum(traffic: Traffic, other: Traffic | None) -> Traffic:
    if other is None:
        return traffic
    return Traffic(traffic.num_bytes + other.num_bytes, traffic.num_calls + other.num_calls)


def padded(sizes: ModelSizes, block: Block, parallel: ParallelSettings) -> int:
    """Return the elements of a block on the ranks of `dp_shard` and `cp` together, with the padding of their shards."""
    return sum(one.held(parallel, sizes.key_heads).padded(parallel.num_shards) for one in block)


def _whole(sizes: ModelSizes, block: Block, parallel: ParallelSettings) -> int:
    """Return the elements of a block that each rank of `tp` holds, and of whose gradient it computes a part."""
    return sum(one.num_elements for one in block if one.held(parallel, sizes.key_heads) == one)


def _has_experts(block: Block) -> bool:
    return any(one.is_expert for one in block)


def _all_blocks(sizes: ModelSizes) -> Iterator[tuple[Block, int]]:
    yield from sizes.blocks
    yield sizes.ends, 1


def _all_reduce(num_bytes: float, num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
