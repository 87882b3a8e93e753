"""Planner: assigns a source box to every destination box, and caches plans. Pure and deterministic.

The controller makes a plan from two layouts; the destination executes it. Every destination element is delivered
exactly once. Equal boxes at several source ranks are copies to choose from: the nearest (see `topology.LINKS`), then
round-robin, so that cards and ranks send near-equal numbers of bytes. Boxes of one tensor that overlap without being
equal are an error, because then two ranks could disagree about an element.

A plan stores the moves of equally split tensors once (see `moves`), so its size does not grow with the number of
transfers. `of_destination` derives the transfers of one destination rank; bytes and memory are computed from the moves
too, so that they cannot disagree.

`PlanCache` keeps plans: replicas with the same layout, equally far from the source, share one plan except for their
names, so a thousand rollouts are planned for once.
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
from starling.weightsync.plan.boxes import Ints, PairBudget
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
from starling.weightsync.plan.matching import MoveNames, SourceLoads, make_moves
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
"""Largest bucket that can be requested, and the most that a source sends at once."""
MAX_IN_FLIGHT: Final = 1024
"""Maximum number of buckets in flight of one destination rank."""
MAX_CLASSES: Final = 2048
"""Maximum number of classes of tensors that are split differently, at a millisecond each. A trillion parameters in 384
experts, from 1,024 ranks to 64, have 143."""
MAX_COUNTS: Final = 1 << 24
"""Maximum product of the ranks of a layout and the ways in which it splits tensors."""
MAX_DESTINATION_COUNTS: Final = 1 << 16
"""The same of a destination, at 0.1 ms each: a policy expands the plan for each of its ranks to compute a layout root.
A trillion parameters over 64 ranks have 9,152."""
MAX_PLANS: Final = 1024
"""Plans that a `PlanCache` keeps; the least recently used ones are dropped."""
MAX_DISTANCES: Final = 64
"""Pairs of places whose distances a `PlanCache` remembers. Rollouts join host by host."""
MAX_LAYOUT_DIGESTS: Final = 65_536

K = TypeVar("K")
V = TypeVar("V")


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The transfers from one replica to another."""

    source: str
    destination: str
    bucket_bytes: int
    """Largest size of a bucket, with padding."""
    buckets_in_flight: int
    """Maximum number of buckets in flight of one destination rank, over all its sources."""
    source_pieces: PieceIndex
    destination_pieces: PieceIndex
    moves: tuple[Moves, ...]
    """One per class of tensors."""
    only_rank: int = -1
    """Destination rank of a partial plan; -1 for a plan for all ranks."""

    def of_destination(self, rank: int) -> Sequence[Bucket]:
        """Return the buckets that destination rank `rank` reads, in order. They are created on access.

        Raises:
            WeightsError: a rank that this plan is not for, or more transfers than `buckets.MAX_ROWS`.
        """
        return self.expanded(rank)

    def expanded(self, rank: int) -> Buckets:
        """As `of_destination`, with the arrays behind the buckets."""
        if not 0 <= rank < self.destination_pieces.num_ranks or self.only_rank not in (-1, rank):
            raise WeightsError(f"This plan from {self.source} to {self.destination} is not for rank {rank}.")
        kept = self.__dict__.get("_expanded")  # the executor calls this several times in a row
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

    def renamed(self, source: str, destination: str) -> Plan:
        """Return the plan between two replicas with equal layouts. Its sizes are equal, and are computed once."""
        renamed = msgspec.structs.replace(self, source=source, destination=destination)
        renamed.__dict__.update(pair_bytes=self.pair_bytes, num_boxes=self.num_boxes)
        return renamed

    @property
    def ranks(self) -> range:
        """Destination ranks of the plan."""
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
    def num_boxes(self) -> int:
        """Number of boxes that are moved, each once per tensor; one that is larger than a bucket is cut further."""
        return sum(len(column(moves.move_parts)) * moves.num_members for moves in self.moves)

    @cached_property
    def num_distinct_boxes(self) -> int:
        """Number of boxes that are moved to one rank or several, each once per tensor."""
        return sum(len(column(moves.part_sources)) * moves.num_members for moves in self.moves)

    @cached_property
    def distinct_bytes(self) -> int:
        """Size of these boxes."""
        return sum(int(moves.part_bytes.sum()) * moves.num_members for moves in self.moves)

    @cached_property
    def staging_bytes(self) -> Ints:
        """Size of all pieces of each destination rank, each padded to a multiple of `ALIGNMENT`."""
        total = np.zeros(self.destination_pieces.num_ranks, np.int64)
        for moves in self.moves:
            ranks, sizes = moves.filled()
            np.add.at(total, ranks, aligned_sizes(sizes) * moves.num_members)
        return total

    @cached_property
    def in_flight_bytes(self) -> Ints:
        """Size of the buckets in flight of each destination rank."""
        limit = self.bucket_bytes // ALIGNMENT * ALIGNMENT
        total = np.zeros(self.destination_pieces.num_ranks, np.int64)
        most = self.buckets_in_flight * limit
        for moves in self.moves:
            sizes = moves.part_bytes[column(moves.move_parts)]
            # A part that is cut has buckets of its own, each a little larger than its share.
            sizes = aligned_sizes(sizes) + ALIGNMENT * (sizes // limit) * 2
            np.add.at(total, moves.destination_ranks, np.minimum(sizes * moves.num_members, most))
        return np.minimum(total, most)

    def peak_bytes(self, rank: int, *, in_place: bool = False) -> int:
        """Return a bound on the memory of `rank` in addition to its tensors: staging, unless in place, and buckets.

        With the layouts, `costs.estimate.destination_peak` gives the exact figure: most boxes are received in place.
        """
        return int(self.in_flight_bytes[rank]) + (0 if in_place else int(self.staging_bytes[rank]))

    @property
    def peak_staging_bytes(self) -> int:
        """The bound for the destination rank that needs most memory when it pulls into staging."""
        return max((self.peak_bytes(rank) for rank in self.ranks), default=0)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, by destination rank, for inspecting small plans."""
        return tuple(bucket for rank in self.ranks for bucket in self.expanded(rank))


def decode_plan(data: bytes | bytearray | memoryview) -> Plan:
    """Read a plan from MessagePack, and check that it is well formed: every index in it is in range.

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
        source: layout of the source.
        destination: layout of the destination.
        topology: for distances between ranks; without it, only what the places of the ranks say counts.
        bucket_bytes: largest size of a bucket, with padding.
        buckets_in_flight: most buckets in flight of one destination rank.

    Raises:
        WeightsError: a tensor that the source lacks, or has in another shape or element type, incomplete, or in
            overlapping boxes; the tensor and the box are named. Or adapters for another base.
    """
    _check_limits(bucket_bytes, buckets_in_flight)
    held, wanted = _compact(source), _compact(destination)
    if held.base != wanted.base:
        raise WeightsError(
            f"{wanted.replica} has its adapters on other weights than {held.replica}, or scales them differently: "
            "give both the same files in model.path, the same model.dtype and the same [model.lora]."
        )
    for layout, most in ((held, MAX_COUNTS), (wanted, MAX_DESTINATION_COUNTS)):
        if len(layout.splits) * len(layout.places) > most:
            raise WeightsError(
                f"{layout.replica} splits its tensors in {len(layout.splits)} ways over {len(layout.places)} ranks, "
                f"expected a product of at most {most}."
            )
    loads = SourceLoads(distances(held.places, wanted.places, topology), card_numbers(held.places, topology))
    classes, pairs = [], PairBudget()
    alike = _classes(held, wanted)
    if len(alike) > MAX_CLASSES:
        raise WeightsError(
            f"{wanted.replica} and {held.replica} split tensors in {len(alike)} different ways, expected at most "
            f"{MAX_CLASSES}."
        )
    for sources, destinations in alike:
        first, into = sources[0], destinations[0]
        names = MoveNames(wanted.tensors[into].name, held.replica, wanted.replica)
        splits = held.splits[held.split_of[first]], wanted.splits[wanted.split_of[into]]
        classes.append(make_moves(*splits, int(wanted.item_bytes[into]), (sources, destinations), loads, names, pairs))
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
        pieces: pieces of each source rank, in the order of its shards.
        destination: layout of the destination.
        rank: destination rank whose transfers are checked.

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
    """Return, for each wanted tensor, the source tensor that fills it and the names tied to it."""
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


class PlanCache:
    """Cache of plans, keyed by the contents of the layouts and not by the replicas' names."""

    def __init__(self, topology: Topology | None = None, *, bucket_bytes: int = 32 << 20) -> None:
        self._topology, self._bucket_bytes = topology, bucket_bytes
        self._plans: OrderedDict[tuple[str, str, bytes], Plan | WeightsError] = OrderedDict()
        self._renamed: OrderedDict[tuple[int, str, str], tuple[Plan, Plan]] = OrderedDict()
        self._digests: OrderedDict[int, tuple[Layout | CompactLayout, str]] = OrderedDict()
        self._distances: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        """By digests of the places of the sources and of the destinations, which may take megabytes."""

    def plan(self, source: Layout | CompactLayout, destination: Layout | CompactLayout) -> Plan:
        """Return the plan from `source` to `destination`; the same object as before if neither changed.

        Raises:
            WeightsError: as `make_plan`. It is kept, too: to find out may take a second.
        """
        distance = self._distance(_places(source), _places(destination))
        key = (self._digest(source), self._digest(destination), distance)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = self._made(source, destination)
        _store(self._plans, key, plan)
        if isinstance(plan, WeightsError):
            raise WeightsError(f"There is no plan from {source.replica} to {destination.replica}. {plan}")
        if (plan.source, plan.destination) == (source.replica, destination.replica):
            return plan
        name = (id(plan), source.replica, destination.replica)
        found = self._renamed.pop(name, None)
        if found is None or found[0] is not plan:
            found = (plan, plan.renamed(source.replica, destination.replica))
        _store(self._renamed, name, found)
        return found[1]

    def _made(self, source: Layout | CompactLayout, destination: Layout | CompactLayout) -> Plan | WeightsError:
        try:
            return make_plan(source, destination, topology=self._topology, bucket_bytes=self._bucket_bytes)
        except WeightsError as error:
            return WeightsError(str(error))  # without its traceback, which refers to both layouts

    def key(self, source: Layout | CompactLayout, destination: Layout | CompactLayout) -> str:
        """Return a key that is equal for plans that move the same boxes, whatever the replicas' names and places."""
        return f"{self._digest(source)}-{self._digest(destination)}"

    def forget(self, layout: Layout | CompactLayout) -> None:
        """Forget a layout whose replica is gone, and the plans from and to it, unless another replica has an equal one.

        A layout may take hundreds of MiB, and a replica may come back with another one again and again.
        """
        _, digest = self._digests.pop(id(layout), (None, ""))
        if not digest or any(digest == other for _, other in self._digests.values()):
            return
        for key in [key for key in self._plans if digest in key[:2]]:
            del self._plans[key]
        kept = {id(plan) for plan in self._plans.values()}
        for name in [name for name in self._renamed if name[0] not in kept]:
            del self._renamed[name]

    def _distance(self, sources: tuple[Place, ...], destinations: tuple[Place, ...]) -> bytes:
        """Return a digest of the distances between ranks, and of the cards that the sources share.

        Replicas of one host often name their places equally.
        """
        key = _digest_of_places(sources), _digest_of_places(destinations)
        digest = self._distances.pop(key, None)
        if digest is None:
            cards = card_numbers(sources, self._topology)
            between = distances(sources, destinations, self._topology)
            digest = xxhash.xxh3_128_digest(cards.tobytes() + between.tobytes())
        self._distances[key] = digest
        while len(self._distances) > MAX_DISTANCES:
            self._distances.popitem(last=False)
        return digest

    def _digest(self, layout: Layout | CompactLayout) -> str:
        """Return a digest of a layout without its name and the places of its ranks."""
        if isinstance(layout, CompactLayout):
            return f"{layout.replica} {layout.digest}"
        known = self._digests.pop(id(layout), None)
        if known is None or known[0] is not layout:
            ranks = tuple(msgspec.structs.replace(rank, place=Place()) for rank in layout.ranks)
            known = (
                layout,
                xxhash.xxh3_128_hexdigest(encode(msgspec.structs.replace(layout, replica="", ranks=ranks))),
            )
        self._digests[id(layout)] = known
        while len(self._digests) > MAX_LAYOUT_DIGESTS:
            self._digests.popitem(last=False)
        return known[1]


def _digest_of_places(places: tuple[Place, ...]) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(places))


def _places(layout: Layout | CompactLayout) -> tuple[Place, ...]:
    return layout.places if isinstance(layout, CompactLayout) else tuple(rank.place for rank in layout.ranks)


def _store(cache: OrderedDict[K, V], key: K, value: V) -> None:
    cache[key] = value
    while len(cache) > MAX_PLANS:
        cache.popitem(last=False)
