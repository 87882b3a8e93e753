"""Plans of pulls between the layouts of two replicas, with their keys, allowances and forecasts, each computed once.

A layout is known by its identity: a replica keeps the same one until it joins again, and `forget` then drops what
was computed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.costs.pairs import PullForecast, forecast_pull, forecast_relayed_pull, relative_places
from starling.weightsync.offers.tickets import allowance, reading_cost
from starling.weightsync.plan.fan_out import for_relays
from starling.weightsync.plan.layout import Layout, Place, encode
from starling.weightsync.plan.planner import Plan, PlanCache

MAX_SOURCES: Final = 1024
"""Sources of which the plans to one destination are kept: each policy that was started again is another one."""
MAX_FORECASTS: Final = 1024
"""Forecasts that are kept: each pair of different machines has another one."""

Places = tuple[Place, ...]
Forecast = Callable[[Plan, Places, Places], PullForecast]


@dataclass(slots=True)
class LayoutPair:
    """The layouts of the source and of the destination of a pull, and what follows from both."""

    source: Layout
    destination: Layout
    key: str
    """Equal for pairs whose plans move the same boxes; the layout root is known under it. The size from which buckets
    are cut for relays decides about these boxes, too."""
    plan: bytes = b""
    """The encoded plan; empty until it is needed."""
    size_bytes: int = 0
    """How much a pull by the plan moves."""
    most_bytes: int = 0
    """How much a pull by the plan may read from a source rank, as `allowance`."""
    forecast: PullForecast | None = None
    """Of a pull by the plan; None until it is needed."""


@dataclass
class LayoutPlans:
    """The plans between the layouts of the replicas.

    Args:
        relay_from_bytes: plans that move as much are cut into small buckets, for relays.
    """

    relay_from_bytes: int = 1 << 62
    _plans: PlanCache = field(default_factory=PlanCache)
    _pairs: dict[int, dict[int, LayoutPair]] = field(default_factory=dict)
    """By the identities of the destination's layout and of the source's, which the entry keeps alive."""
    _sources: set[int] = field(default_factory=set)
    """Identities of the source layouts in `_pairs`."""
    _forecasts: dict[tuple[str, Forecast, bytes], PullForecast] = field(default_factory=dict)
    """By the key of the layouts, the function that made it, and a digest of the places of the ranks at both ends."""

    def key(self, source: Layout | None, destination: Layout | None) -> str:
        """Return the key of two layouts, under which their layout root is known; empty without either."""
        return self._pair(source, destination).key if source is not None and destination is not None else ""

    def pair(self, source: Layout, destination: Layout) -> LayoutPair:
        """Return two layouts with their plan and its allowance: computed once, while neither changes.

        Raises:
            WeightsError: as `make_plan`.
        """
        pair = self._pair(source, destination)
        if not pair.plan:
            plan = self._plan(source, destination)
            cost = reading_cost(plan.total_bytes, plan.num_boxes)
            distinct_cost = reading_cost(plan.distinct_bytes, plan.num_distinct_boxes)
            pair.plan, pair.size_bytes = encode(plan), plan.total_bytes
            pair.most_bytes = allowance(cost, distinct_cost)
        return pair

    def exists(self, source: Layout | None, destination: Layout | None) -> bool:
        """Say whether there is a plan between two replicas with weights.

        There may be none between two rollouts although there are plans from the policy to both: neither is at fault.
        """
        if source is None or destination is None:
            return False
        try:
            self.pair(source, destination)
        except WeightsError:
            return False
        return True

    def forecast(self, source: Layout, destination: Layout) -> PullForecast:
        """Return the forecast of a pull: computed once for equal machines, while neither layout changes.

        Raises:
            WeightsError: as `make_plan`.
        """
        pair = self._pair(source, destination)
        if pair.forecast is None:
            places = _places(source), _places(destination)
            pair.forecast = self._forecast(pair, places, forecast_pull)
        return pair.forecast

    def relayed_forecast(self, origin: Layout, relay: Layout, destination: Layout) -> PullForecast:
        """Return the forecast of a pull from a relay of what it pulls from `origin`.

        Raises:
            WeightsError: as `make_plan`.
        """
        places = _places(relay), _places(destination)
        return self._forecast(self._pair(origin, destination), places, forecast_relayed_pull)

    def forget(self, layout: Layout | None, *, is_in_use: bool) -> None:
        """Drop the pairs with the layout of a replica that left, and unless it `is_in_use`, also its plans."""
        self._pairs.pop(id(layout), None)
        if id(layout) in self._sources:
            self._sources.discard(id(layout))
            for pairs in self._pairs.values():
                pairs.pop(id(layout), None)
        if layout is not None and not is_in_use:
            self._plans.forget(layout)

    def _pair(self, source: Layout, destination: Layout) -> LayoutPair:
        pairs = self._pairs.setdefault(id(destination), {})
        found = pairs.get(id(source))
        if found is None or found.source is not source or found.destination is not destination:
            if len(pairs) >= MAX_SOURCES:
                pairs.clear()
            self._sources.add(id(source))
            key = f"{self._plans.key(source, destination)}-{self.relay_from_bytes}"
            found = pairs[id(source)] = LayoutPair(source, destination, key)
        return found

    def _plan(self, source: Layout, destination: Layout) -> Plan:
        plan = self._plans.plan(source, destination)
        return for_relays(plan) if plan.total_bytes >= self.relay_from_bytes else plan

    def _forecast(self, pair: LayoutPair, places: tuple[Places, Places], forecast: Forecast) -> PullForecast:
        key = pair.key, forecast, relative_places(*places)
        found = self._forecasts.get(key)
        if found is None:
            if len(self._forecasts) >= MAX_FORECASTS:
                self._forecasts.clear()
            found = self._forecasts[key] = forecast(self._plan(pair.source, pair.destination), *places)
        return found


def _places(layout: Layout) -> Places:
    return tuple(held.place for held in layout.ranks)
