"""Schedule of the maxima that the ranks of a source exchange, so that each can quantise its own boxes. Pure.

Every rank makes its schedule from the layout of all ranks. The parts of a message have no names: sender and receiver
list them in the same order, by tensor, then as `QuantSpec.exchanges` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import first_gap
from starling.weightsync.plan.layout import Box, Layout
from starling.weightsync.quantise.layouts import Quantisation
from starling.weightsync.quantise.spec import QuantSpec


class MaximaPart(NamedTuple):
    """Maxima of a box of groups of one of the rank's shards."""

    shard: int
    """Index of the shard that has or needs them."""
    groups: Box


@dataclass(frozen=True)
class Schedule:
    """Messages of one rank. Tuples have an entry for each rank of the source."""

    sends: tuple[tuple[MaximaPart, ...], ...]
    """Its own maxima that others need."""
    receives: tuple[tuple[MaximaPart, ...], ...]
    """Maxima of others that it needs."""
    reports: tuple[tuple[int, ...], ...]
    """Tensor scales, numbered as by `Quantisation.scale_of`, whose maximum the other rank collects."""
    collects: tuple[tuple[int, ...], ...]
    """Tensor scales whose maximum this rank collects from the other, and then sends back to it."""
    num_rounds: int
    """0 if no rank needs maxima of another; 2 if tensor maxima are collected; the same for all ranks."""


class _Holder(NamedTuple):
    """One box of a tensor."""

    rank: int
    box: Box


class _Messages(NamedTuple):
    """Messages of one rank for one kind of tensor; shards are numbered among the tensor's boxes."""

    sends: tuple[tuple[int, MaximaPart], ...]
    receives: tuple[tuple[int, MaximaPart], ...]
    """With the other rank."""
    crosses: bool
    """Whether any rank sends maxima to another."""


def make_schedule(layout: Layout, rank: int, made: Quantisation) -> Schedule:
    """Return the schedule of `rank`.

    Raises:
        WeightsError: a group, or a tensor with a scale of the whole, of which `layout` lacks elements.
    """
    num_ranks = len(layout.ranks)
    sends: list[list[MaximaPart]] = [[] for _ in range(num_ranks)]
    receives: list[list[MaximaPart]] = [[] for _ in range(num_ranks)]
    scaled: dict[int, set[int]] = {}
    cut = False
    known: dict[object, _Messages] = {}  # tensors of one shape and split exchange alike
    for tensor, (holders, shards) in enumerate(_holders(layout)):
        spec = made.specs[tensor]
        if spec is None or not holders:
            continue
        kind = (spec.tensor.shape, spec.format, tuple(holders))
        if kind not in known:
            _check_cover(layout, spec, [box for _, box in holders])
            known[kind] = _messages(spec, holders, rank)
        messages = known[kind]
        cut = cut or messages.crosses
        for lists, parts in ((sends, messages.sends), (receives, messages.receives)):
            for other, part in parts:
                lists[other].append(MaximaPart(shards[part.shard], part.groups))
        if spec.format.two_level:
            scaled.setdefault(made.scale_of[tensor], set()).update(holder.rank for holder in holders)
    reports, collects = _collections(scaled, rank, num_ranks)
    whole = any(len(ranks) > 1 for ranks in scaled.values())
    return Schedule(
        sends=tuple(map(tuple, sends)),
        receives=tuple(map(tuple, receives)),
        reports=reports,
        collects=collects,
        num_rounds=2 if whole else int(cut),
    )


def _collections(
    scaled: Mapping[int, Set[int]], rank: int, num_ranks: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the tensor scales that `rank` reports to each rank, and that it collects from each.

    Args:
        scaled: for each tensor scale the ranks that hold a part. Collecting rotates among them.
        rank: the rank of the schedule.
        num_ranks: of the source.
    """
    reports: list[list[int]] = [[] for _ in range(num_ranks)]
    collects: list[list[int]] = [[] for _ in range(num_ranks)]
    for scale, holders in scaled.items():
        ranks = sorted(holders)
        collector = ranks[scale % len(ranks)]
        if rank in holders:
            reports[collector].append(scale)
        if rank == collector:
            for holder in ranks:
                collects[holder].append(scale)
    return tuple(map(tuple, reports)), tuple(map(tuple, collects))


def _holders(layout: Layout) -> list[tuple[list[_Holder], list[int]]]:
    """Return the boxes of each tensor, and the index of each among its rank's shards."""
    found: list[tuple[list[_Holder], list[int]]] = [([], []) for _ in layout.tensors]
    for rank, held in enumerate(layout.ranks):
        for index, shard in enumerate(held.shards):
            holders, shards = found[shard.tensor]
            holders.append(_Holder(rank, shard.box))
            shards.append(index)
    return found


def _messages(spec: QuantSpec, holders: Sequence[_Holder], rank: int) -> _Messages:
    sends: list[tuple[int, MaximaPart]] = []
    receives: list[tuple[int, MaximaPart]] = []
    crosses = False
    for exchange in spec.exchanges([box for _, box in holders]):
        to, source = holders[exchange.destination].rank, holders[exchange.source].rank
        crosses = crosses or to != source
        if source == rank:
            sends.append((to, MaximaPart(exchange.source, exchange.groups)))
        if to == rank:
            receives.append((source, MaximaPart(exchange.destination, exchange.groups)))
    return _Messages(sends=tuple(sends), receives=tuple(receives), crosses=crosses)


def _check_cover(layout: Layout, spec: QuantSpec, boxes: Sequence[Box]) -> None:
    """Check that the maximum of every group that a box cuts can be computed."""
    name = spec.tensor.name
    if spec.format.two_level:
        needed = {Box(offset=(0,) * len(spec.tensor.shape), size=spec.tensor.shape)}
    else:
        needed = {spec.element_box(groups) for box in set(boxes) for groups in spec.cut_groups(box)}
    for box in needed:
        gap = first_gap(box, boxes)
        if gap is not None:
            raise WeightsError(
                f"No rank of {layout.replica} holds {gap} of {name}, without which a scale of {spec.format.name} "
                f"cannot be computed; give the layout of all ranks together."
            )
