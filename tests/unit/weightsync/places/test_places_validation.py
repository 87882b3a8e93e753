"""Places that peers send: refused, or harmless."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import estimate
from starling.weightsync.plan.layout import (
    MAX_NUMA_NODES,
    MAX_NVLINK_PEERS,
    MAX_RANK_RAILS,
    Box,
    Card,
    Layout,
    Place,
    RankLayout,
    Shard,
    TensorSpec,
    decode_layout,
    encode,
)
from starling.weightsync.plan.planner import make_plan


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        (Place(cards=(Card(name="c"),) * (MAX_RANK_RAILS + 1)), f"{MAX_RANK_RAILS + 1} cards"),
        (Place(nvlink=("p",) * (MAX_NVLINK_PEERS + 1)), f"{MAX_NVLINK_PEERS + 1} NVLink peers"),
        (Place(numa=-2), "NUMA node -2"),
        (Place(numa=MAX_NUMA_NODES), f"NUMA node {MAX_NUMA_NODES}"),
        (Place(host="h" * 257), "a place of 257 characters"),
        (Place(device="d" * 257), "a place of 257 characters"),
        (Place(machine="m" * 257), "a place of 257 characters"),
        (Place(switch="s" * 257), "a place of 257 characters"),
        (Place(cards=(Card(name="c" * 257),)), "a place of 257 characters"),
        (Place(cards=(Card(name="c", gb_per_s=-1.0),)), "a card of -1.0 GB/s"),
        (Place(cards=(Card(name="c", gb_per_s=5e-324),)), "a card of 5e-324 GB/s"),
        (Place(cards=(Card(name="c", gb_per_s=math.inf),)), "a card of inf GB/s"),
        (Place(cards=(Card(name="c", gb_per_s=math.nan),)), "a card of nan GB/s"),
    ],
)
def test_place_that_no_rank_has_is_refused(place: Place, complaint: str) -> None:
    layout = Layout(replica="r", tensors=(), ranks=(RankLayout(place=place, shards=()),))
    with pytest.raises(WeightsError, match=f"Rank 0 of r names {complaint}, expected"):
        decode_layout(encode(layout))


ANY_TEXT = st.text(max_size=4)
ANY_PLACE = st.builds(
    Place,
    host=ANY_TEXT,
    device=ANY_TEXT,
    numa=st.integers(-1, 2) | st.integers(-(2**63), 2**63 - 1),
    rails=st.lists(ANY_TEXT, max_size=3).map(tuple),
    machine=ANY_TEXT,
    pci=ANY_TEXT,
    cards=st.lists(st.builds(Card, name=ANY_TEXT, gb_per_s=st.floats(), rail=ANY_TEXT), max_size=2).map(tuple),
    nvlink=st.lists(ANY_TEXT, max_size=2).map(tuple),
    switch=ANY_TEXT,
)


@given(st.lists(ANY_PLACE, min_size=1, max_size=3), st.lists(ANY_PLACE, min_size=1, max_size=3))
def test_any_places_are_refused_or_give_a_plan_and_an_estimate(held: list[Place], wanted: list[Place]) -> None:
    """Whatever a peer says of its places, each byte is delivered once, in a time that can be printed."""
    box = Box(offset=(0,), size=(4,))
    layouts = []
    for name, places in (("p", held), ("r", wanted)):
        one = Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1,))
        spec = TensorSpec(name="w", shape=(4,), dtype="float32")
        ranks = tuple(RankLayout(place=place, shards=(one,)) for place in places)
        try:
            layouts.append(decode_layout(encode(Layout(replica=name, tensors=(spec,), ranks=ranks))))
        except WeightsError:
            return
    plan = make_plan(*layouts)
    assert plan.pair_bytes.sum(axis=0).tolist() == [16] * len(wanted)
    found = estimate(plan, held, wanted)
    assert found.total_bytes == sum(found.link_bytes.values()) == 16 * len(wanted)
    assert 0 <= found.seconds < math.inf
