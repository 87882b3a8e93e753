"""Stop 7 of the walk, pack: sequences become rows, rows become microbatches.

A *row* holds one or more whole sequences end to end; a *microbatch* is a rectangle of rows of equal length, which one
forward pass takes. Its *token slots* are rows x row length; an empty slot is waste. Rows of one sequence each
(padding) are the special case of a row length that holds no second sequence.

Pure Python: no torch, no numpy. Everything here is deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

PAIR_COST = 1.0 / 1024.0
"""Cost of one query-key pair, in token slots: how attention grows against the rest of a transformer.

For a hidden size h the two cost about 4 h and 24 h^2 operations per layer, so 1 / (6 h); 1/1024 is h = 170.
"""

_ROW_MULTIPLES = (1, 2, 3, 4, 6, 8)

_Division = list[tuple[float, list[int]]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A rectangle of token slots: for each row, the indices of the sequences that it holds, from the left."""

    rows: tuple[tuple[int, ...], ...]
    row_tokens: int
    """Token slots of each row: the fullest row's tokens."""

    @property
    def num_token_slots(self) -> int:
        """Token slots of the rectangle, filled or not."""
        return len(self.rows) * self.row_tokens


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


def plan_microbatches(
    lengths: Sequence[int],
    tokens_per_microbatch: int,
    *,
    row_tokens: int | None = None,
    pair_cost: float = PAIR_COST,
) -> list[Microbatch]:
    """Divide sequences over microbatches of at most `tokens_per_microbatch` token slots each.

    Args:
        lengths: tokens of each sequence.
        tokens_per_microbatch: maximum token slots of one microbatch. A sequence longer than this is still trained, in
            a separate microbatch, the only kind that exceeds the budget.
        row_tokens: length of the rows; by default the cheapest of a few multiples of the longest sequence, counting
            the token slots and `pair_cost` for each query-key pair.
        pair_cost: see `PAIR_COST`.

    Raises:
        ValueError: a length, the budget or `row_tokens` is less than 1.
    """
    _check(lengths, tokens_per_microbatch, "tokens_per_microbatch")
    if not lengths:
        return []
    if row_tokens is not None:
        return _plan(lengths, tokens_per_microbatch, row_tokens)
    longest = max(lengths)
    widest = max(longest, min(tokens_per_microbatch, sum(lengths)))
    candidates = dict.fromkeys(min(longest * multiple, widest) for multiple in _ROW_MULTIPLES)
    plans = [_plan(lengths, tokens_per_microbatch, candidate) for candidate in candidates]
    return min(plans, key=lambda plan: cost(plan, pair_cost))


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


def num_token_slots(microbatches: Sequence[Microbatch]) -> int:
    """Return the token slots of all `microbatches` together."""
    return sum(microbatch.num_token_slots for microbatch in microbatches)


def cost(microbatches: Sequence[Microbatch], pair_cost: float = PAIR_COST) -> float:
    """Return what `plan_microbatches` minimises: token slots, and query-key pairs at `pair_cost` each."""
    return sum(batch.num_token_slots * (1.0 + pair_cost * batch.row_tokens) for batch in microbatches)


def padding_waste(microbatches: Sequence[Microbatch], lengths: Sequence[int]) -> float:
    """Return the share of token slots that hold no token: 0 is perfect, and 0 for no token slots."""
    slots = num_token_slots(microbatches)
    return 1.0 - sum(lengths) / slots if slots else 0.0


def _plan(lengths: Sequence[int], budget: int, row_tokens: int) -> list[Microbatch]:
    """Pack into rows, then cut the rows, fullest first, into microbatches of nearly equal numbers of rows."""
    filled = [(sum(lengths[i] for i in row), row) for row in pack(lengths, min(row_tokens, budget))]
    filled.sort(key=lambda item: -item[0])
    plan = [_microbatch([item]) for item in filled if item[0] > budget]
    fitting = filled[len(plan) :]
    if not fitting:
        return plan
    rows_each = budget // fitting[0][0]
    count = -(-len(fitting) // rows_each)
    small, larger = divmod(len(fitting), count)
    start = 0
    for position in range(count):
        stop = start + small + (position < larger)
        plan.append(_microbatch(fitting[start:stop]))
        start = stop
    return plan


def _microbatch(filled: Sequence[tuple[int, list[int]]]) -> Microbatch:
    return Microbatch(rows=tuple(tuple(row) for _, row in filled), row_tokens=max(used for used, _ in filled))


def _check(lengths: Sequence[int], limit: int, name: str) -> None:
    if limit < 1:
        raise ValueError(f"{name} is {limit}: it must be at least 1")
    if lengths and min(lengths) < 1:
        raise ValueError(f"sequence {lengths.index(min(lengths))} has {min(lengths)} tokens: it must have at least 1")
