"""Division of a step's microbatches over data-parallel ranks, each of which makes as many passes as the others."""

from __future__ import annotations

from collections.abc import Sequence


def divide_passes(sizes: Sequence[int], num_ranks: int) -> list[list[int | None]]:
    """Return the microbatch of each pass of each rank, [num_ranks][passes]; None for a pass without one.

    Ranks wait for each other in every pass, so the microbatches of one pass are of about the same size: they are
    assigned from the largest to the smallest, one to each rank at a time, and the larger ones of a pass to the ranks
    with fewer tokens so far. Only the last pass may have fewer microbatches than ranks.

    Args:
        sizes: tokens of each microbatch.
        num_ranks: data-parallel ranks.
    """
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    passes: list[list[int | None]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        of_pass = order[start : start + num_ranks]
        ranks = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for place, rank in enumerate(ranks):
            number = of_pass[place] if place < len(of_pass) else None
            passes[rank].append(number)
            tokens[rank] += 0 if number is None else sizes[number]
    return passes
