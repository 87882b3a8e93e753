"""The plan: which box of which source shard each destination shard takes, in which order. Pure and deterministic.

The controller makes it from two layouts; the destination executes it. Every destination element is delivered exactly
once. Equal boxes at several source ranks are copies to choose from: the nearest (same device, same host, far), then
the rank that has the fewest bytes to send so far, then the lowest rank. Boxes of one tensor that overlap without being
equal are an error, because then two ranks could disagree about an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.boxes import BoxIndex, contains, cut, first_gap
from starling.weightsync.layout import (
    ALIGNMENT,
    Box,
    Layout,
    Piece,
    Place,
    TensorSpec,
    aligned,
    check_layout,
    decode,
    item_bytes,
    pieces_of,
)

MAX_TRANSFERS: Final = 1024
"""Most transfers in one bucket, which bounds the request for it."""
MAX_BUCKET_BYTES: Final = 1 << 30
"""Largest bucket that can be asked for, and the most that a source sends at once."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One box that moves from a source shard into a destination shard."""

    source_shard: int
    """Index into the source rank's shards."""
    destination_shard: int
    """Index into the destination rank's shards."""
    box: Box
    """In elements of the canonical tensor; inside both shards' boxes."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Transfers between one pair of ranks that travel together."""

    source_rank: int
    destination_rank: int
    transfers: tuple[Transfer, ...]
    size_bytes: int
    """Payload, without padding."""
    extent_bytes: int
    """Room that the bucket takes in a buffer: each transfer starts at a multiple of `ALIGNMENT`."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets from one replica to another, in the order in which each destination rank reads them."""

    source: str
    destination: str
    buckets: tuple[Bucket, ...]
    total_bytes: int
    peak_staging_bytes: int
    """Most bytes that any destination rank needs while pulling: its whole staging and its largest bucket."""

    def of_destination(self, rank: int) -> tuple[Bucket, ...]:
        """Return the buckets that destination rank `rank` reads."""
        return tuple(bucket for bucket in self.buckets if bucket.destination_rank == rank)


def decode_plan(data: bytes | bytearray | memoryview) -> Plan:
    """Read a plan from MessagePack.

    Raises:
        WeightsError: `data` is not a plan.
    """
    return decode(Plan, data)


def make_plan(source: Layout, destination: Layout, *, bucket_bytes: int = 32 << 20) -> Plan:
    """Plan how every shard of `destination` is filled from `source`, in buckets of at most `bucket_bytes`.

    Raises:
        WeightsError: a tensor that the source lacks, holds in another shape or element type, or does not hold wholly,
            or in overlapping boxes; the tensor and the box are named.
    """
    if not ALIGNMENT <= bucket_bytes <= MAX_BUCKET_BYTES:
        raise WeightsError(f"bucket_bytes is {bucket_bytes}, expected {ALIGNMENT} to {MAX_BUCKET_BYTES}.")
    check_layout(source)
    check_layout(destination)
    supply = _Supply(source, destination)
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    buckets: list[Bucket] = []
    peak = 0
    for rank in range(len(destination.ranks)):
        buckets_of_rank = _buckets_into(supply, rank, limit)
        buckets += buckets_of_rank
        staging = sum(aligned(piece.size_bytes) for piece in pieces_of(destination, rank))
        peak = max(peak, staging + max((bucket.extent_bytes for bucket in buckets_of_rank), default=0))
    return Plan(
        source=source.replica,
        destination=destination.replica,
        buckets=tuple(buckets),
        total_bytes=sum(bucket.size_bytes for bucket in buckets),
        peak_staging_bytes=peak,
    )


