"""Division of sequences over rows and microbatches, and of items over parts of equal cost.

Pure Python: no torch, no numpy. Everything here is deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_Division = list[tuple[float, list[int]]]


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Put each sequence into one row of at most `row_tokens`, by first fit decreasing.

    The longest goes first, the lower index at equal length, into the first row with room. A sequence longer than
    `row_tokens` has a row to itself. First fit decreasing needs at most 11/9 of the fewest rows possible, plus one
    (Johnson, 1973).

    Returns:
        The indices of each row's sequences, in ascending order.

    Raises:
        ValueError: a length or `row_tokens` is less than 1.
    """
    _check(lengths, row_tokens, "row_tokens")
    rows: list[list[int]] = []
    room: list[int] = []
    shortest = min(lengths, default=1)
    first_open = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while first_open < len(room) and room[first_open] < shortest:
            first_open += 1  # Full rows are not searched again.
        for row in range(first_open, len(rows)):
            if room[row] >= length:
                rows[row].append(index)
                room[row] -= length
                break
        else:
            rows.append([index])
            room.append(row_tokens - length)
    return [sorted(row) for row in rows]


def pad(lengths: Sequence[int], counts: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Divide items over microbatches in which each sequence has a padded row of the longest one's length.

    Items of like length come together, the longest first, as many as fit. An item that does not fit alone has a
    microbatch to itself.

    Args:
        lengths: tokens of the longest sequence of each item.
        counts: sequences of each item.
        tokens_per_microbatch: maximum of rows x row length.

    Returns:
        The indices of each microbatch's items, in ascending order.

    Raises:
        ValueError: a length or the budget is less than 1.
    """
    _check(lengths, tokens_per_microbatch, "tokens_per_microbatch")
    parts: list[list[int]] = []
    row_tokens = num_rows = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        num_rows += counts[index]
        if not parts or row_tokens * num_rows > tokens_per_microbatch:
            parts.append([])
            row_tokens, num_rows = lengths[index], counts[index]
        parts[-1].append(index)
    return [sorted(part) for part in parts]


def balance(costs: Sequence[float], num_parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Divide items over `num_parts` parts of nearly equal cost, by the largest differencing method.

    Karmarkar and Karp, 1982: of all partial divisions the two with the greatest spread (costliest part less cheapest)
    are merged, the costliest part of one with the cheapest of the other, until one is left. A merge never makes a
    spread that is greater than those that it merges, so the result's is at most the greatest cost; and the costliest
    part is at most ``4/3 - 1/(3 num_parts)`` times the best possible (Michiels et al., 2003), as for greedy division by
    descending cost (Graham, 1969), which it beats by far on most inputs.

    With `equal_sizes` the numbers of items differ by at most one: each division that is begun with holds one item for
    every part (Yakir, 1996), and the spread is at most the greatest of their spreads.

    Args:
        costs: of each item, not negative.
        num_parts: how many parts; with fewer items some are empty.
        equal_sizes: whether parts must have equally many items.

    Returns:
        The indices of each part's items in ascending order, the parts by their first item, empty ones last.

    Raises:
        ValueError: `num_parts` is less than 1, or a cost is negative or not finite.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}: it must be at least 1")
    for index, item_cost in enumerate(costs):
        if not 0.0 <= item_cost < math.inf:
            raise ValueError(f"cost {index} is {item_cost}: it must be 0 or more, and finite")
    descending = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    size = num_parts if equal_sizes else 1
    # A division: its parts (cost, items) from the costliest to the cheapest.
    heap: list[tuple[float, int, _Division]] = []
    for start in range(0, len(descending), size):
        items = descending[start : start + size]
        parts: _Division = [(costs[i], [i]) for i in items] + [(0.0, [])] * (num_parts - len(items))
        heap.append((parts[-1][0] - parts[0][0], start, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        # The order breaks ties between equal spreads, so that the result depends on nothing but the costs.
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    division = heap[0][2] if heap else [(0.0, [])] * num_parts
    return sorted((sorted(items) for _, items in division), key=lambda items: (not items, items))


def _check(lengths: Sequence[int], limit: int, name: str) -> None:
    if limit < 1:
        raise ValueError(f"{name} is {limit}: it must be at least 1")
    if lengths and min(lengths) < 1:
        raise ValueError(f"sequence {lengths.index(min(lengths))} has {min(lengths)} tokens: it must have at least 1")
