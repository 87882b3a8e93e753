"""The plan: which box of which source shard each destination shard takes, in which order. Pure and deterministic.

The controller makes it from two layouts; the destination executes it. Every destination element is delivered exactly
once. Equal boxes at several source ranks are copies to choose from: the nearest (see `topology.LINKS`), then by turns,
so that cards and ranks have near-equal bytes to send. Boxes of one tensor that overlap without being equal are an
error, because then two ranks could disagree about an element.

A plan says once what tensors that are split alike have in common (see `moves`), so its size does not grow with the
number of transfers. What one destination rank reads follows from it by `of_destination`; everything else that a plan
is asked for (bytes, memory) is computed from the moves too, so that no two statements of it can disagree.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, TypeVar

import msgspec
import numpy as np
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.buckets import Buckets, aligned_sizes, expand
from starling.weightsync.plan.compact import CompactLayout, check_compact, to_compact
from starling.weightsync.plan.layout import (
    ALIGNMENT,
    Layout,
    Place,
    ShardPiece,
    TensorSpec,
    check_layout,
    decode,
    encode,
)
from starling.weightsync.plan.matching import Loads, Names, make_moves
from starling.weightsync.plan.moves import MAX_TRANSFERS, Bucket, Moves, PieceIndex, Transfer, column, packed
from starling.weightsync.plan.topology import Topology, card_numbers, distances
from starling.weightsync.plan.validation import check_buckets, check_index, check_moves

__all__ = [
    "MAX_BUCKET_BYTES",
    "MAX_IN_FLIGHT",
    "MAX_TRANSFERS",
    "Bucket",
    "Plan",
    "Transfer",
    "check_plan",
    "decode_plan",
    "make_plan",
]

MAX_BUCKET_BYTES: Final = 1 << 30
"""Largest bucket that can be asked for, and the most that a source sends at once."""
MAX_IN_FLIGHT: Final = 1024
"""Most buckets that one destination rank may have under way."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All that moves from one replica to another."""

    source: str
    destination: str
    bucket_bytes: int
    """No bucket takes more room than this."""
    buckets_in_flight: int
    """How many buckets a destination rank has under way at most, over all its sources."""
    source_pieces: PieceIndex
    destination_pieces: PieceIndex
    moves: tuple[Moves, ...]
    """One for each class of tensors."""
    only_rank: int = -1
    """The one destination rank that this part of a plan is for; -1 for all."""

    def of_destination(self, rank: int) -> Sequence[Bucket]:
        """Return the buckets that destination rank `rank` reads, in its order. They are made when they are looked at.

        Raises:
            WeightsError: a rank that this plan is not for, or more transfers than can be held.
        """
        return self.expanded(rank)

    def expanded(self, rank: int) -> Buckets:
        """As `of_destination`, with the arrays behind the buckets."""
        if not 0 <= rank < self.destination_pieces.num_ranks or self.only_rank not in (-1, rank):
            raise WeightsError(f"This plan from {self.source} to {self.destination} is not for rank {rank}.")
        kept = self.__dict__.get("_expanded")  # asked for several times in a row by who executes it
        if kept is None or kept.rank != rank:
            limit = self.bucket_bytes // ALIGNMENT * ALIGNMENT
            kept = expand(self.moves, self.source_pieces, self.destination_pieces, rank, limit)
            self.__dict__["_expanded"] = kept
        buckets: Buckets = kept
        return buckets

    def of_rank(self, rank: int) -> Plan:
        """Return the part of the plan that destination rank `rank` needs.

        Raises:
            WeightsError: a rank that this plan is not for.
        """
        if not 0 <= rank < self.destination_pieces.num_ranks or self.only_rank not in (-1, rank):
            raise WeightsError(f"This plan from {self.source} to {self.destination} is not for rank {rank}.")
        orders = {rank: self.destination_pieces.orders[rank]} if rank in self.destination_pieces.orders else {}
        parts = [moves.into(rank) for moves in self.moves]
        return msgspec.structs.replace(
            self,
            destination_pieces=msgspec.structs.replace(self.destination_pieces, orders=orders),
            moves=tuple(part for part in parts if part.move_parts),
            only_rank=rank,
        )

    @property
    def ranks(self) -> range:
        """The destination ranks that the plan is for."""
        return (
            range(self.destination_pieces.num_ranks)
            if self.only_rank < 0
            else range(self.only_rank, self.only_rank + 1)
        )

    @cached_property
    def pair_bytes(self) -> Ints:
        """Payload from each source rank to each destination rank; shape (source ranks, destination ranks)."""
        total = np.zeros((self.source_pieces.num_ranks, self.destination_pieces.num_ranks), np.int64)
        for moves in self.moves:
            for ranks, num_bytes in moves.sent():
                np.add.at(total, (ranks, moves.destination_ranks), num_bytes)
        return total

    @property
    def total_bytes(self) -> int:
        """Payload of the whole plan."""
        return int(self.pair_bytes.sum())

    @cached_property
    def staging_bytes(self) -> Ints:
        """Room that all pieces of each destination rank take, each at a multiple of `ALIGNMENT`."""
        total = np.zeros(self.destination_pieces.num_ranks, np.int64)
        for moves in self.moves:
            ranks, sizes = moves.filled()
            np.add.at(total, ranks, aligned_sizes(sizes) * moves.num_members)
        return total

    @cached_property
    def in_flight_bytes(self) -> Ints:
        """Room that the buckets of each destination rank take that are under way at one time."""
        limit = self.bucket_bytes // ALIGNMENT * ALIGNMENT
        total = np.zeros(self.destination_pieces.num_ranks, np.int64)
        most = self.buckets_in_flight * limit
        for moves in self.moves:
            sizes = moves.part_bytes[column(moves.move_parts)]
            # A part that is cut fills buckets of its own, each a little larger than its share.
            sizes = aligned_sizes(sizes) + ALIGNMENT * (sizes // limit) * 2
            np.add.at(total, moves.destination_ranks, np.minimum(sizes * moves.num_members, most))
        return np.minimum(total, most)

    def peak_bytes(self, rank: int, *, in_place: bool = False) -> int:
        """Return a bound on the memory that `rank` takes beside its tensors: staging, unless in place, and buckets.

        With the layouts too, `peaks.destination_peak` has the figure itself: most boxes arrive where they belong.
        """
        return int(self.in_flight_bytes[rank]) + (0 if in_place else int(self.staging_bytes[rank]))

    @property
    def peak_staging_bytes(self) -> int:
        """The bound for the destination rank that needs most while it pulls into staging."""
        return max((self.peak_bytes(rank) for rank in self.ranks), default=0)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, by destination rank: to look at small plans."""
        return tuple(bucket for rank in self.ranks for bucket in self.expanded(rank))


def decode_plan(data: bytes | bytearray | memoryview) -> Plan:
    """Read a plan from MessagePack, and check that it is well formed: no number in it leads out of another's range.

    Raises:
        WeightsError: `data` is not a plan.
    """
    plan = decode(Plan, data)
    _check_limits(plan.bucket_bytes, plan.buckets_in_flight)
    check_index(plan.source_pieces, plan.source)
    check_index(plan.destination_pieces, plan.destination)
    if not -1 <= plan.only_rank < plan.destination_pieces.num_ranks:
        raise WeightsError(f"A plan for {plan.destination} names its rank {plan.only_rank}, which does not exist.")
    for moves in plan.moves:
        check_moves(moves, plan.source_pieces, plan.destination_pieces)
    return plan


def make_plan(
    source: Layout | CompactLayout,
    destination: Layout | CompactLayout,
    *,
    topology: Topology | None = None,
    bucket_bytes: int = 32 << 20,
    buckets_in_flight: int = 4,
) -> Plan:
    """Plan how every shard of `destination` is filled from `source`.

    Args:
        source: what the source holds.
        destination: what the destination needs.
        topology: the machines, for distances between ranks; without it, hosts and devices alone are compared.
        bucket_bytes: room that one bucket takes at most.
        buckets_in_flight: how many buckets a destination rank may have under way.

    Raises:
        WeightsError: a tensor that the source lacks, holds in another shape or element type, or does not hold wholly,
            or in overlapping boxes; the tensor and the box are named. Or adapters for another base.
    """
    _check_limits(bucket_bytes, buckets_in_flight)
    held, wanted = _compact(source), _compact(destination)
    if held.base != wanted.base:
        raise WeightsError(
            f"{wanted.replica} has its adapters on other weights than {held.replica}, or scales them otherwise: give "
            "both the same files in model.path, the same model.dtype and the same [model.lora]."
        )
    loads = Loads(distances(held.places, wanted.places, topology), card_numbers(held.places, topology))
    classes = []
    for sources, destinations in _classes(held, wanted):
        first, into = sources[0], destinations[0]
        names = Names(wanted.tensors[into].name, held.replica, wanted.replica)
        splits = held.splits[held.split_of[first]], wanted.splits[wanted.split_of[into]]
        classes.append(make_moves(*splits, int(wanted.item_bytes[into]), (sources, destinations), loads, names))
    return Plan(
        source=held.replica,
        destination=wanted.replica,
        bucket_bytes=bucket_bytes,
        buckets_in_flight=buckets_in_flight,
        source_pieces=_index(held),
        destination_pieces=_index(wanted),
        moves=tuple(classes),
    )


def check_plan(plan: Plan, pieces: Mapping[int, Sequence[ShardPiece]], destination: Layout, rank: int) -> None:
    """Check that `plan` fills every shard of destination rank `rank` exactly once, from the right pieces.

    Args:
        plan: the plan to check.
        pieces: what each source rank holds, in the order of its shards.
        destination: the layout that the plan is for.
        rank: the destination rank whose part of the plan is checked.

    Raises:
        WeightsError: naming the tensor and the box at fault.
    """
    check_buckets(plan.of_destination(rank), pieces, destination, rank, names=(plan.source, plan.destination))


def _check_limits(bucket_bytes: int, buckets_in_flight: int) -> None:
    if not ALIGNMENT <= bucket_bytes <= MAX_BUCKET_BYTES:
        raise WeightsError(f"bucket_bytes is {bucket_bytes}, expected {ALIGNMENT} to {MAX_BUCKET_BYTES}.")
    if not 1 <= buckets_in_flight <= MAX_IN_FLIGHT:
        raise WeightsError(f"buckets_in_flight is {buckets_in_flight}, expected 1 to {MAX_IN_FLIGHT}.")


def _compact(layout: Layout | CompactLayout) -> CompactLayout:
    if isinstance(layout, CompactLayout):
        check_compact(layout)
        return layout
    check_layout(layout)
    return to_compact(layout)


def _index(layout: CompactLayout) -> PieceIndex:
    return PieceIndex(
        num_ranks=len(layout.places),
        split_of=packed(layout.split_of),
        counts=packed(layout.counts),
        orders={rank: packed(order) for rank, order in layout.orders.items()},
    )


def _classes(held: CompactLayout, wanted: CompactLayout) -> list[tuple[Ints, Ints]]:
    """Return the tensors of each class, by their indices in both layouts, the class of the first tensor first."""
    filled = np.array([bool(split.volume.any()) for split in wanted.splits], bool)
    into = np.flatnonzero(filled[wanted.split_of]) if len(wanted.splits) else np.zeros(0, np.int64)
    take = _owners(held, wanted, into)
    keys = np.stack([held.split_of[take], wanted.split_of[into], wanted.item_bytes[into]])
    _, first, kind = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    bounds = np.searchsorted(kind.reshape(-1)[order], np.arange(len(first) + 1))
    members = [order[a:b] for a, b in itertools.pairwise(bounds)]
    return [(take[members[at]], into[members[at]]) for at in np.argsort(first)]


def _owners(held: CompactLayout, wanted: CompactLayout, into: Ints) -> Ints:
    """Return the source tensor that fills each wanted one and every name that the destination ties to it."""
    index = {spec.name: number for number, spec in enumerate(held.tensors)}
    tied: dict[str, list[str]] = {}
    for spec in wanted.tensors:
        if spec.same_as:
            tied.setdefault(spec.same_as, []).append(spec.name)
    owners = np.zeros(len(into), np.int64)
    for at, number in enumerate(into.tolist()):
        owners[at] = _owner(held, wanted, wanted.tensors[number], index, tied)
    return owners


def _owner(
    held: CompactLayout,
    wanted: CompactLayout,
    spec: TensorSpec,
    index: Mapping[str, int],
    tied: Mapping[str, list[str]],
) -> int:
    names = [spec.name, *tied.get(spec.name, ())]
    found = {index[held.tensors[index[name]].same_as or name] for name in names if name in index}
    if not found:
        raise WeightsError(f"Tensor {spec.name} of {wanted.replica} is unknown to {held.replica}.")
    if len(found) > 1:
        raise WeightsError(
            f"{wanted.replica} keeps {' and '.join(names)} in one memory, "
            f"but they are different tensors in {held.replica}; untie them."
        )
    (number,) = found
    owner = held.tensors[number]
    if (owner.shape, owner.dtype) != (spec.shape, spec.dtype):
        raise WeightsError(
            f"Tensor {spec.name} is {spec.dtype} {spec.shape} in {wanted.replica} "
            f"but {owner.dtype} {owner.shape} in {held.replica}."
        )
    return number


# JOINED from starling.weightsync.replan: Plans that are kept: a replica that did not change has its plan,
# whoever joins or leaves.  Replicas that lay out their weights alike, and are equally far from the source,
# have one plan but for their names: a thousand rollouts are planned for once.


K = TypeVar("K")
V = TypeVar("V")

KEPT_PLANS: Final = 1024
"""The plans used longest ago are forgotten beyond these."""
KEPT_SHAPES: Final = 65_536


class PlanCache:
    """Makes each plan once: by what the layouts say, not by who said it or when."""

    def __init__(self, topology: Topology | None = None, *, bucket_bytes: int = 32 << 20) -> None:
        self._topology, self._bucket_bytes = topology, bucket_bytes
        self._kept: OrderedDict[tuple[str, str, bytes], Plan] = OrderedDict()
        self._named: OrderedDict[tuple[int, str, str], tuple[Plan, Plan]] = OrderedDict()
        self._shapes: OrderedDict[int, tuple[Layout | CompactLayout, str]] = OrderedDict()

    def plan(self, source: Layout | CompactLayout, destination: Layout | CompactLayout) -> Plan:
        """Return the plan from `source` to `destination`; the same object as before if neither changed.

        Raises:
            WeightsError: as `make_plan`.
        """
        away = distances(_places(source), _places(destination), self._topology).tobytes()
        key = (self._shape(source), self._shape(destination), away)
        plan = self._kept.pop(key, None)
        if plan is None:
            plan = make_plan(source, destination, topology=self._topology, bucket_bytes=self._bucket_bytes)
        _keep(self._kept, key, plan)
        if (plan.source, plan.destination) == (source.replica, destination.replica):
            return plan
        name = (id(plan), source.replica, destination.replica)
        found = self._named.pop(name, None)
        if found is None or found[0] is not plan:
            renamed = msgspec.structs.replace(plan, source=source.replica, destination=destination.replica)
            found = (plan, renamed)
        _keep(self._named, name, found)
        return found[1]

    def _shape(self, layout: Layout | CompactLayout) -> str:
        """Return a digest of all that a layout says but for its name, and where its ranks run."""
        if isinstance(layout, CompactLayout):
            return f"{layout.replica} {layout.digest}"
        known = self._shapes.pop(id(layout), None)
        if known is None or known[0] is not layout:
            ranks = tuple(msgspec.structs.replace(rank, place=Place()) for rank in layout.ranks)
            known = (
                layout,
                xxhash.xxh3_128_hexdigest(encode(msgspec.structs.replace(layout, replica="", ranks=ranks))),
            )
        self._shapes[id(layout)] = known
        while len(self._shapes) > KEPT_SHAPES:
            self._shapes.popitem(last=False)
        return known[1]


def _places(layout: Layout | CompactLayout) -> tuple[Place, ...]:
    return layout.places if isinstance(layout, CompactLayout) else tuple(rank.place for rank in layout.ranks)


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > KEPT_PLANS:
        kept.popitem(last=False)