def check_plan(plan: Plan, pieces: Mapping[int, Sequence[Piece]], destination: Layout, rank: int) -> None:
    """Check that `plan` fills every shard of destination rank `rank` exactly once, from the right pieces.

    Args:
        plan: the plan to check.
        pieces: what each source rank holds, in the order of its shards.
        destination: the layout that the plan is for.
        rank: the destination rank whose part of the plan is checked.

    Raises:
        WeightsError: naming the tensor and the box at fault.
    """
    wanted = pieces_of(destination, rank)
    delivered: list[list[Box]] = [[] for _ in wanted]
    for bucket in plan.of_destination(rank):
        held = pieces.get(bucket.source_rank)
        if held is None:
            raise WeightsError(f"The plan reads from rank {bucket.source_rank} of {plan.source}, which offers nothing.")
        for transfer in bucket.transfers:
            if not (0 <= transfer.source_shard < len(held) and 0 <= transfer.destination_shard < len(wanted)):
                raise WeightsError(f"The plan names a shard that {plan.source} or {plan.destination} does not have.")
            taken, filled = held[transfer.source_shard], wanted[transfer.destination_shard]
            alike = taken.dtype == filled.dtype and not set(taken.names).isdisjoint(filled.names)
            if not alike or not contains(taken.box, transfer.box) or not contains(filled.box, transfer.box):
                raise WeightsError(
                    f"The plan moves {transfer.box} of {taken.names[0]} ({taken.dtype}, box {taken.box}) "
                    f"into {filled.names[0]} ({filled.dtype}, box {filled.box}); plan again."
                )
            delivered[transfer.destination_shard].append(transfer.box)
    for piece, boxes in zip(wanted, delivered, strict=True):
        _check_cover(piece.names[0], piece.box, boxes)


def _check_cover(name: str, box: Box, covers: Sequence[Box]) -> None:
    """Raise unless the disjoint union of `covers`, all inside `box`, is `box`."""
    overlap = BoxIndex(covers).first_overlap()
    if overlap is not None:
        raise WeightsError(f"Tensor {name}: box {overlap} would be delivered twice.")
    if sum(cover.volume for cover in covers) != box.volume:
        raise WeightsError(f"Tensor {name}: box {first_gap(box, covers)} has no source.")


class _Supply:
    """The source's boxes by tensor, and how many bytes each source rank sends so far."""

    def __init__(self, source: Layout, destination: Layout) -> None:
        self.source, self.destination = source, destination
        self._specs = {spec.name: spec for spec in source.tensors}
        self._names = {
            name: piece.names
            for rank in range(len(destination.ranks))
            for piece in pieces_of(destination, rank)
            for name in piece.names[:1]
        }
        self._holders: dict[str, dict[Box, list[tuple[int, int]]]] = {}
        for rank, held in enumerate(source.ranks):
            for index, shard in enumerate(held.shards):
                if shard.box.volume:
                    boxes = self._holders.setdefault(source.tensors[shard.tensor].name, {})
                    boxes.setdefault(shard.box, []).append((rank, index))
        self._indices: dict[str, BoxIndex] = {}
        self._sent_bytes = [0] * len(source.ranks)

    def owner(self, wanted: TensorSpec) -> TensorSpec:
        """Return the source tensor that fills `wanted` and every name that the destination ties to it."""
        found = [self._specs[name] for name in self._names[wanted.name] if name in self._specs]
        owners = {spec.same_as or spec.name for spec in found}
        if not owners:
            raise WeightsError(
                f"Tensor {wanted.name} of {self.destination.replica} is unknown to {self.source.replica}."
            )
        if len(owners) > 1:
            raise WeightsError(
                f"{self.destination.replica} keeps {' and '.join(self._names[wanted.name])} in one memory, "
                f"but they are different tensors in {self.source.replica}; untie them."
            )
        owner = self._specs[owners.pop()]
        if (owner.shape, owner.dtype) != (wanted.shape, wanted.dtype):
            raise WeightsError(
                f"Tensor {wanted.name} is {wanted.dtype} {wanted.shape} in {self.destination.replica} "
                f"but {owner.dtype} {owner.shape} in {self.source.replica}."
            )
        return owner

    def take(self, wanted: TensorSpec, box: Box, place: Place) -> Iterator[tuple[int, int, Box]]:
        """Yield source rank, source shard and box of each part of `box`."""
        owner = self.owner(wanted)
        index = self._index(owner.name)
        parts = list(index.meeting(box))
        if sum(shared.volume for _, shared in parts) != box.volume:
            gap = first_gap(box, [shared for _, shared in parts])
            raise WeightsError(f"Tensor {wanted.name}: no rank of {self.source.replica} holds box {gap}.")
        size = item_bytes(wanted)
        for position, shared in parts:
            holders = self._holders[owner.name][index.boxes[position]]
            rank, shard = min(holders, key=lambda holder: self._cost(holder, place))
            self._sent_bytes[rank] += shared.volume * size
            yield rank, shard, shared

    def _index(self, name: str) -> BoxIndex:
        index = self._indices.get(name)
        if index is None:
            index = self._indices[name] = BoxIndex(tuple(self._holders.get(name, {})))
            overlap = index.first_overlap()
            if overlap is not None:
                raise WeightsError(
                    f"Tensor {name}: box {overlap} lies in two different shards of {self.source.replica}."
                )
        return index

    def _cost(self, holder: tuple[int, int], place: Place) -> tuple[int, int, int, int]:
        rank, shard = holder
        return distance(self.source.ranks[rank].place, place), self._sent_bytes[rank], rank, shard


