"""Forecast of a pull, rank pair by rank pair, from the places that the ranks detected themselves. Pure.

A pair is as slow as the busier of its two ends: the network card that it shares with other pairs, or the copies of one
rank within a host. The forecast is that of one replica that pulls alone, dense. Where the speed of a card is unknown,
so is the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from starling.weightsync.costs.estimate import estimate_flow
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.layout import CPU, Place
from starling.weightsync.plan.planner import Plan
from starling.weightsync.plan.topology import LINKS, RAIL, Topology, card_numbers, distances

COPY_GB_PER_S: Final = 10.0
"""Assumed for copies between processes of one host: one thread that copies main memory."""
PCIE_GB_PER_S: Final = 50.0
"""Assumed for copies from a snapshot, which lies in host memory, to a GPU of the host: sixteen lanes of PCIe 5."""
MAX_PAIRS: Final = 16
"""Pairs of which a forecast keeps the details, those with the most bytes. Of all others it keeps the sums."""

Floats = npt.NDArray[np.float64]


class PairForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic from one source rank to one destination rank."""

    source_rank: int
    rank: int
    link: str
    """The class of their distance: one of `LINKS`."""
    num_bytes: int
    seconds: float | None
    """None when the speed of a card is unknown."""


class LinkForecast(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of one class of distance."""

    num_pairs: int
    num_bytes: int
    seconds: float | None
    """Of the slowest of them."""


class PullForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull is expected to take."""

    num_bytes: int
    seconds: float | None
    """From the first request to the last byte in staging, as `Estimate.seconds`."""
    links: dict[str, LinkForecast]
    """Keys of `LINKS`, the nearest first."""
    pairs: tuple[PairForecast, ...]
    """The largest first."""


def forecast_pull(plan: Plan, sources: Sequence[Place], destinations: Sequence[Place]) -> PullForecast:
    """Forecast a pull by `plan`, which is for all ranks.

    Args:
        plan: from the source to the destination.
        sources: place of each source rank.
        destinations: place of each destination rank.
    """
    return _forecast(plan, plan.pair_bytes, sources, destinations)


def forecast_relayed_pull(plan: Plan, relays: Sequence[Place], destinations: Sequence[Place]) -> PullForecast:
    """Forecast a pull in which each rank reads all that `plan` brings from the same rank of a relay.

    Args:
        plan: from the publisher to a replica of the layout that the relay and the destination have.
        relays: place of each rank of the relay.
        destinations: place of each destination rank.
    """
    return _forecast(plan, np.diag(plan.pair_bytes.sum(axis=0)), relays, destinations)


def relative_places(sources: Sequence[Place], destinations: Sequence[Place]) -> bytes:
    """Return a digest of what a forecast depends on: equal for pulls between equal machines, whatever their names.

    A digest, because the places of thousands of ranks may take megabytes, and who reads the forecast may be gone.
    """
    hosts: dict[str, int] = {}
    devices: dict[str, int] = {}
    relative: list[object] = [len(sources)]
    for place in (*sources, *destinations):
        host = place.machine_or_host
        relative.append(hosts.setdefault(host, len(hosts)) if host else -1)
        relative.append(-1 if place.device == CPU else devices.setdefault(place.device, len(devices)))
        relative += [place.numa, place.rails, place.switch]
        relative.append([(card.name, card.gb_per_s) for card in place.cards])
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(relative))


def _forecast(plan: Plan, flow: Ints, sources: Sequence[Place], destinations: Sequence[Place]) -> PullForecast:
    copy = COPY_GB_PER_S if all(place.device == CPU for place in destinations) else PCIE_GB_PER_S
    far = distances(sources, destinations)
    seconds = _seconds(flow, far, sources, destinations, copy)
    total = estimate_flow(plan, flow, sources, destinations, Topology(device_gb_per_s=copy, host_gb_per_s=copy))
    by_size = np.argsort(-flow, axis=None, kind="stable")[:MAX_PAIRS]
    pairs = [(int(one), int(other)) for one, other in zip(*np.unravel_index(by_size, flow.shape), strict=True)]
    return PullForecast(
        num_bytes=int(flow.sum()),
        seconds=None if np.isnan(seconds[flow > 0]).any() else total.seconds,
        links={
            name: LinkForecast(
                num_pairs=int(used.sum()), num_bytes=int(flow[used].sum()), seconds=_known(seconds[used].max())
            )
            for level, name in enumerate(LINKS)
            if (used := (far == level) & (flow > 0)).any()
        },
        pairs=tuple(
            PairForecast(
                source_rank=one,
                rank=other,
                link=LINKS[far[one, other]],
                num_bytes=int(flow[one, other]),
                seconds=_known(seconds[one, other]),
            )
            for one, other in pairs
            if flow[one, other]
        ),
    )


def _seconds(
    flow: Ints, far: Ints, sources: Sequence[Place], destinations: Sequence[Place], copy_gb_per_s: float
) -> Floats:
    """Return the time of each pair, NaN when unknown; shape (sources, destinations)."""
    outside = np.where(far >= RAIL, flow, 0)
    sent, received = (
        _through_cards(outside.sum(axis=axis), places) for axis, places in ((1, sources), (0, destinations))
    )
    inside = (flow - outside).sum(axis=0) / (copy_gb_per_s * 1e9)
    return np.where(far >= RAIL, np.maximum(sent[:, None], received[None, :]), inside[None, :])


def _through_cards(num_bytes: Ints, places: Sequence[Place]) -> Floats:
    """Return the time that the card of each rank takes for all ranks that use it."""
    numbers = card_numbers(places)
    rates = np.array([place.cards[0].gb_per_s if place.cards else 0.0 for place in places])
    rates[rates == 0] = np.nan
    return np.bincount(numbers, weights=num_bytes)[numbers] / (rates * 1e9)


def _known(seconds: float) -> float | None:
    return None if np.isnan(seconds) else float(seconds)
