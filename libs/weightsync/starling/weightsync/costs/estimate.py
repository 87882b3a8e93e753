"""Estimates of a plan before it is executed: the time of a transfer, and peak memory. Pure.

**Time**: bytes over bandwidth on the busiest link, and the parts that do not overlap with it. They have the names of
the measured ones, and sum to the total: `pack_s`, `wire_s`, `unpack_s` and `wait_s`. Packing and unpacking overlap with
the wire, so only the first and the last buckets count, and the time by which they are slower than the wire.

**Memory** in addition to the tensors: a publisher has two snapshots, and buffers that it packs for its readers; a
destination has staging, unless it pulls in place, and buffers for boxes that are not received in place. The executor
uses these functions, so the two cannot disagree. Without layouts, `Plan.peak_bytes` is a bound. A relay is a
destination that packs for its own readers too, as a publisher does.

Deltas come on top, and are as large as the changes: at the publisher at most one snapshot, for the versions that it
keeps, and for each snapshot as much again for the boxes of readers that are cut from them; at the destination at most
`Plan.peak_bytes` of a pull in place, only during the transfer, except for a relay, which keeps them until the next
version.

Not counted is memory that grows neither with the model nor with the buckets: code, thread stacks, the transport's own
buffers (of sockets, in the kernel; of UCX, a few MiB), and about a kilobyte of objects per box of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from starling.weightsync.offers.offer import DIGEST_BYTES, Transport
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.buckets import (
    BUCKETS_PER_SOURCE,
    DIRECT_BYTES,
    cut_segments,
    is_contiguous,
    most_at_once,
    packed_bytes,
    row_major,
)
from starling.weightsync.plan.fan_out import PUBLISHER, FanOut
from starling.weightsync.plan.layout import ITEM_BYTES, Layout, Place, ShardPiece, aligned, packed_offsets, pieces_of
from starling.weightsync.plan.moves import Bucket
from starling.weightsync.plan.planner import Plan
from starling.weightsync.plan.topology import DEVICE, LINKS, RAIL, Topology, distances

NUM_SNAPSHOTS: Final = 2
"""One is read while the next is written."""
PAGE_BYTES: Final = 4096
MAX_PACKING_BYTES: Final = 256 << 20
"""Maximum that a source of sockets or UCX packs at once for all ranks of one reader; a single larger request is served
alone."""


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one link in one direction."""

    link: str
    num_bytes: int
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Expected cost of one weight synchronisation."""

    total_bytes: int
    link_bytes: dict[str, int]
    """Payload by distance: keys of `LINKS`."""
    publisher_bytes: int
    """Payload that leaves the publisher's ranks."""
    pack_s: float
    wire_s: float
    unpack_s: float
    wait_s: float
    seconds: float
    """From the offer to the last byte in staging: the sum of the four."""
    switch_s: float
    """Pause of an engine that switches from staging: one copy of the payload of its busiest rank."""
    peak_staging_bytes: int
    """Bound on the memory of a destination rank in addition to its tensors."""
    links: tuple[LinkLoad, ...]
    """The slowest first."""


def estimate(
    plan: Plan, sources: Sequence[Place], destinations: Sequence[Place], topology: Topology | None = None
) -> Estimate:
    """Estimate a transfer by `plan` to one replica.

    Args:
        plan: a plan for all ranks.
        sources: place of each source rank.
        destinations: place of each destination rank.
        topology: by default, every rank has a card of its own.
    """
    return _estimate(plan, plan.pair_bytes, sources, destinations, topology or Topology(), num_hops=1)


def estimate_flow(
    plan: Plan, flow: Ints, sources: Sequence[Place], destinations: Sequence[Place], topology: Topology
) -> Estimate:
    """As `estimate`, for other bytes between ranks than those of `plan`; shape (sources, destinations)."""
    return _estimate(plan, flow, sources, destinations, topology, num_hops=1)


def estimate_fan_out(
    plan: Plan,
    fan_out: FanOut,
    sources: Sequence[Place],
    replicas: Sequence[Sequence[Place]],
    topology: Topology | None = None,
) -> Estimate:
    """Estimate a transfer in which replicas relay to each other.

    Args:
        plan: a plan for all ranks of one replica, with the buckets of `for_relays`.
        fan_out: which replica reads from which.
        sources: place of each source rank.
        replicas: place of each rank of each replica.
        topology: as in `estimate`.
    """
    num_sources, num_ranks = plan.pair_bytes.shape
    count = fan_out.num_replicas
    flow = np.zeros((num_sources + count * num_ranks, count * num_ranks), np.int64)
    arriving = plan.pair_bytes.sum(axis=0)
    ranks = np.arange(num_ranks)
    for replica, source in enumerate(fan_out.sources):
        if source == PUBLISHER:
            flow[:num_sources, replica * num_ranks + ranks] = plan.pair_bytes
        else:
            flow[num_sources + source * num_ranks + ranks, replica * num_ranks + ranks] = arriving
    places = [place for replica_places in replicas for place in replica_places]
    num_hops = max((fan_out.depth(replica) for replica in range(count)), default=1)
    return _estimate(plan, flow, [*sources, *places], places, topology or Topology(), num_hops=num_hops)


