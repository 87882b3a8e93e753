"""Plans that are kept: a replica that did not change has its plan, whoever joins or leaves.

Replicas that lay out their weights alike, and are equally far from the source, have one plan but for their names: a
thousand rollouts are planned for once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

import msgspec
import xxhash

from starling.weightsync.layout import Layout, Place, encode
from starling.weightsync.plan import Plan, make_plan
from starling.weightsync.splits import CompactLayout
from starling.weightsync.topology import Topology, distances

K = TypeVar("K")
V = TypeVar("V")

KEPT_PLANS: Final = 1024
"""The plans used longest ago are forgotten beyond these."""
KEPT_SHAPES: Final = 65_536


class Plans:
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
