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
from starling.policy.plan.stages import num_sent, rank_of_stage, sizes_of_rank, stages_of_rank
from starling.policy.settings.parallel import ParallelSettings

FLOAT32: Final = 4
_OF_ATTENTION: Final = 4
"""Exchanges of all tokens of a pass: before and after the attention of a block, forward and backward."""
_OF_MLP: Final = 4
_OF_END: Final = 2
"""After the embedding, or before the output layer, forward and backward."""
_COUNT_BYTES: Final = 8
"""Of the number of rows for an expert, which ranks tell each other before they send them."""


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
    """Return what a rank sends for an update, by axis, of each axis at the place of pp that sends most along it.

    Axes of one rank are left out. Experts that `ep` divides are sharded along `efsdp`: those ranks of `dp_shard`, `cp`
    and `tp` that have the same ones.
    """
    found: dict[str, Traffic] = {}
    for place in range(parallel.pp):
        for axis, sent in traffic_of_place(sizes, parallel, update, place).items():
            found[axis] = max(found.get(axis, sent), sent, key=lambda one: one.num_bytes)
    return found


def traffic_of_place(
    sizes: ModelSizes, parallel: ParallelSettings, update: Update, place: int = 0
) -> dict[str, Traffic]:
    """Return what the ranks at one place of pp send for an update, by axis; see `traffic_of`."""
    own, found = sizes_of_rank(sizes, parallel, place), dict[str, Traffic]()
    stages = stages_of_rank(parallel, place)
    if parallel.pp > 1:
        found["pp"] = _of_stages(sizes, parallel, update, place)
    if parallel.cp > 1:
        found["cp"] = _of_context(own, parallel, update)
    if parallel.num_shards > 1:
        # Where both have ranks, the shards of cp are those of dp_shard, too.
        axis = "dp_shard" if parallel.dp_shard > 1 else "cp"
        found[axis] = _sum(_of_shards(own, parallel, update), found.get(axis))
    if parallel.ep > 1 and own.num_experts:
        found["ep"] = _of_dispatch(own, parallel, update)
        if num_copies(parallel) > 1:
            found["efsdp"] = _of_experts(own, parallel, update)
    if parallel.dp_replicate > 1:
        found["dp_replicate"] = _of_copies(own, parallel)
    if parallel.tp > 1:
        found["tp"] = _of_tensors(own, parallel, update, first=0 in stages, last=parallel.num_stages - 1 in stages)
    return found


def num_copies(parallel: ParallelSettings) -> int:
    """Return the ranks of `efsdp`: among those of `dp_shard`, `cp` and `tp`, those with the same experts."""
    return parallel.num_shards * parallel.tp // parallel.ep


def _of_stages(sizes: ModelSizes, parallel: ParallelSettings, update: Update, place: int) -> Traffic:
    """Return the hidden states and their gradients for other stages, and the gradient of tied weights."""
    tokens = update.num_tokens / (parallel.cp * parallel.tp) * sizes.hidden * update.item_bytes
    num_sends = update.num_passes * num_sent(parallel, place)
    ends = rank_of_stage(parallel, 0), rank_of_stage(parallel, parallel.num_stages - 1)
    if not sizes.tied or ends[0] == ends[1] or place not in ends:
        return Traffic(num_sends * tokens, num_sends)
    vocabulary = padded(sizes, sizes.first, parallel) / parallel.num_shards * FLOAT32
    return Traffic(num_sends * tokens + vocabulary, num_sends + 1)


def _gathers(sizes: ModelSizes, parallel: ParallelSettings) -> tuple[float, float]:
    """Return how often FSDP gathers a block in a pass, on average, and how often it does so again to differentiate.

    Which kind the last block is of makes a difference of less than a block. Stages of pp are gathered once per update.
    """
    if parallel.pp > 1 or not sizes.num_blocks:
        return 1.0, 0.0
    num_frees = {"always": sizes.num_blocks, "default": sizes.num_blocks - 1, "never": 0}[parallel.reshard]
    return 1.0 + num_frees / sizes.num_blocks, num_frees


def _num_gathered(parallel: ParallelSettings, update: Update) -> int:
    """Return for how many passes of an update FSDP gathers parameters and sums gradients."""
    return min(update.num_passes, 1) if parallel.pp > 1 else update.num_passes


