"""Fan-out: how several replicas of one layout serve each other, so that the publisher sends one model.

As in a run (`docs/decisions/0044-chains-of-relays.md`): replicas on other hosts than the publisher form a chain, each
of which reads from the one before it what that is still receiving. R replicas take the time of one, and a bucket for
each further one. What else is on the host of a member of the chain reads from that member, and replicas on the
publisher's host read from the publisher: neither needs the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Place
from starling.weightsync.plan.planner import Plan

RELAY_BUCKETS: Final = 64
"""Buckets of a rank whose version is relayed: a chain of eight takes a ninth longer than one pull."""
MIN_RELAY_BUCKET_BYTES: Final = 256 << 10
"""Size below which a bucket costs more in requests than it saves in waiting."""
PUBLISHER: Final = -1
"""In place of a replica's number: the publisher of the version."""


class FanOut(msgspec.Struct, frozen=True, kw_only=True):
    """From whom each replica reads a version."""

    sources: tuple[int, ...]
    """For each replica an earlier one, or `PUBLISHER`."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.sources)

    def depth(self, replica: int) -> int:
        """Return the number of links over which a version reaches a replica: 1 from the publisher."""
        depth = 1
        while self.sources[replica] != PUBLISHER:
            replica, depth = self.sources[replica], depth + 1
        return depth


def make_fan_out(replicas: Sequence[Sequence[Place]], publisher: Sequence[Place] = ()) -> FanOut:
    """Return the chain of replicas in their order.

    Args:
        replicas: the place of each rank of each replica. All have equal layouts. The host of a replica is that of its
            first rank; one without a name is like no other.
        publisher: the place of each rank of the publisher.

    Raises:
        WeightsError: replicas of different numbers of ranks.
    """
    if len({len(places) for places in replicas}) > 1:
        raise WeightsError(
            f"Replicas of {' and '.join(map(str, sorted({len(p) for p in replicas})))} ranks cannot serve each other; "
            "fan out to equal layouts only."
        )
    at_host = {publisher[0].host: PUBLISHER} if publisher and publisher[0].host else {}
    last, sources = PUBLISHER, []
    for number, places in enumerate(replicas):
        host = places[0].host if places else ""
        if host in at_host:
            sources.append(at_host[host])
            continue
        sources.append(last)
        last = number
        if host:
            at_host[host] = number
    return FanOut(sources=tuple(sources))


def for_relays(plan: Plan) -> Plan:
    """Return `plan` with buckets that are small enough for a chain of relays, each of which is one bucket behind.

    The boxes of both differ where a bucket cuts one, and so do the layout roots: use one of them everywhere.
    """
    most = max((int(plan.pair_bytes[:, rank].sum()) for rank in range(plan.pair_bytes.shape[1])), default=0)
    bucket_bytes = min(plan.bucket_bytes, max(MIN_RELAY_BUCKET_BYTES, -(-most // RELAY_BUCKETS)))
    return msgspec.structs.replace(plan, bucket_bytes=bucket_bytes)
