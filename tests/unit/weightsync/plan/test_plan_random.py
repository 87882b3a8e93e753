"""Plans between random layouts: they deliver what the destination needs, and their figures are right."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import Memory, carry_out, filled, pairs, topologies
from property_tests import examples
from test_weights_plan import whole

from starling.common.errors import WeightsError
from starling.weightsync.plan import planner as replan
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.layout import Layout, Place, aligned, encode, pieces_of
from starling.weightsync.plan.moves import Moves, column, packed
from starling.weightsync.plan.planner import Plan, PlanCache, check_plan, decode_plan, make_plan
from starling.weightsync.plan.topology import Topology, distances

bucket_sizes = st.sampled_from([64, 100, 256, 4096])


def held_pieces(layout: Layout) -> dict[int, tuple[object, ...]]:
    return {rank: pieces_of(layout, rank) for rank in range(len(layout.ranks))}


@given(pairs(), topologies(), bucket_sizes)
@examples(60)
def test_executed_plan_equals_slicing_the_model(
    pair: tuple[Layout, Layout], topology: Topology | None, bucket_bytes: int
) -> None:
    source, destination = pair
    plan = decode_plan(encode(make_plan(source, destination, topology=topology, bucket_bytes=bucket_bytes)))
    memories, expected = filled(source), filled(destination)
    for rank in range(len(destination.ranks)):
        check_plan(plan, held_pieces(source), destination, rank)
        memory = Memory(destination, rank)
        carry_out(plan.of_destination(rank), memories, memory)
        for name, storage in memory.storages.items():
            np.testing.assert_array_equal(storage, expected[rank].storages[name])


@given(pairs(), topologies(), bucket_sizes, st.integers(1, 3))
@examples(50)
def test_plan_bytes_equal_the_bytes_of_its_transfers(
    pair: tuple[Layout, Layout], topology: Topology | None, bucket_bytes: int, in_flight: int
) -> None:
    source, destination = pair
    plan = make_plan(source, destination, topology=topology, bucket_bytes=bucket_bytes, buckets_in_flight=in_flight)
    moved = np.zeros_like(plan.pair_bytes)
    for rank in range(len(destination.ranks)):
        buckets = plan.of_destination(rank)
        for bucket in buckets:
            assert 0 < bucket.size_bytes <= bucket.extent_bytes <= bucket_bytes // 64 * 64
            assert bucket.destination_rank == rank
            moved[bucket.source_rank, rank] += bucket.size_bytes
        staging = sum(aligned(piece.size_bytes) for piece in pieces_of(destination, rank))
        assert plan.staging_bytes[rank] == staging
        largest = sum(sorted((bucket.extent_bytes for bucket in buckets), reverse=True)[:in_flight])
        assert largest <= plan.peak_bytes(rank, in_place=True) <= in_flight * bucket_bytes
        assert plan.peak_bytes(rank) == staging + plan.peak_bytes(rank, in_place=True) <= plan.peak_staging_bytes
    np.testing.assert_array_equal(moved, plan.pair_bytes)
    assert plan.total_bytes == moved.sum()


@given(pairs(), topologies())
@examples(30)
def test_plan_of_one_rank_equals_its_part_of_the_whole(pair: tuple[Layout, Layout], topology: Topology | None) -> None:
    source, destination = pair
    plan = make_plan(source, destination, topology=topology, bucket_bytes=256)
    for rank in range(len(destination.ranks)):
        part = decode_plan(encode(plan.of_rank(rank)))
        assert tuple(part.of_destination(rank)) == tuple(plan.of_destination(rank))
        assert part.peak_staging_bytes == plan.peak_bytes(rank)
        assert part.total_bytes == plan.pair_bytes[:, rank].sum()
        for other in set(range(-1, len(destination.ranks) + 1)) - {rank}:
            with pytest.raises(WeightsError, match=f"not for rank {other}"):
                part.of_destination(other)


@given(pairs(), topologies())
@examples(30)
def test_only_the_nearest_copies_serve(pair: tuple[Layout, Layout], topology: Topology | None) -> None:
    source, destination = pair
    plan = make_plan(source, destination, topology=topology)
    far = distances([r.place for r in source.ranks], [r.place for r in destination.ranks], topology)
    for bucket in plan.buckets:
        for move in bucket.transfers:
            sent = source.ranks[bucket.source_rank].shards[move.source_shard]
            name = source.tensors[sent.tensor].name
            for rank, held in enumerate(source.ranks):
                for shard in held.shards:
                    if source.tensors[shard.tensor].name == name and shard.box == sent.box:
                        assert far[bucket.source_rank, bucket.destination_rank] <= far[rank, bucket.destination_rank]


@given(pairs(), topologies())
@examples(30)
def test_compact_layouts_give_the_same_plan(pair: tuple[Layout, Layout], topology: Topology | None) -> None:
    source, destination = pair
    plan = make_plan(source, destination, topology=topology)
    again = make_plan(to_compact(source), to_compact(destination), topology=topology)
    assert encode(plan) == encode(again)


COLUMNS = [name for name in Moves.__struct_fields__ if name not in ("item_bytes", "num_dims", "part_boxes")]
HARMLESS = {"choice_phases"}
"""Which of several equal copies serves is a choice: another one brings the same bytes."""


def with_column(plan: Plan, at: int, **changed: object) -> Plan:
    classes = list(plan.moves)
    fields = {name: getattr(classes[at], name) for name in Moves.__struct_fields__}
    classes[at] = Moves(**{**fields, **changed})
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return Plan(**{**fields, "moves": tuple(classes)})


def brings_everything(plan: Plan, source: Layout, destination: Layout) -> bool:
    """Whether a plan that may have been tampered with passes all checks."""
    try:
        plan = decode_plan(encode(plan))
        for rank in range(len(destination.ranks)):
            check_plan(plan, held_pieces(source), destination, rank)
    except WeightsError:
        return False
    return True


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*COLUMNS, "part_boxes"])
@given(pairs(), st.data())
@examples(15)
def test_corrupted_plan_is_harmless_or_refused(name: str, pair: tuple[Layout, Layout], data: st.DataObject) -> None:
    source, destination = pair
    plan = make_plan(source, destination, bucket_bytes=256)
    width = 8 if name == "part_boxes" else 4
    candidates = [index for index, moves in enumerate(plan.moves) if getattr(moves, name)]
    assume(candidates)
    at = data.draw(st.sampled_from(candidates))
    numbers = column(getattr(plan.moves[at], name), width).copy()
    spot = data.draw(st.integers(0, len(numbers) - 1))
    numbers[spot] += data.draw(st.sampled_from([-(1 << 30), -1, 1, 2, 1 << 30]))
    changed = with_column(plan, at, **{name: packed(numbers, width)})
    if brings_everything(changed, source, destination):  # then it must be true
        memories, expected = filled(source), filled(destination)
        for rank in range(len(destination.ranks)):
            memory = Memory(destination, rank)
            carry_out(decode_plan(encode(changed)).of_destination(rank), memories, memory)
            for storage, data_bytes in memory.storages.items():
                np.testing.assert_array_equal(data_bytes, expected[rank].storages[storage])
    else:
        assert name not in HARMLESS or numbers[spot] < 0


@given(pairs(), st.data())
@examples(60)
def test_garbage_is_refused_with_one_sentence(pair: tuple[Layout, Layout], data: st.DataObject) -> None:
    plan = make_plan(*pair, bucket_bytes=256)
    wire = bytearray(encode(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_plan(wire)
        for rank in range(min(decoded.destination_pieces.num_ranks, 8)):
            if rank in decoded.ranks:
                for bucket in decoded.of_destination(rank):
                    assert bucket.transfers
        assert decoded.total_bytes >= 0
    except WeightsError:
        pass


def test_plan_cache_keeps_the_plan_of_an_unchanged_replica() -> None:
    plans = PlanCache()
    source, one, other = whole("policy-0", (6, 3)), whole("rollout-0", (6, 3)), whole("rollout-1", (6, 3), rows=(2, 4))
    first, second = plans.plan(source, one), plans.plan(source, other)
    joined = plans.plan(source, whole("rollout-2", (6, 3)))
    assert joined not in (first, second)
    assert plans.plan(whole("policy-0", (6, 3)), whole("rollout-0", (6, 3))) is first
    assert plans.plan(to_compact(source), to_compact(other)) is plans.plan(to_compact(source), to_compact(other))
    changed = plans.plan(source, whole("rollout-1", (6, 3), rows=(3, 3)))
    assert changed is not second
    assert plans.plan(source, one) is first
    assert plans.plan(whole("policy-0", (6, 3), rows=(1, 5)), one) is not first


def test_plan_cache_plans_once_for_equal_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(source: Layout, destination: Layout, **others: Any) -> Plan:
        made.append(destination.replica)
        return make_plan(source, destination, **others)

    monkeypatch.setattr(replan, "make_plan", counting)
    plans = PlanCache()
    source = whole("policy-0", (6, 3))
    for number in range(50):
        destination = whole(f"rollout-{number}", (6, 3))
        alone = make_plan(source, destination)
        plan = plans.plan(source, destination)
        assert encode(plan) == encode(alone)
        assert (plan.total_bytes, plan.num_boxes) == (alone.total_bytes, alone.num_boxes)
    assert made == ["rollout-0"]
    near = msgspec.structs.replace(source.ranks[0], place=Place(host="h"))
    plans.plan(source, msgspec.structs.replace(destination, ranks=(near,)))
    assert len(made) == 1, "far from a source with an unknown place"
    source = msgspec.structs.replace(source, ranks=(near,))
    for host in ("h", "i", "j"):
        at = msgspec.structs.replace(near, place=Place(host=host))
        plans.plan(source, msgspec.structs.replace(destination, ranks=(at,)))
    assert len(made) == 2, "i and j are equally far from h, as far as the unknown one was; h is near"


def test_plan_cache_finds_out_once_that_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(source: Layout, destination: Layout, **others: Any) -> Plan:
        made.append(destination.replica)
        return make_plan(source, destination, **others)

    monkeypatch.setattr(replan, "make_plan", counting)
    plans, source = PlanCache(), whole("rollout-9", (6, 3))
    others = [whole(f"rollout-{number}", (6, 4)) for number in range(3)]
    for destination in (*others, *others):
        with pytest.raises(WeightsError, match=f"no plan from rollout-9 to {destination.replica}"):
            plans.plan(source, destination)
    assert made == ["rollout-0"]
    plans.forget(source)
    with pytest.raises(WeightsError):
        plans.plan(source, others[0])
    assert len(made) == 2


def test_plan_cache_forgets_plans_with_the_last_equal_layout() -> None:
    plans = PlanCache()
    source = whole("policy-0", (6, 3), rows=(2, 4))
    one, equal = whole("rollout-0", (6, 3)), whole("rollout-1", (6, 3))
    first = plans.plan(source, one)
    assert plans.plan(source, equal).moves == first.moves
    for _ in range(2):
        plans.forget(one)
    again = plans.plan(source, equal)
    assert again.moves is first.moves, "the other replica still has this layout"
    plans.forget(equal)
    assert plans.plan(source, equal).moves is not first.moves
