"""Stages of a pipeline: their blocks and ranks, the microbatches of their schedules, and the sizes of a rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from starling.policy.plan.sizes import ModelSizes, elements
from starling.policy.settings.parallel import ParallelSettings


def stages_of_rank(settings: ParallelSettings, rank: int) -> list[int]:
    """Return the stages of a place along pp, in the order in which a microbatch passes them."""
    if settings.schedule == "zbv":
        return [rank, 2 * settings.pp - 1 - rank]
    return list(range(rank, settings.num_stages, settings.pp))


def rank_of_stage(settings: ParallelSettings, stage: int) -> int:
    """Return the place along pp of a stage."""
    if settings.schedule == "zbv":
        return min(stage, 2 * settings.pp - 1 - stage)
    return stage % settings.pp


def num_passes(settings: ParallelSettings, num_microbatches: int) -> int:
    """Return how many microbatches a schedule needs to compute `num_microbatches`."""
    size = settings.pp
    match settings.schedule:
        case "gpipe":
            return num_microbatches
        case "1f1b":
            return max(num_microbatches, size)
        case "interleaved":
            return -(-num_microbatches // size) * size
        case "zbv":
            return max(num_microbatches, 2 * size - 1)


def num_in_flight(settings: ParallelSettings, rank: int, num_microbatches: int) -> float:
    """Return of how many microbatches a place along pp keeps the activations of all its blocks, at most."""
    size, stages = settings.pp, settings.num_stages // settings.pp
    match settings.schedule:
        case "gpipe":
            return num_microbatches
        case "1f1b":
            return min(num_microbatches, size - rank)
        case "interleaved":
            # Stages of microbatches whose forward passes come before the first backward pass, and one more.
            return min(num_microbatches * stages, 2 * (size - rank - 1) + (stages - 1) * size + 1) / stages
        case "zbv":
            return min(num_microbatches, size)


def num_idle(settings: ParallelSettings) -> float:
    """Return for how many microbatches a rank of pp could compute, in an update, while it waits for others.

    Of `zbv` none: its backward passes in two parts fill the gaps where both take as long as a forward pass.
    """
    return 0.0 if settings.schedule == "zbv" else (settings.pp - 1) * settings.pp / settings.num_stages


def num_sent(settings: ParallelSettings, rank: int) -> int:
    """Return how often a place along pp sends hidden states, or a gradient of them, for each microbatch."""
    return sum(
        0 <= stage + step < settings.num_stages and rank_of_stage(settings, stage + step) != rank
        for stage in stages_of_rank(settings, rank)
        for step in (-1, 1)
    )


def num_received(settings: ParallelSettings, rank: int) -> int:
    """Return how many buffers a place along pp has for each microbatch: for what its stages receive."""
    return sum(0 <= stage + step < settings.num_stages for stage in stages_of_rank(settings, rank) for step in (-1, 1))


def sizes_of_rank(sizes: ModelSizes, settings: ParallelSettings, rank: int) -> ModelSizes:
    """Return the sizes of what a place along pp has of a model: its blocks, and the ends of the first and last stage.

    Blocks of different kinds are taken to be in the order of their kinds.
    """
    if settings.pp == 1:
        return sizes
    return _sizes_of_stages(sizes, tuple(stages_of_rank(settings, rank)), settings.num_stages)


@lru_cache(maxsize=1024)
def _sizes_of_stages(sizes: ModelSizes, own: tuple[int, ...], num_stages: int) -> ModelSizes:
    blocks = [block for block, count in sizes.blocks for _ in range(count)]
    vocabulary = float(sizes.vocabulary * sizes.hidden)
    ranges = balance_blocks([elements(block) for block in blocks], vocabulary, vocabulary, num_stages)
    ends = (sizes.first if 0 in own else ()) + (sizes.last if num_stages - 1 in own else ())
    kinds = Counter(blocks[number] for stage in own for number in ranges[stage])
    return replace(sizes, blocks=tuple(kinds.items()), first=ends, last=())


def balance_blocks(weights: Sequence[float], first: float, last: float, num_stages: int) -> list[range]:
    """Divide blocks into `num_stages` groups of neighbours, none of them empty, whose largest is as small as possible.

    Args:
        weights: of each block.
        first: added to the first group, for the embedding.
        last: added to the last group, for the output layer.
        num_stages: at most the number of blocks.
    """
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    # largest[k][n]: the largest of k groups of the first n blocks, and where the last of them begins
    num_blocks = len(weights)
    largest = [{num: (first + total[num], 0) for num in range(1, num_blocks + 1)}]
    for group in range(2, num_stages + 1):
        more = last if group == num_stages else 0.0
        largest.append(
            {
                num: min(
                    (max(largest[-1][start][0], total[num] - total[start] + more), start)
                    for start in range(group - 1, num)
                )
                for num in range(group, num_blocks + 1)
            }
        )
    ends = [num_blocks]
    for found in reversed(largest[1:]):
        ends.append(found[ends[-1]][1])
    bounds = [0, *reversed(ends)]
    return [range(start, end) for start, end in pairwise(bounds)]
