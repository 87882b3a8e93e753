"""Distances, topologies from TOML and from the operating system, load balance, relays and estimates."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import estimate, estimate_fan_out
from starling.weightsync.plan.compact import CompactLayout, check_compact, make_tensor_split
from starling.weightsync.plan.fan_out import (
    MIN_RELAY_BUCKET_BYTES,
    PUBLISHER,
    RELAY_BUCKETS,
    for_relays,
    make_fan_out,
)
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.plan.topology import LINKS, card_numbers, decode_topology, distances

CLUSTER = """
latency_us = 0
device_gb_per_s = 1000

[[hosts]]
name = "node-{}"
count = 4
gpus = 4
numas = 2
switch = "leaf"
nics = [{ name = "mlx{}", count = 2, rail = "rail-{}", gb_per_s = 50 }]

[[hosts]]
name = "box"
nics = [{ name = "eth0", gb_per_s = 1.25 }]
"""


def columns(
    name: str, shapes: list[tuple[int, ...]], rows: list[list[tuple[int, int, int]]], places: list[Place]
) -> CompactLayout:
    """Tensors of float32, each split by rows: entries are rank, first row, number of rows."""
    splits = []
    for shape, entries in zip(shapes, rows, strict=True):
        ranks = [rank for rank, _, _ in entries]
        offsets = [[begin, *([0] * (len(shape) - 1))] for _, begin, _ in entries]
        sizes = [[n, *shape[1:]] for _, _, n in entries]
        splits.append(make_tensor_split(shape, ranks, offsets, sizes))
    specs = tuple(TensorSpec(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(shapes))
    layout = CompactLayout(name, specs, tuple(places), tuple(splits), np.arange(len(shapes)))
    check_compact(layout)
    return layout


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (Place(host="node-0", device="cuda:0", numa=0), Place(host="node-0", device="cuda:0", numa=0), "device"),
        (Place(host="node-0", device="cuda:0", numa=0), Place(host="node-0", device="cuda:1", numa=0), "numa"),
        (Place(host="node-0", device="cuda:0", numa=0), Place(host="node-0", device="cuda:2", numa=1), "host"),
        (Place(host="node-0", device="cuda:0"), Place(host="node-0", device="cuda:1"), "host"),
        (Place(host="node-0", rails=("r0", "r1")), Place(host="node-1", rails=("r1",)), "rail"),
        (Place(host="node-0", rails=("r0",)), Place(host="node-1", rails=("r1",)), "switch"),
        (Place(host="node-0"), Place(host="box"), "far"),
        (Place(host="x"), Place(host="y"), "far"),
        (Place(), Place(), "far"),
    ],
)
def test_distances(one: Place, other: Place, link: str) -> None:
    topology = decode_topology(CLUSTER)
    assert LINKS[distances([one], [other], topology)[0, 0]] == link
    assert LINKS[distances([other], [one], topology)[0, 0]] == link


def test_rails_of_one_side_alone_cost_no_memory() -> None:
    """A replica of 2,048 ranks with 16 rails each, all of other names, cost seconds and hundreds of MiB."""
    many = [Place(rails=tuple(f"{rank}.{rail}" for rail in range(16))) for rank in range(2048)]
    other = [Place(rails=("other",)), Place(rails=("7.3", "other"))]
    tracemalloc.start()
    links = distances(other, many)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert np.argwhere(links == LINKS.index("rail")).tolist() == [[1, 7]]


@given(st.lists(st.sets(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=8), st.integers(0, 8))
def test_ranks_with_a_common_rail_are_near(rails: list[set[str]], num_sources: int) -> None:
    places = [Place(rails=tuple(sorted(names))) for names in rails]
    links = distances(places[:num_sources], places, None)
    expected = [[LINKS.index("rail" if one & other else "far") for other in rails] for one in rails[:num_sources]]
    assert links.tolist() == expected


def test_topology_places_gpus_and_cards() -> None:
    topology = decode_topology(CLUSTER)
    places = topology.places()
    assert len(places) == 17
    assert places[6] == Place(host="node-1", device="cuda:2", numa=1, rails=("rail-1",))
    assert places[16] == Place(host="box", device="cpu", numa=0, rails=("",))
    assert [topology.nic_of(place).name for place in places[:4]] == ["mlx0", "mlx0", "mlx1", "mlx1"]
    assert topology.nic_of(Place(host="node-9")) is None
    assert card_numbers([*places[:5], Place(), Place()], topology).tolist() == [0, 0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hosts = 3", "not a topology"),
        ("= 3", "not a topology"),
        ("[[hosts]]\nname='a'\nspeed=3", "unknown field `speed`"),
        ("nic_gb_per_s = 0", "> 0"),
        ("[[hosts]]\nname='a'\ncount=2", r"The topology has 2 entries 'a'"),
        ("[[hosts]]\nname='a'\n[[hosts]]\nname='a'", "lists host a twice"),
        ("[[hosts]]\nname='a{}'\ncount=60000\ngpus=1000", "more than"),
        ("switches=[{name='s',uplink_gb_per_s=1}]\nhosts=[{name='a'}]", "No host of the topology is on switch s"),
        ("switches=[{name='s',uplink_gb_per_s=1},{name='s',uplink_gb_per_s=1}]", "switch twice"),
    ],
)
def test_invalid_topology_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        decode_topology(text).places()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 4),
)
@examples(40)
def test_copies_are_balanced_to_within_one_piece(
    tensors: list[tuple[int, int]], num_copies: int, num_destinations: int
) -> None:
    """Whatever the sizes and however many tensors are alike: no copy sends more than one piece more than another."""
    shapes = [(rows, count) for rows, count in tensors for _ in range(count)]
    source = columns("p", shapes, [[(r, 0, s[0]) for r in range(num_copies)] for s in shapes], [Place()] * num_copies)
    wanted = [[(r, 0, s[0] - r % s[0]) for r in range(num_destinations)] for s in shapes]
    destination = columns("r", shapes, wanted, [Place()] * num_destinations)
    sent = make_plan(source, destination).pair_bytes.sum(axis=1)
    assert sent.max() - sent.min() <= max(rows * width for rows, width in shapes) * 4


def test_cards_are_balanced_before_ranks() -> None:
    topology = decode_topology(CLUSTER)
    places = [*topology.places()[:3], topology.places()[4]]  # three ranks on two cards of one host, one on another host
    shapes = [(8, 3)] * 12
    source = columns("p", shapes, [[(r, 0, 8) for r in range(4)] for _ in shapes], places)
    destination = columns("r", shapes, [[(0, 0, 8)] for _ in shapes], [Place(host="elsewhere")])
    sent = make_plan(source, destination, topology=topology).pair_bytes[:, 0] // 96
    cards = np.bincount(card_numbers(places, topology), weights=sent)
    assert sent.sum() == 12
    assert cards.max() - cards.min() <= 3
    assert sent.min() > 0


@given(st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=9), st.sampled_from(["a", ""]), st.integers(1, 2))
@examples(50)
def test_each_host_gets_a_version_once(hosts: list[str], publisher: str, num_ranks: int) -> None:
    replicas = [
        [Place(host=host, device=f"cuda:{num_ranks * i + g}") for g in range(num_ranks)] for i, host in enumerate(hosts)
    ]
    fan_out = make_fan_out(replicas, [Place(host=publisher)])
    assert len(fan_out.sources) == len(hosts)
    assert all(source < replica for replica, source in enumerate(fan_out.sources)), "no source waits in a circle"

    def host_of(number: int) -> str:
        return publisher if number == PUBLISHER else hosts[number]

    over_network = [
        (source, replica)
        for replica, source in enumerate(fan_out.sources)
        if not hosts[replica] or host_of(source) != hosts[replica]
    ]
    named = [hosts[replica] for _, replica in over_network if hosts[replica]]
    assert sorted(named) == sorted({host for host in hosts if host} - {publisher})
    # Each card sends a model once.
    senders = [source for source, _ in over_network]
    assert len(set(senders)) == len(senders)


def test_chain_of_known_places() -> None:
    replicas = [[Place(host=host, device=f"cuda:{i}")] for i, host in enumerate("pabbcab")]
    fan_out = make_fan_out(replicas, [Place(host="p")])
    assert fan_out.sources == (PUBLISHER, PUBLISHER, 1, 2, 2, 1, 2)
    assert [fan_out.depth(replica) for replica in range(7)] == [1, 1, 2, 3, 3, 2, 3]
    with pytest.raises(WeightsError, match="1 and 2 ranks"):
        make_fan_out([[Place()], [Place(), Place()]])


def test_estimate_is_the_busiest_link_plus_the_exposed_parts() -> None:
    """2 GB leave two GPUs that share a card of 50 GB/s, into two GPUs of one host with a card each."""
    topology = decode_topology(CLUSTER)
    places = topology.places()
    rows = 250_000_000 // 4
    source = columns("p", [(2 * rows, 4)], [[(0, 0, rows), (1, rows, rows)]], list(places[:2]))
    destination = columns("r", [(2 * rows, 4)], [[(0, 0, rows), (1, rows, rows)]], [places[4], places[6]])
    plan = make_plan(source, destination, topology=topology, bucket_bytes=10_000_000)
    found = estimate(plan, source.places, destination.places, topology)
    assert found.total_bytes == found.publisher_bytes == 2_000_000_000
    assert found.links[0].link == "node-0/mlx0 out"
    assert found.links[0].seconds == pytest.approx(0.04)
    assert found.wire_s == pytest.approx(0.04)
    assert found.pack_s == found.unpack_s == pytest.approx(0.01e9 / 1000e9)
    assert found.wait_s == 0
    assert found.seconds == pytest.approx(found.pack_s + found.wire_s + found.unpack_s + found.wait_s)
    assert found.link_bytes == {**dict.fromkeys(LINKS, 0), "rail": 10**9, "switch": 10**9}
    assert found.switch_s == pytest.approx(0.001)


def test_relays_reduce_the_publisher_to_one_model() -> None:
    """A publisher on a slow card: eight replicas take eight times as long each by itself, and little longer relayed."""
    topology = decode_topology("latency_us=0\n[[hosts]]\nname='h{}'\ncount=9\nnics=[{name='eth',gb_per_s=1}]")
    places = topology.places()
    rows = 250_000_000
    source = columns("p", [(rows, 1)], [[(0, 0, rows)]], [places[0]])
    one = columns("r", [(rows, 1)], [[(0, 0, rows)]], [places[1]])
    eight = columns("r", [(rows, 1)], [[(r, 0, rows) for r in range(8)]], list(places[1:]))
    plan = make_plan(source, one, topology=topology, bucket_bytes=4_000_000)
    alone = estimate(plan, source.places, one.places, topology)
    apart = estimate(make_plan(source, eight, topology=topology), source.places, eight.places, topology)
    replicas = [[place] for place in eight.places]
    relay = estimate_fan_out(for_relays(plan), make_fan_out(replicas, source.places), source.places, replicas, topology)
    assert alone.wire_s == pytest.approx(1.0)
    assert apart.wire_s == pytest.approx(8.0)
    assert relay.publisher_bytes == alone.publisher_bytes
    assert relay.total_bytes == 8 * alone.total_bytes
    assert relay.wire_s == pytest.approx(alone.wire_s * 1.028), "seven more buckets of 4 MB"


def test_slow_uplink_is_a_link_of_the_estimate() -> None:
    topology = decode_topology(
        "hosts=[{name='a',switch='s'},{name='b',switch='s'},{name='c'}]\n"
        "switches=[{name='s',uplink_gb_per_s=0.5}]\nnic_gb_per_s=10"
    )
    places = topology.places()
    rows = [[(0, 0, 1000), (1, 1000, 1000)]]
    source = columns("p", [(2000, 25)], rows, list(places[:2]))
    far = columns("r", [(2000, 25)], [[(0, 0, 2000)]], [places[2]])
    near = columns("r", [(2000, 25)], [[(0, 0, 2000)]], [places[1]])
    busiest = estimate(make_plan(source, far), source.places, far.places, topology).links[0]
    assert (busiest.link, busiest.num_bytes) == ("s out", 200_000)
    links = estimate(make_plan(source, near, topology=topology), source.places, near.places, topology).links
    assert {link.link for link in links} == {"a/cpu card out", "b/cpu card in", "b/cpu device"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"split_of": np.array([5])}, "has split 5 of 1"),
        ({"split_of": np.array([0, 0])}, "1 tensors but 2 entries in split_of"),
        ({"splits": (make_tensor_split((4,), [0], [[2]], [[3]]),)}, r"rank 0 of p: box \[2:5\] leaves shape"),
        ({"splits": (make_tensor_split((4,), [1], [[0]], [[4]]),)}, "do not ascend below 1"),
        ({"splits": (make_tensor_split((5,), [0], [[0]], [[4]]),)}, r"has shape \(4,\), its split \(5,\)"),
    ],
)
def test_invalid_compact_layout_is_refused(change: dict[str, object], sentence: str) -> None:
    spec = TensorSpec(name="t0", shape=(4,), dtype="float32")
    good = {"splits": (make_tensor_split((4,), [0], [[0]], [[4]]),), "split_of": np.array([0])}
    layout = CompactLayout("p", (spec,), (Place(),), **{**good, **change})
    with pytest.raises(WeightsError, match=sentence):
        make_plan(layout, layout)


@pytest.mark.parametrize("rows", [16, 1 << 10, 1 << 13, 1 << 20])
def test_plan_for_relays_has_buckets_enough_to_be_passed_on(rows: int) -> None:
    """They move the same bytes; a plan that has enough of them stays as it is."""
    source, destination = (
        one_tensor(replica, rows, num_ranks) for replica, num_ranks in (("policy-0", 1), ("rollout-0", 2))
    )
    plan = make_plan(source, destination)
    relayed_plan = for_relays(plan)
    assert relayed_plan.total_bytes == plan.total_bytes == rows * 4096
    size_bytes = rows * 2048
    for rank in range(2):
        buckets = relayed_plan.of_destination(rank)
        assert sum(bucket.size_bytes for bucket in buckets) == size_bytes
        assert len(buckets) >= min(RELAY_BUCKETS, size_bytes // MIN_RELAY_BUCKET_BYTES)
        assert max(bucket.size_bytes for bucket in buckets) <= max(MIN_RELAY_BUCKET_BYTES, size_bytes // RELAY_BUCKETS)
    assert for_relays(relayed_plan) == relayed_plan


def one_tensor(replica: str, rows: int, num_ranks: int) -> Layout:
    """Return the layout of a float32 tensor of 1,024 columns, split by rows."""
    spec, share = TensorSpec(name="w", shape=(rows, 1024), dtype="float32"), rows // num_ranks
    ranks = [
        RankLayout(
            place=Place(),
            shards=(
                Shard(
                    tensor=0,
                    box=Box(offset=(rank * share, 0), size=(share, 1024)),
                    storage="w",
                    offset_bytes=0,
                    strides=(1024, 1),
                ),
            ),
        )
        for rank in range(num_ranks)
    ]
    return Layout(replica=replica, tensors=(spec,), ranks=tuple(ranks))
