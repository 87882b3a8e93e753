"""Pairs of ranks in the lines of adoptions: their forecast, and what a rollout says that it measured."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from test_controller_offers import enters
from test_controller_relays import Fleet, announces, fleet, order_of
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.weights.pairs import MAX_RANK_PAIRS
from starling.sim.replicas.weights import adopted, encoded_layout, layout_of, offer_of
from starling.weightsync.costs.pairs import COPY_GB_PER_S
from starling.weightsync.offers.offer import make_offer
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


def test_pull_from_a_relay_that_was_started_again_with_other_ranks_has_no_forecast() -> None:
    """The layout that it has by now says nothing of what was read from it."""
    script: Fleet = fleet(2)
    announces(script, "rollout-0")
    order = order_of(script, "rollout-1")
    enters(script, "rollout-0", "b", encoded_layout("rollout-0", num_ranks=2), incarnation=2)
    script.receive("rollout-1", adopted(order.message, order.buffers))
    line = line_of(script)
    assert line["replica"] == "rollout-1"
    assert "pairs" not in line


def ranked(replica: str, num_ranks: int, place: Callable[[int], Place]) -> bytes:
    """Return an encoded layout whose first rank holds everything, and others at these places nothing."""
    layout: Layout = layout_of(replica)
    others = (RankLayout(place=place(rank), shards=()) for rank in range(1, num_ranks))
    return encode(replace(layout, ranks=(*layout.ranks, *others)))


def test_pairs_of_very_many_ranks_are_not_forecast() -> None:
    """It would take the controller seconds at each adoption."""
    size = math.isqrt(MAX_RANK_PAIRS)
    for num_ranks, is_forecast in ((size, True), (size + 1, False)):
        script = Fleet(relay_from_bytes=0)
        for number in range(2):
            name = f"rollout-{number}"
            enters(script, name, "bc"[number], ranked(name, num_ranks, lambda rank: Place(host=f"h{rank}")))
        enters(script, "policy-0", "a")
        script.publishes(0)
        [rank] = offer_of(0).ranks
        offered = make_offer(0, [replace(rank, rank=number) for number in range(num_ranks)])
        announces(script, "rollout-0", data=encode(offered))
        order = order_of(script, "rollout-1")
        assert order.message.relays == ("rollout-0",)
        script.receive("rollout-1", adopted(order.message, order.buffers))
        assert ("pairs" in line_of(script)) is is_forecast


def test_places_of_replicas_that_have_left_are_not_kept() -> None:
    """A replica may come back with others again and again, each of megabytes."""
    num_bytes = []

    def adopts_as(incarnation: int) -> None:
        cards = tuple(Card(name=f"{incarnation}-{number}", gb_per_s=1.0 + incarnation) for number in range(32))
        layout = ranked("rollout-0", 256, lambda rank: Place(host=f"{incarnation}-{rank}", cards=cards))
        enters(script, "rollout-0", "b", layout, incarnation=incarnation)
        order = order_of(script, "rollout-0")
        script.receive("rollout-0", adopted(order.message, order.buffers), incarnation=incarnation)
        script.receive("rollout-0", wire.Leave(reason="it is started again"), incarnation=incarnation)
        script.commands_sent.clear()
        num_bytes.append(tracemalloc.get_traced_memory()[0])

    script: Fleet = fleet(0, relay_from_bytes=1 << 40)
    tracemalloc.start()
    try:
        for incarnation in range(1, 9):
            adopts_as(incarnation)
    finally:
        tracemalloc.stop()
    assert num_bytes[-1] - num_bytes[3] < 4 * 100_000, "of each incarnation it was a megabyte"
