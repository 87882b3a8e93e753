"""Matching of source and destination splits: intersections of boxes, and the choice among several copies.

All members of a class move alike, so this is computed once per class: the distinct source boxes and the distinct
destination boxes are intersected by a sweep, and each destination rank gets the parts of its boxes. A source box that
several ranks hold is served by the nearest of them; among equally near ones the tensors of the class alternate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Ints, PairBudget, first_overlap, gap_in, intersecting_pairs
from starling.weightsync.plan.compact import TensorSplit
from starling.weightsync.plan.layout import Box
from starling.weightsync.plan.moves import Moves, packed


@dataclass(frozen=True)
class MoveNames:
    """Names for error messages: the tensor, and the two replicas."""

    tensor: str
    source: str
    destination: str


class SourceLoads:
    """Distances of the source ranks from the destination ranks, and the bytes that each source sends so far."""

    def __init__(self, distance: Ints, cards: Ints) -> None:
        """Begin without load.

        Args:
            distance: of each source rank from each destination rank, in any measure.
            cards: which network card each source rank sends through, by number.
        """
        # Destination ranks that are equally far from every source choose the same copies.
        self.distance, alike = np.unique(distance, axis=1, return_inverse=True)
        self.alike: Ints = alike.reshape(-1)
        self.cards = cards
        self.of_rank = np.zeros(len(distance), np.int64)
        self.of_card = np.zeros(int(cards.max(initial=-1)) + 1, np.int64)

    def add(self, ranks: Ints, num_bytes: Ints) -> None:
        """Add bytes to the load of `ranks`."""
        np.add.at(self.of_rank, ranks, num_bytes)
        np.add.at(self.of_card, self.cards[ranks], num_bytes)

    def least_first(self, ranks: Ints) -> Ints:
        """Return the order in which to use `ranks`: idle cards first, and round-robin over the cards."""
        order = np.lexsort((ranks, self.of_rank[ranks], self.cards[ranks]))
        cards = self.cards[ranks[order]]
        turn = np.empty(len(ranks), np.int64)
        turn[order] = np.arange(len(ranks)) - np.searchsorted(cards, cards, side="left")
        asked: Ints = np.lexsort((ranks, self.of_rank[ranks], self.of_card[self.cards[ranks]], turn))
        return asked


def make_moves(
    source: TensorSplit,
    destination: TensorSplit,
    item_bytes: int,
    tensors: tuple[Ints, Ints],
    loads: SourceLoads,
    names: MoveNames,
    pairs: PairBudget,
) -> Moves:
    """Return the moves of a class of tensors.

    Args:
        source: split at the source.
        destination: split at the destination.
        item_bytes: size of one element.
        tensors: the members of the class: their indices in the source's layout and in the destination's.
        loads: of the source ranks; the load of these tensors is added.
        names: of the first tensor and the replicas, for messages.
        pairs: of boxes that may still be compared for this plan.

    Raises:
        WeightsError: a box without a source, or source boxes that overlap, or too many pairs of boxes.
    """
    held_rows, held = _distinct(source)
    wanted_rows, wanted = _distinct(destination)
    of_wanted, of_held, parts = _matches(wanted, held, names, pairs)

    holder_order = np.argsort(held_rows, kind="stable")
    holder_order = holder_order[held_rows[holder_order] >= 0]
    holder_begins = np.searchsorted(held_rows[holder_order], np.arange(len(held) + 1))
    holder_ranks = source.rank[holder_order]

    # Row by row of the destination, the parts of its box.
    rows = np.flatnonzero(wanted_rows >= 0)
    first = np.searchsorted(of_wanted, np.arange(len(wanted) + 1))
    count = np.diff(first)[wanted_rows[rows]]
    ends = np.cumsum(count)
    move_rows = np.repeat(rows, count)
    move_parts = np.arange(len(move_rows)) + np.repeat(first[wanted_rows[rows]] - (ends - count), count)
    move_ranks = destination.rank[move_rows]
    part_bytes = (parts[:, 1] - parts[:, 0]).prod(axis=1, dtype=np.int64) * item_bytes

    choices = _Choices(holder_begins, holder_ranks, loads, len(tensors[0]))
    choices.choose(of_held[move_parts], move_ranks, part_bytes[move_parts])
    boxes = np.stack([parts[:, 0], parts[:, 1] - parts[:, 0]], axis=1)
    return Moves(
        item_bytes=item_bytes,
        num_dims=len(source.shape),
        source_tensors=packed(tensors[0]),
        destination_tensors=packed(tensors[1]),
        part_boxes=packed(boxes, 8),
        part_sources=packed(of_held),
        holder_begins=packed(holder_begins),
        holder_ranks=packed(holder_ranks),
        holder_pieces=packed(source.piece[holder_order]),
        move_begins=packed(np.searchsorted(move_ranks, np.arange(len(loads.alike) + 1))),
        move_parts=packed(move_parts),
        move_pieces=packed(destination.piece[move_rows]),
        choice_sets=packed(choices.sets),
        choice_phases=packed(choices.phases),
        set_begins=packed(choices.set_begins),
        set_positions=packed(choices.set_positions),
    )


class _Choices:
    """Choice of a holder for each move: sets of equally near holders, and the position of each move in its set.

    Moves that choose among the same ranks are assigned largest first, round-robin, beginning with the least loaded
    rank. So the loads of the ranks of a set differ by the largest move at most.
    """

    def __init__(self, holder_begins: Ints, holder_ranks: Ints, loads: SourceLoads, num_members: int) -> None:
        self._begins, self._ranks, self._loads, self._num_members = holder_begins, holder_ranks, loads, num_members
        self.sets = self.phases = self.set_begins = self.set_positions = np.zeros(0, np.int64)

    def choose(self, boxes: Ints, ranks: Ints, num_bytes: Ints) -> None:
        """Choose holders for moves of source `boxes` into destination `ranks`, of `num_bytes` each."""
        num_holders = np.diff(self._begins)
        if num_holders.max(initial=1) == 1:
            self._loads.add(self._ranks[self._begins[boxes]], num_bytes * self._num_members)
            return
        lists = self._lists()
        kinds, sets = np.unique(np.stack([lists[boxes], self._loads.alike[ranks]]), axis=1, return_inverse=True)
        self.sets = sets.reshape(-1)
        self.phases = np.zeros(len(boxes), np.int64)
        example = np.zeros(len(lists), np.int64)
        example[lists[::-1]] = np.arange(len(lists))[::-1]
        positions: list[Ints] = []
        alike: dict[bytes, list[int]] = {}
        for index, (group, column) in enumerate(kinds.T.tolist()):
            box = example[group]
            holders = self._ranks[self._begins[box] : self._begins[box + 1]]
            distance = self._loads.distance[holders, column]
            positions.append(np.flatnonzero(distance == distance.min()))
            alike.setdefault(holders[positions[-1]].tobytes(), []).append(index)
        group_of = np.zeros(len(positions), np.int64)
        for number, members in enumerate(alike.values()):
            group_of[members] = number
        order = np.lexsort((np.arange(len(boxes)), -num_bytes, group_of[self.sets]))
        bounds = np.searchsorted(group_of[self.sets][order], np.arange(len(alike) + 1))
        # Moves with little choice go first: their load counts when the others choose.
        numbered = sorted(enumerate(alike.items()), key=lambda entry: len(entry[1][0]) > 8)
        for number, (key, members) in numbered:
            moves = order[bounds[number] : bounds[number + 1]]
            by_load = self._round_robin(np.frombuffer(key, np.int64), moves, num_bytes[moves])
            for index in members:
                positions[index] = positions[index][by_load]
        self.set_begins = np.concatenate([[0], np.cumsum([len(some) for some in positions])])
        self.set_positions = np.concatenate([self.phases[:0], *positions])

    def _lists(self) -> Ints:
        """Number the source boxes so that those held by the same ranks have the same number."""
        numbers: dict[bytes, int] = {}
        keys = [self._ranks[a:b].tobytes() for a, b in zip(self._begins[:-1], self._begins[1:], strict=True)]
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)

    def _round_robin(self, ranks: Ints, moves: Ints, num_bytes: Ints) -> Ints:
        """Assign `moves`, largest first, to `ranks`; return the order of the ranks."""
        by_load = self._loads.least_first(ranks)
        size = len(ranks)
        phases = np.arange(len(moves)) * self._num_members % size
        self.phases[moves] = phases
        each, rest = divmod(self._num_members, size)
        edges = np.zeros(2 * size + 1, np.int64)
        np.add.at(edges, phases, num_bytes)
        np.add.at(edges, phases + rest, -num_bytes)
        extra = np.cumsum(edges)[: 2 * size].reshape(2, size).sum(axis=0)
        self._loads.add(ranks[by_load], extra + each * int(num_bytes.sum()))
        return by_load


def _distinct(split: TensorSplit) -> tuple[Ints, Ints]:
    """Return for each row of `split` the number of its box, -1 where empty, and begin and end of each distinct box.

    The boxes have shape (boxes, 2, dims) and lie in row-major order of their offsets.
    """
    numbers = np.full(len(split.rank), -1, np.int64)
    rows = np.flatnonzero(split.volume > 0)
    num_dims = len(split.shape)
    if not num_dims or not len(rows):
        numbers[rows] = 0
        return numbers, np.zeros((min(len(rows), 1), 2, num_dims), np.int64)
    corners = np.concatenate([split.offset[rows], split.offset[rows] + split.size[rows]], axis=1)
    boxes, inverse = np.unique(corners, axis=0, return_inverse=True)
    numbers[rows] = inverse.reshape(-1)
    return numbers, boxes.reshape(len(boxes), 2, num_dims)


def _matches(wanted: Ints, held: Ints, names: MoveNames, pairs: PairBudget) -> tuple[Ints, Ints, Ints]:
    """Return the intersecting pairs of wanted and held boxes, and their shared parts, which cover every wanted box.

    Raises:
        WeightsError: as `make_moves`.
    """
    overlap = first_overlap(held[:, 0], held[:, 1], pairs=pairs)
    if overlap is not None:
        shared = _box(*_intersections(held[[overlap[0]]], held[[overlap[1]]])[0])
        raise WeightsError(
            f"Tensor {names.tensor}: box {shared} lies in two different shards of {names.source}; planning needs boxes "
            "of one tensor to be equal or disjoint."
        )
    of_wanted, of_held = intersecting_pairs(wanted[:, 0], wanted[:, 1], held[:, 0], held[:, 1], pairs)
    parts = _intersections(wanted[of_wanted], held[of_held])
    _check_covered(wanted, of_wanted, held[of_held], parts, names)
    return of_wanted, of_held, parts


def _intersections(some: Ints, others: Ints) -> Ints:
    """Return begin and end of the intersections of pairs of boxes."""
    return np.stack([np.maximum(some[:, 0], others[:, 0]), np.minimum(some[:, 1], others[:, 1])], axis=1)


def _check_covered(wanted: Ints, of_wanted: Ints, held: Ints, parts: Ints, names: MoveNames) -> None:
    """Raise unless the parts, which are disjoint, cover every wanted box."""
    volume = (wanted[:, 1] - wanted[:, 0]).prod(axis=1, dtype=np.int64)
    np.subtract.at(volume, of_wanted, (parts[:, 1] - parts[:, 0]).prod(axis=1, dtype=np.int64))
    if volume.any():
        row = int(np.flatnonzero(volume)[0])
        mine = of_wanted == row
        gap = gap_in(_box(*wanted[row]), held[mine, 0], held[mine, 1])
        raise WeightsError(f"Tensor {names.tensor}: no rank of {names.source} holds box {gap}.")


def _box(begin: Ints, end: Ints) -> Box:
    return Box(offset=tuple(begin.tolist()), size=tuple((end - begin).tolist()))