def _of_shards(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return the gathers of parameters, and the sums of their gradients, in each pass."""
    times, num_frees = _gathers(sizes, parallel)
    ends = float(padded(sizes, sizes.ends, parallel))
    blocks = float(sum(count * padded(sizes, _beside(block, parallel), parallel) for block, count in sizes.blocks))
    share = (parallel.num_shards - 1) / parallel.num_shards
    num_bytes = share * ((ends + times * blocks) * update.item_bytes + (ends + blocks) * FLOAT32)
    num_calls = 2 + 2 * sizes.num_blocks + int(num_frees)
    num_passes = _num_gathered(parallel, update)
    return Traffic(num_passes * num_bytes, num_passes * num_calls)


def _of_experts(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return the same of experts that are divided; where FSDP shards nothing, the sum of their gradients."""
    ranks, own = num_copies(parallel), float(experts_of(sizes, parallel))
    num_blocks = sum(count for block, count in sizes.blocks if _has_experts(block))
    if parallel.num_shards == 1:
        return Traffic(_all_reduce(own * FLOAT32, ranks), 1)
    times, num_frees = _gathers(sizes, parallel)
    num_bytes = (ranks - 1) / ranks * own * (times * update.item_bytes + FLOAT32)
    num_passes = _num_gathered(parallel, update)
    return Traffic(num_passes * num_bytes, num_passes * (2 * num_blocks + int(num_frees)))


def _of_dispatch(sizes: ModelSizes, parallel: ParallelSettings, update: Update) -> Traffic:
    """Return the rows of tokens to their experts and back, forward and backward, where all experts are used alike."""
    share = (parallel.ep - 1) / parallel.ep
    num_blocks = sum(count for block, count in sizes.blocks if _has_experts(block))
    num_forward = 2 if update.recomputes else 1
    tokens = update.num_tokens / (parallel.cp * parallel.tp)
    rows = tokens * sizes.num_chosen * sizes.hidden * update.item_bytes
    counts = sizes.num_experts * _COUNT_BYTES
    num_bytes = share * (2 * (num_forward + 1) * rows + num_forward * counts)
    return Traffic(update.num_passes * num_blocks * num_bytes, update.num_passes * num_blocks * (3 * num_forward + 2))


def _of_copies(sizes: ModelSizes, parallel: ParallelSettings) -> Traffic:
    """Return the sum of the gradients over the copies, once per update."""
    num_bytes = _all_reduce(held_elements(sizes, parallel) * FLOAT32, parallel.dp_replicate)
    return Traffic(num_bytes, sizes.num_blocks + 1 if parallel.num_shards > 1 else 1)


def _of_tensors(sizes: ModelSizes, parallel: ParallelSettings, update: Update, *, first: bool, last: bool) -> Traffic:
    """Return the exchanges of tokens, and the sums of log-probabilities and of gradients of whole tensors.

    `first`, `last`: whether the rank has the first or the last stage.
    """
    num_exchanges = _OF_END * (first + last)
    for block, count in sizes.blocks:
        of_block = _OF_ATTENTION + (0 if _has_experts(block) else _OF_MLP)
        num_exchanges += count * of_block * (3 if update.recomputes else 2) // 2
    share = (parallel.tp - 1) / parallel.tp
    own = update.num_tokens / parallel.cp
    tokens = own * sizes.hidden * update.item_bytes * share
    logprobs = 3 * _all_reduce(own * FLOAT32, parallel.tp) if last else 0.0
    whole = sum(count * _whole(sizes, block, parallel) for block, count in _all_blocks(sizes))
    gradients = _all_reduce(whole / parallel.num_shards * FLOAT32, parallel.tp)
    num_bytes = update.num_passes * (num_exchanges * tokens + logprobs) + gradients
    return Traffic(num_bytes, update.num_passes * (num_exchanges + 3 * last) + 1)


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


def experts_of(sizes: ModelSizes, parallel: ParallelSettings) -> int:
    """Return the elements of experts that are divided, on the ranks of `efsdp` together, with padding."""
    if parallel.ep == 1:
        return 0
    # Without FSDP a rank has all elements of its experts.
    ranks = num_copies(parallel) if parallel.num_shards > 1 else 1
    return sum(
        count * one.held(parallel, sizes.key_heads).padded(ranks, beside=True)
        for block, count in sizes.blocks
        for one in block
        if one.is_expert
    )


def held_elements(sizes: ModelSizes, parallel: ParallelSettings) -> float:
    """Return the elements of parameters that a rank holds."""
    blocks = sum(count * padded(sizes, _beside(block, parallel), parallel) for block, count in _all_blocks(sizes))
    ranks = num_copies(parallel) if parallel.num_shards > 1 else 1
    return blocks / parallel.num_shards + experts_of(sizes, parallel) / ranks


def _beside(block: Block, parallel: ParallelSettings) -> Block:
    """Return the tensors of a block without experts that are divided."""
    return block if parallel.ep == 1 else tuple(one for one in block if not one.is_expert)


def _whole(sizes: ModelSizes, block: Block, parallel: ParallelSettings) -> int:
    """Return the elements of a block that each rank of `tp` holds, and of whose gradient it computes a part."""
    return sum(one.num_elements for one in _beside(block, parallel) if one.held(parallel, sizes.key_heads) == one)


def _has_experts(block: Block) -> bool:
    return any(one.is_expert for one in block)


def _all_blocks(sizes: ModelSizes) -> Iterator[tuple[Block, int]]:
    yield from sizes.blocks
    yield sizes.ends, 1


def _all_reduce(num_bytes: float, num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
