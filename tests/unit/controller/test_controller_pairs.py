"""Pairs of ranks in the lines of adoptions: their forecast, and what a rollout says that it measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from test_controller_offers import enters
from test_controller_relays import Fleet, announces, fleet, order_of
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.sim.replicas.weights import adopted, layout_of
from starling.weightsync.costs.pairs import COPY_GB_PER_S
from starling.weightsync.plan.layout import Card, Layout, Place, RankLayout, encode


def placed(replica: str, place: Place) -> bytes:
    """Return an encoded layout of one rank at `place`."""
    layout: Layout = layout_of(replica)
    ranks = tuple(RankLayout(place=place, shards=rank.shards) for rank in layout.ranks)
    return encode(replace(layout, ranks=ranks))


def read(**changes: Any) -> wire.RankRead:
    """Return what a rollout says that it read from the policy."""
    one = wire.RankRead(source="policy-0", source_rank=0, rank=0, transport="tcp", num_bytes=12, seconds=0.25)
    return replace(one, **changes)


def run(policy: Place, rollout: Place) -> Script:
    """Return a run in which `rollout-0` is to adopt version 0 from `policy-0`."""
    script = Script()
    enters(script, "rollout-0", "b", placed("rollout-0", rollout))
    enters(script, "policy-0", "a", placed("policy-0", policy))
    script.joins("reward-0")
    script.publishes(0)
    return script


def adopts(script: Script, *reads: wire.RankRead) -> dict[str, Any]:
    """Have `rollout-0` adopt, and return the fields of the line."""
    [send] = [one for one in script.commands_sent.values() if isinstance(one.message, wire.AdoptWeights)]
    assert isinstance(send.message, wire.AdoptWeights)
    script.receive("rollout-0", replace(adopted(send.message, send.buffers), reads=reads))
    return line_of(script)


def line_of(script: Script) -> dict[str, Any]:
    """Return the fields of the last line of an adoption."""
    return [one.fields for one in script.commands if isinstance(one, Note) and one.kind == "adopted"][-1]


CARDS = (Card(name="eth0", gb_per_s=1.25),)
FAR = Place(host="a", machine="m", cards=CARDS), Place(host="b", machine="n", cards=CARDS)


def test_line_of_an_adoption_has_the_forecast_beside_the_measurement() -> None:
    line = adopts(run(*FAR), read())
    seconds = 16 / 1.25e9
    assert line["pairs"] == [
        {
            "source_rank": 0,
            "rank": 0,
            "link": "far",
            "bytes": 16,
            "expected_s": pytest.approx(seconds),
            "transport": "tcp",
            "sent_bytes": 12,
            "read_s": 0.25,
        }
    ]
    assert line["links"] == {"far": {"pairs": 1, "bytes": 16, "expected_s": pytest.approx(seconds)}}
    assert line["expected_s"] > seconds


def test_ranks_of_one_machine_are_near_whatever_their_containers_are_called() -> None:
    place = Place(host="pod-1", machine="m", numa=0)
    line = adopts(run(place, replace(place, host="pod-2")))
    [pair] = line["pairs"]
    assert (pair["link"], pair["expected_s"]) == ("device", pytest.approx(16 / COPY_GB_PER_S / 1e9))
    assert (pair["transport"], pair["sent_bytes"], pair["read_s"]) == ("", None, None), "it reported nothing"


def test_time_is_unknown_where_the_speed_of_a_card_is() -> None:
    line = adopts(run(FAR[0], replace(FAR[1], cards=(Card(name="eth0"),))), read())
    assert line["expected_s"] is None
    assert [pair["expected_s"] for pair in line["pairs"]] == [None]


@pytest.mark.parametrize(
    "lie",
    [
        {"source": "rollout-7"},
        {"source_rank": -1},
        {"rank": 1 << 40},
        {"transport": "x" * 10_000},
        {"num_bytes": 1 << 62},
        {"num_bytes": -1},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": -1.0},
    ],
)
def test_lies_about_reads_are_bounded(lie: dict[str, Any]) -> None:
    line = adopts(run(*FAR), read(**lie), *[read(rank=rank) for rank in range(1, 10_000)])
    text = json.dumps(line, allow_nan=False)
    assert len(text) < 2000
    [pair] = line["pairs"]
    assert pair["sent_bytes"] in (None, 0, 12, 32)
    assert pair["read_s"] is None or 0 <= pair["read_s"] <= 1e9


def test_pull_from_a_relay_is_compared_with_the_relay() -> None:
    script: Fleet = fleet(2)
    announces(script, "rollout-0")
    order = order_of(script, "rollout-1")
    reads = (read(source="policy-0", num_bytes=4, seconds=9.0), read(source="rollout-0", num_bytes=12))
    script.receive("rollout-1", replace(adopted(order.message, order.buffers), reads=reads))
    [pair] = line_of(script)["pairs"]
    assert (pair["sent_bytes"], pair["read_s"]) == (12, 0.25)
