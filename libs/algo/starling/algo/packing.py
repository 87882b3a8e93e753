"""Stop 7 of the walk, pack: sequences become rows, rows become microbatches.

A *row* holds one or more whole sequences end to end; a *microbatch* is a rectangle of rows of equal length, which one
forward pass takes. Its *cells* are rows x row length; a cell without a token is waste. Rows of one sequence each
(padding) are the special case of a row length that holds no second sequence.

Pure Python: no torch, no numpy. Everything here is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAIR_COST = 1.0 / 1024.0
"""Cost of one query-key pair, in cells: how attention grows against the rest of a transformer.

For a hidden size h the two cost about 4 h and 24 h^2 operations per layer, so 1 / (6 h); 1/1024 is h = 170.
"""

_ROW_MULTIPLES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A rectangle of cells: for each row, the indices of the sequences that it holds, from the left."""

    rows: tuple[tuple[int, ...], ...]
    row_tokens: int
    """Cells of each row: the fullest row's tokens."""

    @property
    def num_cells(self) -> int:
        """Cells of the rectangle, filled or not."""
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
            first_open += 1  # Rows that can take nothing more need no second look.
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
    """Divide sequences over microbatches of at most `tokens_per_microbatch` cells each.

    Args:
        lengths: tokens of each sequence.
        tokens_per_microbatch: most cells of one microbatch. A sequence longer than this still gets trained: in a
            microbatch of its own, the only kind that exceeds the budget.
        row_tokens: length of the rows; by default the cheapest of a few multiples of the longest sequence, counting
            the cells and `pair_cost` for each query-key pair.
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


def num_cells(microbatches: Sequence[Microbatch]) -> int:
    """Return the cells of all `microbatches` together."""
    return sum(microbatch.num_cells for microbatch in microbatches)


def cost(microbatches: Sequence[Microbatch], pair_cost: float = PAIR_COST) -> float:
    """Return what `plan_microbatches` minimises: cells, and query-key pairs at `pair_cost` each."""
    return sum(batch.num_cells * (1.0 + pair_cost * batch.row_tokens) for batch in microbatches)


def padding_waste(microbatches: Sequence[Microbatch], lengths: Sequence[int]) -> float:
    """Return the share of cells that hold no token: 0 is perfect, and 0 for no cells."""
    cells = num_cells(microbatches)
    return 1.0 - sum(lengths) / cells if cells else 0.0


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
