"""Plans that are kept: a replica that did not change has its plan, whoever joins or leaves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import xxhash

from starling.weightsync.layout import Layout, encode
from starling.weightsync.plan import Plan, make_plan
from starling.weightsync.splits import CompactLayout
from starling.weightsync.topology import Topology

KEPT_PLANS: Final = 1024
"""The plans used longest ago are forgotten beyond these: of more replicas, each would be planned for every version."""


class Plans:
    """Makes each plan once: by what the layouts say, not by who said it or when."""

    def __init__(self, topology: Topology | None = None, *, bucket_bytes: int = 32 << 20) -> None:
        self._topology, self._bucket_bytes = topology, bucket_bytes
        self._kept: OrderedDict[tuple[str, str, str, str], Plan] = OrderedDict()

    def plan(self, source: Layout | CompactLayout, destination: Layout | CompactLayout) -> Plan:
        """Return the plan from `source` to `destination`; the same object as before if neither changed.

        Raises:
            WeightsError: as `make_plan`.
        """
        key = (source.replica, _digest(source), destination.replica, _digest(destination))
        plan = self._kept.pop(key, None)
        if plan is None:
            plan = make_plan(source, destination, topology=self._topology, bucket_bytes=self._bucket_bytes)
        self._kept[key] = plan
        while len(self._kept) > KEPT_PLANS:
            self._kept.popitem(last=False)
        return plan


def _digest(layout: Layout | CompactLayout) -> str:
    if isinstance(layout, CompactLayout):
        return layout.digest
    return xxhash.xxh3_128_hexdigest(encode(layout))
