"""Forecasts of pulls by pairs of ranks: links, bytes, and the time of the busier end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import pairs as layout_pairs

from starling.weightsync.costs.pairs import (
    COPY_GB_PER_S,
    MAX_PAIRS,
    PCIE_GB_PER_S,
    LinkForecast,
    PairForecast,
    forecast_pull,
    forecast_relayed_pull,
    relative_places,
)
from starling.weightsync.plan.layout import Box, Card, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.plan.planner import Plan, make_plan

ROWS, ROW_BYTES = 8, 1_000_000_000 // 8
"""A tensor of 1 GB in rows."""


def split(name: str, places: Sequence[Place]) -> Layout:
    """Return a layout that splits the tensor evenly over the rows."""
    rows = ROWS // len(places)
    ranks = [
        RankLayout(
            place=place,
            shards=(
                Shard(
                    tensor=0,
                    box=Box(offset=(rank * rows, 0), size=(rows, ROW_BYTES)),
                    storage="w",
                    offset_bytes=0,
                    strides=(ROW_BYTES, 1),
                ),
            ),
        )
        for rank, place in enumerate(places)
    ]
    spec = TensorSpec(name="w", shape=(ROWS, ROW_BYTES), dtype="uint8")
    return Layout(replica=name, tensors=(spec,), ranks=tuple(ranks))


def plan_between(sources: Sequence[Place], destinations: Sequence[Place]) -> Plan:
    """Return the plan between two splits of the tensor."""
    return make_plan(split("p", sources), split("r", destinations))


def at(host: str, *cards: Card, **fields: object) -> Place:
    """Return a place on a machine of this name."""
    rails = tuple(card.rail for card in cards if card.rail)
    return Place(host=host, machine=host, cards=cards, rails=rails, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sources", "destinations", "expected"),
    [
        ([at("a")], [at("a")], [(0, 0, "device", 1.0 / COPY_GB_PER_S)]),
        (
            [at("a", device="GPU-1", numa=0)],
            [at("a", device="GPU-2", numa=0), at("a", device="GPU-3", numa=1)],
            [(0, 0, "numa", 0.5 / PCIE_GB_PER_S), (0, 1, "host", 0.5 / PCIE_GB_PER_S)],
        ),
        ([at("a", Card(name="x", gb_per_s=2.0))], [at("b", Card(name="y", gb_per_s=1.0))], [(0, 0, "far", 1.0)]),
        # Two ranks of the source share a card, which is then as slow as the two cards of the destination together.
        (
            [at("a", Card(name="x", gb_per_s=2.0, rail="r0"))] * 2,
            [at("b", Card(name="y", gb_per_s=1.0, rail="r0")), at("b", Card(name="z", gb_per_s=8.0, rail="r1"))],
            [(0, 0, "rail", 0.5), (1, 1, "far", 0.5)],
        ),
        ([at("a", switch="s")], [at("b", Card(name="y", gb_per_s=1.0), switch="s")], [(0, 0, "switch", None)]),
        ([at("a", Card(name="x"))], [at("b", Card(name="y", gb_per_s=1.0))], [(0, 0, "far", None)]),
        ([Place()], [Place()], [(0, 0, "far", None)]),
    ],
    ids=["processor", "GPUs of one host", "two cards", "shared card", "no card", "unknown speed", "unknown places"],
)
def test_forecast_of_pairs(
    sources: list[Place], destinations: list[Place], expected: list[tuple[int, int, str, float | None]]
) -> None:
    forecast = forecast_pull(plan_between(sources, destinations), sources, destinations)
    assert [(one.source_rank, one.rank, one.link) for one in forecast.pairs] == [one[:3] for one in expected]
    assert [one.seconds for one in forecast.pairs] == [pytest.approx(one[3]) for one in expected]
    assert forecast.num_bytes == 1_000_000_000
    if any(one[3] is None for one in expected):
        assert forecast.seconds is None
    else:
        assert forecast.seconds is not None
        assert forecast.seconds >= max(one.seconds or 0.0 for one in forecast.pairs)


def test_relayed_pull_reads_each_rank_from_the_same_rank() -> None:
    here = [at("a", Card(name="x", gb_per_s=1.0))]
    there = [at(host, Card(name="y", gb_per_s=4.0)) for host in ("b", "c")]
    forecast = forecast_relayed_pull(plan_between(here, there), there, there)
    device = {"link": "device", "num_bytes": 500_000_000, "seconds": 0.5 / COPY_GB_PER_S}
    assert forecast.pairs == tuple(PairForecast(source_rank=rank, rank=rank, **device) for rank in range(2))  # type: ignore[arg-type]
    assert forecast.links == {"device": LinkForecast(num_pairs=2, num_bytes=1_000_000_000, seconds=0.5 / COPY_GB_PER_S)}


@given(layout_pairs(), st.booleans())
def test_links_of_any_pull_sum_to_its_bytes(pair: tuple[Layout, Layout], relayed: bool) -> None:
    plan = make_plan(*pair)
    sources, destinations = ([held.place for held in layout.ranks] for layout in pair)
    forecast = (
        forecast_relayed_pull(plan, destinations, destinations)
        if relayed
        else forecast_pull(plan, sources, destinations)
    )
    assert forecast.num_bytes == plan.total_bytes == sum(link.num_bytes for link in forecast.links.values())
    num_pairs = sum(link.num_pairs for link in forecast.links.values())
    assert len(forecast.pairs) == min(num_pairs, MAX_PAIRS)
    sizes = [one.num_bytes for one in forecast.pairs]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one.link in forecast.links for one in forecast.pairs)


@st.composite
def places(draw: st.DrawFn, num: int) -> list[Place]:
    """Draw the places of a replica's ranks on few machines, devices, nodes, rails and switches."""
    cards = [Card(name="eth0", gb_per_s=3.0), Card(name="ib0", gb_per_s=25.0, rail="0"), Card(name="ib1", rail="1")]
    return [
        at(
            draw(st.sampled_from(["", "one", "two"])),
            *draw(st.lists(st.sampled_from(cards), max_size=1)),
            device=draw(st.sampled_from(["cpu", "GPU-1", "GPU-2"])),
            numa=draw(st.sampled_from([-1, 0, 1])),
            switch=draw(st.sampled_from(["", "leaf"])),
        )
        for _ in range(num)
    ]


def renamed(place: Place) -> Place:
    """Return the same place in a cluster of equal machines with other names and other GPUs."""
    host = f"other {place.host}" if place.host else ""
    device = place.device if place.device == "cpu" else f"{place.device}-other"
    return msgspec.structs.replace(place, host=host, machine=host, device=device)


@given(places(2), places(2))
def test_forecasts_between_equal_machines_are_equal(sources: list[Place], destinations: list[Place]) -> None:
    others = [renamed(place) for place in sources], [renamed(place) for place in destinations]
    assert relative_places(*others) == relative_places(sources, destinations)
    expected = forecast_pull(plan_between(sources, destinations), sources, destinations)
    assert forecast_pull(plan_between(*others), *others) == expected


def test_forecasts_differ_with_the_machine_the_device_and_the_card() -> None:
    here = at("one", Card(name="eth0", gb_per_s=3.0), numa=0)
    others = [
        here,
        at("two", Card(name="eth0", gb_per_s=3.0), numa=0),
        at("one", Card(name="eth0", gb_per_s=3.0), numa=1),
        at("one", Card(name="eth0", gb_per_s=6.0), numa=0),
        at("one", Card(name="eth0", gb_per_s=3.0), numa=0, device="GPU-1"),
        at("one", numa=0),
    ]
    assert len({relative_places([here], [other]) for other in others}) == len(others)
