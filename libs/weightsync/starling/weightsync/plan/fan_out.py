"""Fan-out: how several replicas of one layout serve each other, so that the publisher sends one model.

`make_fan_out` is what `starling plan` forecasts: the model is divided into as many parts as there are replicas, each
replica pulls a different part from the publisher, and the others from the replicas that have them. All links work at
once, so R replicas take the time of one plus R buckets. If replicas form groups with slower links between them (hosts,
switches, sites), a part crosses to another group once; the member that fetched it relays it inside the group.

A run has chains instead, which take the same time with fewer connections (`docs/decisions/0044-chains-of-relays.md`);
`for_relays` cuts the buckets of their plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.layout import Place
from starling.weightsync.plan.planner import Plan
from starling.weightsync.plan.topology import Topology, distances

RELAY_BUCKETS: Final = 64
"""Buckets of a rank whose version is relayed: a chain of eight takes a ninth longer than one pull."""
MIN_RELAY_BUCKET_BYTES: Final = 256 << 10
"""Size below which a bucket costs more in requests than it saves in waiting."""
PUBLISHER: Final = -1
"""In place of a replica's number: the publisher of the version."""


class FanOut(msgspec.Struct, frozen=True, kw_only=True):
    """The relay tree: for each replica, the source of each part."""

    sources: tuple[tuple[int, ...], ...]
    """Row: a replica. Column: a part. Entry: a replica, or `PUBLISHER`."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas, and of parts."""
        return len(self.sources)

    def depth(self, replica: int, part: int) -> int:
        """Return the number of links over which a part reaches a replica: 1 from the publisher."""
        depth = 1
        while self.sources[replica][part] != PUBLISHER:
            replica, depth = self.sources[replica][part], depth + 1
        return depth


def make_fan_out(replicas: Sequence[Sequence[Place]], topology: Topology | None = None) -> FanOut:
    """Assign a source to each part of each replica.

    Args:
        replicas: the place of each rank of each replica. All have equal layouts.
        topology: for distances.

    Raises:
        WeightsError: replicas of different numbers of ranks.
    """
    if len({len(places) for places in replicas}) > 1:
        raise WeightsError(
            f"Replicas of {' and '.join(map(str, sorted({len(p) for p in replicas})))} ranks cannot serve each other; "
            "fan out to equal layouts only."
        )
    groups = _groups(replicas, topology)
    sources = [[PUBLISHER] * len(replicas) for _ in replicas]
    for members in groups:
        foreign = 0
        for part in range(len(replicas)):
            holder = part
            if part not in members:
                holder = members[foreign % len(members)]
                sources[holder][part] = part
                foreign += 1
            for replica in members:
                if replica != holder:
                    sources[replica][part] = holder
    return FanOut(sources=tuple(map(tuple, sources)))


def for_relays(plan: Plan) -> Plan:
    """Return `plan` with buckets that are small enough for a chain of relays, each of which is one bucket behind.

    The boxes of both differ where a bucket cuts one, and so do the layout roots: use one of them everywhere.
    """
    most = max((int(plan.pair_bytes[:, rank].sum()) for rank in range(plan.pair_bytes.shape[1])), default=0)
    bucket_bytes = min(plan.bucket_bytes, max(MIN_RELAY_BUCKET_BYTES, -(-most // RELAY_BUCKETS)))
    return msgspec.structs.replace(plan, bucket_bytes=bucket_bytes)


def parts_of(sizes: Ints, num_parts: int) -> Ints:
    """Assign buckets of `sizes` bytes to parts: each to the one with the fewest bytes, so that they stay balanced."""
    heap = [(0, part) for part in range(num_parts)]
    parts = np.zeros(len(sizes), np.int64)
    for index, size in enumerate(sizes.tolist()):
        filled, part = heap[0]
        parts[index] = part
        heapq.heapreplace(heap, (filled + size, part))
    return parts


def _groups(replicas: Sequence[Sequence[Place]], topology: Topology | None) -> list[list[int]]:
    """Return groups of replicas that are nearer to each other than the farthest pair; one group if there are none."""
    count = len(replicas)
    if not count or not replicas[0]:
        return [list(range(count))] if count else []
    between = np.zeros((count, count), np.int64)
    for ranks in zip(*replicas, strict=True):
        between = np.maximum(between, distances(ranks, ranks, topology))
    np.fill_diagonal(between, -1)
    near = between < between.max()
    groups: list[list[int]] = []
    for replica in range(count):
        for members in groups:
            if near[members[0], replica]:
                members.append(replica)
                break
        else:
            groups.append([replica])
    return [list(range(count))] if len(groups) == count else groups
