"""Which maxima the ranks of a source tell one another, so that each can quantise its own boxes. Pure.

Every rank makes its schedule from the layout of all. The parts of a message have no names: sender and receiver list
them in the same order, by tensor, then as `QuantSpec.exchanges` does.
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
    """Maxima of a box of groups, of one of the rank's shards."""

    shard: int
    """Index of the shard that has them, or that needs them."""
    groups: Box


@dataclass(frozen=True)
class Schedule:
    """What one rank tells and is told. Tuples have an entry for each rank of the source."""

    tells: tuple[tuple[MaximaPart, ...], ...]
    """Its own maxima that others need."""
    hears: tuple[tuple[MaximaPart, ...], ...]
    """The maxima of others that it needs."""
    reports: tuple[tuple[int, ...], ...]
    """Scales of tensors, as `Quantisation.scale_of` numbers them, for which the other rank collects the maximum."""
    collects: tuple[tuple[int, ...], ...]
    """Those for which this rank collects it, and the other has part of it; it then tells the other the whole."""
    num_rounds: int
    """0 when no rank needs anything of another; 2 when whole maxima are collected; the same for all ranks."""


class _Holder(NamedTuple):
    """One box of a tensor."""

    rank: int
    box: Box


class _Talk(NamedTuple):
    """What `rank` of the schedule has to do with one kind of tensor; shards are counted among the tensor's boxes."""

    tells: tuple[tuple[int, MaximaPart], ...]
    hears: tuple[tuple[int, MaximaPart], ...]
    """With the other rank."""
    crosses: bool
    """Whether any rank tells another something."""


def make_schedule(layout: Layout, rank: int, made: Quantisation) -> Schedule:
    """Return the schedule of `rank`.

    Raises:
        WeightsError: a group, or a tensor with a scale of its own, of which `layout` does not hold every element.
    """
    num_ranks = len(layout.ranks)
    tells: list[list[MaximaPart]] = [[] for _ in range(num_ranks)]
    hears: list[list[MaximaPart]] = [[] for _ in range(num_ranks)]
    scaled: dict[int, set[int]] = {}
    cut = False
    known: dict[object, _Talk] = {}  # tensors of one shape and split have the same to say
    for tensor, (holders, shards) in enumerate(_holders(layout)):
        spec = made.specs[tensor]
        if spec is None or not holders:
            continue
        kind = (spec.tensor.shape, spec.format, tuple(holders))
        if kind not in known:
            _check_cover(layout, spec, [box for _, box in holders])
            known[kind] = _talk(spec, holders, rank)
        talk = known[kind]
        cut = cut or talk.crosses
        for lists, parts in ((tells, talk.tells), (hears, talk.hears)):
            for other, part in parts:
                lists[other].append(MaximaPart(shards[part.shard], part.groups))
        if spec.format.two_level:
            scaled.setdefault(made.scale_of[tensor], set()).update(holder.rank for holder in holders)
    reports, collects = _collections(scaled, rank, num_ranks)
    whole = any(len(ranks) > 1 for ranks in scaled.values())
    return Schedule(
        tells=tuple(map(tuple, tells)),
        hears=tuple(map(tuple, hears)),
        reports=reports,
        collects=collects,
        num_rounds=2 if whole else int(cut),
    )


def _collections(
    scaled: Mapping[int, Set[int]], rank: int, num_ranks: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return what `rank` reports to each rank and what it collects of each.

    Args:
        scaled: for each scale of tensors the ranks that hold part of them. They take turns in collecting.
        rank: whose part it is.
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


def _talk(spec: QuantSpec, holders: Sequence[_Holder], rank: int) -> _Talk:
    tells: list[tuple[int, MaximaPart]] = []
    hears: list[tuple[int, MaximaPart]] = []
    crosses = False
    for exchange in spec.exchanges([box for _, box in holders]):
        to, source = holders[exchange.destination].rank, holders[exchange.source].rank
        crosses = crosses or to != source
        if source == rank:
            tells.append((to, MaximaPart(exchange.source, exchange.groups)))
        if to == rank:
            hears.append((source, MaximaPart(exchange.destination, exchange.groups)))
    return _Talk(tells=tuple(tells), hears=tuple(hears), crosses=crosses)


def _check_cover(layout: Layout, spec: QuantSpec, boxes: Sequence[Box]) -> None:
    """Check that the maximum of every group that a box cuts is to be had."""
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
                f"cannot be known; give the layout of all ranks together."
            )