def _estimate(
    plan: Plan,
    flow: Ints,
    sources: Sequence[Place],
    destinations: Sequence[Place],
    topology: Topology,
    *,
    num_hops: int,
) -> Estimate:
    """Estimate from the bytes between ranks; `num_hops` buckets are sent in sequence between first and last byte."""
    far = distances(sources, destinations, topology)
    links = sorted(_loads(flow, far, sources, destinations, topology), key=lambda load: (-load.seconds, load.link))
    device = topology.device_gb_per_s * 1e9
    busiest = links[0].seconds if links else 0.0
    arriving = int(flow.sum(axis=0).max(initial=0))
    bucket = min(plan.bucket_bytes, arriving)
    rate = arriving / busiest if busiest else device
    wire_s = busiest + (num_hops - 1) * bucket / rate if arriving else 0.0
    pack_s = bucket / device + max(0.0, int(flow.sum(axis=1).max(initial=0)) / device - busiest)
    unpack_s = bucket / device + max(0.0, arriving / device - busiest)
    latency = topology.latency_us * 1e-6
    rounds = -(-arriving // max(bucket, 1)) * latency / plan.buckets_in_flight
    wait_s = latency * num_hops + max(0.0, rounds - busiest) if arriving else 0.0
    return Estimate(
        total_bytes=int(flow.sum()),
        link_bytes={name: int(flow[far == level].sum()) for level, name in enumerate(LINKS)},
        publisher_bytes=int(flow[: plan.source_pieces.num_ranks].sum()),
        pack_s=pack_s,
        wire_s=wire_s,
        unpack_s=unpack_s,
        wait_s=wait_s,
        seconds=pack_s + wire_s + unpack_s + wait_s,
        switch_s=arriving / device,
        peak_staging_bytes=plan.peak_staging_bytes,
        links=tuple(links),
    )


def _loads(
    flow: Ints, far: Ints, sources: Sequence[Place], destinations: Sequence[Place], topology: Topology
) -> Iterator[LinkLoad]:
    """Yield every link with traffic."""
    on_device = np.where(far == DEVICE, flow, 0)
    inside = np.where((far > DEVICE) & (far < RAIL), flow, 0)
    outside = np.where(far >= RAIL, flow, 0)
    rate = topology.nic_gb_per_s
    totals: dict[str, tuple[int, float]] = {}

    def add(link: str, num_bytes: int, gb_per_s: float) -> None:
        if num_bytes:
            totals[link] = (totals.get(link, (0, 0.0))[0] + num_bytes, gb_per_s)

    for way, places, axis in (("out", sources, 1), ("in", destinations, 0)):
        through_card, through_host, through_device = (part.sum(axis=axis) for part in (outside, inside, on_device))
        for rank, place in enumerate(places):
            nic = topology.nic_of(place)
            name = f"{place.host or way}/{place.device if place.host else rank}"
            card = f"{place.host}/{nic.name}" if nic else f"{name} card"
            add(f"{card} {way}", int(through_card[rank]), nic.gb_per_s if nic else rate)
            add(f"{name} host {way}", int(through_host[rank]), topology.host_gb_per_s)
            if way == "in":
                add(f"{name} device", int(through_device[rank]), topology.device_gb_per_s)
    for switch in topology.switches:
        here, there = (
            np.array([p.host in topology.machines and topology.machines[p.host].switch == switch.name for p in places])
            for places in (sources, destinations)
        )
        add(f"{switch.name} out", int(outside[here][:, ~there].sum()), switch.uplink_gb_per_s)
        add(f"{switch.name} in", int(outside[~here][:, there].sum()), switch.uplink_gb_per_s)
    for link, (num_bytes, gb_per_s) in totals.items():
        yield LinkLoad(link=link, num_bytes=num_bytes, seconds=num_bytes / (gb_per_s * 1e9))


class PublisherPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one source rank in addition to its tensors."""

    snapshots_bytes: int
    """Shared with readers on the same host, where it is not counted again."""
    packing_bytes: int
    """Buffers packed for readers."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.snapshots_bytes + self.packing_bytes


class DestinationPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one destination rank in addition to its tensors."""

    staging_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.staging_bytes + self.scratch_bytes


def slot_bytes(pieces: Sequence[ShardPiece]) -> int:
    """Return the size of one snapshot: the pieces, then their digests, in whole pages."""
    _, extent_bytes = packed_offsets(piece.size_bytes for piece in pieces)
    return -(-(extent_bytes + DIGEST_BYTES * len(pieces)) // PAGE_BYTES) * PAGE_BYTES


def publisher_peak(
    source: Layout,
    rank: int,
    plan: Plan,
    destination: Layout,
    transport: Transport,
    *,
    in_place: bool = False,
    on_device: bool = False,
    num_replicas: int = 1,
) -> PublisherPeak:
    """Return the peak memory of source rank `rank` when all ranks of its destinations read from it at once.

    Args:
        source: layout of the publisher.
        rank: its rank.
        plan: computed from `source` and `destination`.
        destination: the layout of one destination replica.
        transport: ``tcp`` packs one bucket for each reader at a time, ``ucx`` all that are in flight, each in a buffer
            for the largest; ``local`` packs nothing.
        in_place: whether the destinations pull into their live tensors.
        on_device: whether these are on a device that only torch can write to, such as a GPU.
        num_replicas: number of such replicas.
    """
    pieces = pieces_of(source, rank)
    at_once = min(BUCKETS_PER_SOURCE, plan.buckets_in_flight) if transport == "ucx" else 1
    packing = largest = 0
    for reader in plan.ranks if transport != "local" else ():
        rooms = [
            _packing_bytes(bucket, pieces, destination, in_place=in_place, on_device=on_device)
            for bucket in plan.of_destination(reader)
            if bucket.source_rank == rank
        ]
        packing += max(rooms, default=0) * min(at_once, sum(map(bool, rooms)))
        largest = max(largest, *rooms, 0)
    packing = min(packing, max(MAX_PACKING_BYTES, largest)) * num_replicas
    return PublisherPeak(snapshots_bytes=PAGE_BYTES + NUM_SNAPSHOTS * slot_bytes(pieces), packing_bytes=packing)


def destination_peak(
    plan: Plan,
    destination: Layout,
    rank: int,
    transport: Transport,
    *,
    in_place: bool = False,
    on_device: bool = False,
) -> DestinationPeak:
    """Return the peak memory of destination rank `rank` while it pulls.

    Args:
        plan: the plan for all ranks, or for this one.
        destination: layout of the destination.
        rank: its rank.
        transport: ``local`` copies from the publisher's memory to the destination; the others need a buffer for boxes
            that are not contiguous there.
        in_place: whether it pulls into its live tensors.
        on_device: whether these are on a device that only torch can write to, such as a GPU.
    """
    rooms = []
    for bucket in plan.of_destination(rank):
        sizes, counts, direct = _received(bucket, destination, in_place=in_place, on_device=on_device)
        if transport != "local":
            rooms.append(packed_bytes(sizes, counts, direct))
        elif in_place and on_device:
            rooms.append(sum(map(aligned, sizes)))
    _, extent_bytes = packed_offsets(piece.size_bytes for piece in pieces_of(destination, rank))
    return DestinationPeak(
        staging_bytes=0 if in_place else extent_bytes,
        scratch_bytes=most_at_once(rooms, plan.buckets_in_flight),
    )


def _received(
    bucket: Bucket, destination: Layout, *, in_place: bool, on_device: bool
) -> tuple[list[int], tuple[int, ...], tuple[bool, ...]]:
    """Return the size of each box of a bucket, and its segments as `cut_segments` gives them."""
    shards = destination.ranks[bucket.destination_rank].shards
    sizes: list[int] = []
    direct: list[bool] = []
    for transfer in bucket.transfers:
        shard, box = shards[transfer.destination_shard], transfer.box
        sizes.append(box.volume * ITEM_BYTES[destination.tensors[shard.tensor].dtype])
        strides = shard.strides if in_place else row_major(shard.box.size)
        reachable = not (in_place and on_device)
        direct.append(reachable and sizes[-1] >= DIRECT_BYTES and is_contiguous(box.size, strides))
    return sizes, *cut_segments(direct)


def _packing_bytes(
    bucket: Bucket, pieces: Sequence[ShardPiece], destination: Layout, *, in_place: bool, on_device: bool
) -> int:
    """Return the buffer size that a source needs to pack a bucket from a snapshot of `pieces`."""
    sizes, counts, _ = _received(bucket, destination, in_place=in_place, on_device=on_device)
    whole: list[bool] = []
    first = 0
    for count in counts:
        moved = bucket.transfers[first]
        first += count
        strides = row_major(pieces[moved.source_shard].box.size)
        whole.append(count == 1 and is_contiguous(moved.box.size, strides))
    return packed_bytes(sizes, counts, whole)