def distance(a: Place, b: Place) -> int:
    """How far two ranks are: 0 same device, 1 same host, 2 farther or unknown."""
    if not a.host or a.host != b.host:
        return 2
    return 0 if a.device == b.device else 1


def _buckets_into(supply: _Supply, rank: int, limit: int) -> list[Bucket]:
    """Return the buckets of destination rank `rank`: sources by turns, starting with another one at each rank."""
    held = supply.destination.ranks[rank]
    pending: dict[int, list[tuple[Transfer, int, bool]]] = {}
    for index, shard in enumerate(held.shards):
        if not shard.box.volume:
            continue
        spec = supply.destination.tensors[shard.tensor]
        size = item_bytes(spec)
        for source_rank, source_shard, shared in supply.take(spec, shard.box, held.place):
            parts = list(cut(shared, limit // size))
            pending.setdefault(source_rank, []).extend(
                (
                    Transfer(source_shard=source_shard, destination_shard=index, box=part),
                    part.volume * size,
                    len(parts) > 1,
                )
                for part in parts
            )
    by_turns: list[tuple[int, int, Bucket]] = []
    num_sources = len(supply.source.ranks)
    for source_rank, transfers in pending.items():
        for turn, bucket in enumerate(_pack(source_rank, rank, transfers, limit)):
            by_turns.append((turn, (source_rank - rank) % num_sources, bucket))
    by_turns.sort(key=lambda entry: entry[:2])
    return [bucket for _, _, bucket in by_turns]


def _pack(
    source_rank: int, destination_rank: int, transfers: Sequence[tuple[Transfer, int, bool]], limit: int
) -> Iterator[Bucket]:
    """Fill buckets in order. A part of a cut box travels alone: then it lies as aligned as its tensor does."""
    group: list[Transfer] = []
    size = extent = 0

    def close() -> Bucket:
        return Bucket(
            source_rank=source_rank,
            destination_rank=destination_rank,
            transfers=tuple(group),
            size_bytes=size,
            extent_bytes=extent,
        )

    for transfer, size_bytes, alone in transfers:
        if group and (alone or extent + aligned(size_bytes) > limit or len(group) == MAX_TRANSFERS):
            yield close()
            group, size, extent = [], 0, 0
        group.append(transfer)
        size += size_bytes
        extent += aligned(size_bytes)
        if alone:
            yield close()
            group, size, extent = [], 0, 0
    if group:
        yield close()
