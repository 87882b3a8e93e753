"""How long a plan takes, before anything moves: bytes over bandwidth on the busiest link, and what cannot be hidden.

The parts have the names of what a round reports, and sum to the whole: `pack_s`, `wire_s`, `unpack_s` and `wait_s`.
Packing and unpacking run beside the wire, so only what is left of them counts: the first and the last buckets, and as
much as they are slower than the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from starling.weightsync.boxes import Ints
from starling.weightsync.layout import Place
from starling.weightsync.plan import Plan
from starling.weightsync.relay import PUBLISHER, FanOut
from starling.weightsync.topology import DEVICE, LINKS, RAIL, Topology, distances


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one link carries one way."""

    link: str
    num_bytes: int
    seconds: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a round is expected to cost."""

    total_bytes: int
    link_bytes: dict[str, int]
    """Payload by how far it goes: keys of `LINKS`."""
    publisher_bytes: int
    """Payload that leaves the publisher's ranks."""
    pack_s: float
    wire_s: float
    unpack_s: float
    wait_s: float
    seconds: float
    """From the offer to the last byte in staging: the sum of the four."""
    switch_s: float
    """Pause of an engine that then switches from staging: one copy of what its busiest rank took."""
    peak_staging_bytes: int
    """Bound on the memory that a destination rank takes beside its tensors."""
    links: tuple[LinkLoad, ...]
    """The slowest first."""


def estimate(
    plan: Plan, sources: Sequence[Place], destinations: Sequence[Place], topology: Topology | None = None
) -> Estimate:
    """Predict a round of `plan` to one replica.

    Args:
        plan: a whole plan, not one rank's part.
        sources: where each source rank runs.
        destinations: where each destination rank runs.
        topology: the machines; by default, ranks that all have a card of their own.
    """
    return _estimate(plan, plan.pair_bytes, sources, destinations, topology or Topology(), num_hops=1)


def estimate_fan_out(
    plan: Plan,
    fan_out: FanOut,
    sources: Sequence[Place],
    replicas: Sequence[Sequence[Place]],
    topology: Topology | None = None,
) -> Estimate:
    """Predict a round in which replicas pass on what they got; `plan` leads to one of them.

    Args:
        plan: a whole plan to one replica.
        fan_out: who passes what to whom.
        sources: where each source rank runs.
        replicas: where each rank of each replica runs.
        topology: as in `estimate`.
    """
    num_sources, num_ranks = plan.pair_bytes.shape
    count = fan_out.num_replicas
    flow = np.zeros((num_sources + count * num_ranks, count * num_ranks), np.int64)
    arriving = plan.pair_bytes.sum(axis=0)
    for replica, row in enumerate(fan_out.sources):
        into = slice(replica * num_ranks, (replica + 1) * num_ranks)
        for part, source in enumerate(row):
            if source == PUBLISHER:
                flow[:num_sources, into] += _share(plan.pair_bytes, part, count)
            else:
                ranks = np.arange(num_ranks)
                rows = num_sources + source * num_ranks + ranks
                flow[rows, replica * num_ranks + ranks] += _share(arriving, part, count)
    places = [place for replica_places in replicas for place in replica_places]
    hops = max((fan_out.depth(k, part) for k in range(count) for part in range(count)), default=1)
    num_hops = 1 + (hops - 1) * count  # each further link holds one bucket of every part back
    return _estimate(plan, flow, [*sources, *places], places, topology or Topology(), num_hops=num_hops)


def _share(values: Ints, part: int, count: int) -> Ints:
    """Return one of `count` near-equal parts of each value."""
    return values * (part + 1) // count - values * part // count


def _estimate(
    plan: Plan,
    flow: Ints,
    sources: Sequence[Place],
    destinations: Sequence[Place],
    topology: Topology,
    *,
    num_hops: int,
) -> Estimate:
    """Predict from the bytes between ranks; `num_hops` buckets lie one after the other between first and last byte."""
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
    """Yield every link that carries something."""
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
