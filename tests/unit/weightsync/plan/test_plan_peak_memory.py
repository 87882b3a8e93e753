"""Estimated peak memory, compared with what the executor allocates."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from memory_pair import layouts
from property_tests import examples
from puller_models import Model

from starling.weightsync.costs.estimate import MAX_PACKING_BYTES, destination_peak, publisher_peak
from starling.weightsync.memory.arena import Arena
from starling.weightsync.memory.arrays import Array, grouped, packed_arrays, packing_bytes, part_of
from starling.weightsync.memory.digests import digest_of_array, digest_of_copy
from starling.weightsync.plan.buckets import is_contiguous, row_major
from starling.weightsync.plan.layout import ITEM_BYTES, Layout, ShardPiece, pieces_of
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.puller.schedule import ReadSchedule, make_schedule
from starling.weightsync.transports.source import PiecesByName


def live_arrays(layout: Layout, rank: int) -> list[Array]:
    """Address of each shard in memory that is never accessed."""
    found: list[Array] = []
    for shard in layout.ranks[rank].shards:
        item = ITEM_BYTES[layout.tensors[shard.tensor].dtype]
        last = sum((n - 1) * stride for n, stride in zip(shard.box.size, shard.strides, strict=True))
        memory = np.empty((shard.offset_bytes // item + last + 1) if shard.box.volume else 0, f"u{item}")
        strides = [stride * item for stride in shard.strides]
        found.append(np.ndarray(shard.box.size, memory.dtype, memory, shard.offset_bytes, strides))
    return found


def stage_of(plan: Plan, layout: Layout, rank: int, in_place: bool) -> ReadSchedule:
    """What the destination does."""
    if in_place:
        return make_schedule(plan, layout, rank, live_arrays(layout, rank))
    pieces = pieces_of(layout, rank)
    return make_schedule(plan, layout, rank, packed_arrays(pieces, snapshot_memory(pieces)))


def snapshot_memory(pieces: tuple[ShardPiece, ...]) -> Array:
    """Memory for pieces, which is never accessed."""
    return np.empty(sum(piece.size_bytes + 64 for piece in pieces), np.uint8)


def check_peaks(source: Layout, destination: Layout, bucket_bytes: int, *, in_place: bool) -> None:
    """Compare the peaks with the arrays of source and destination."""
    plan = make_plan(source, destination, bucket_bytes=bucket_bytes)
    stages = [stage_of(plan, destination, rank, in_place) for rank in range(len(destination.ranks))]
    for rank, stage in enumerate(stages):
        rooms = sorted((read.buffer_bytes(scatters=False) for read in stage.reads), reverse=True)
        peak = destination_peak(plan.of_rank(rank), destination, rank, "tcp", in_place=in_place)
        assert peak.scratch_bytes == sum(rooms[: plan.buckets_in_flight]) <= plan.peak_bytes(rank, in_place=True)
        assert peak.staging_bytes == (0 if in_place else plan.staging_bytes[rank])
        assert peak.total_bytes <= plan.peak_bytes(rank, in_place=in_place)
        assert destination_peak(plan, destination, rank, "local", in_place=in_place).scratch_bytes == 0
    for number in range(len(source.ranks)):
        pieces = pieces_of(source, number)
        holding, arrays = PiecesByName(pieces), packed_arrays(pieces, snapshot_memory(pieces))
        most = []
        for stage in stages:
            rooms = [0]
            for read in stage.reads:
                if read.source_rank == number:
                    found = [(holding.find(box), box.box) for box in read.boxes]
                    boxes = [part_of(arrays[index], pieces[index].box, box) for index, box in found]
                    rooms.append(packing_bytes(grouped(boxes, read.segments)))
            most.append(rooms)
        peaks = {
            transport: publisher_peak(source, number, plan, destination, transport, in_place=in_place)
            for transport in ("local", "tcp", "ucx")
        }
        assert peaks["local"].packing_bytes == 0
        assert peaks["tcp"].packing_bytes == sum(map(max, most))
        together = sum(sum(sorted(rooms)[-4:]) for rooms in most)
        assert min(together, MAX_PACKING_BYTES) <= peaks["ucx"].packing_bytes <= 4 * sum(map(max, most))


@examples(40)
@given(
    seed=st.integers(0, 1 << 30),
    num_sources=st.integers(1, 4),
    num_destinations=st.integers(1, 3),
    bucket_bytes=st.sampled_from((256, 4096, 1 << 17, 1 << 20)),
    in_place=st.booleans(),
)
def test_peaks_match_the_executor_on_random_models(
    seed: int, num_sources: int, num_destinations: int, bucket_bytes: int, in_place: bool
) -> None:
    draw = random.Random(seed)
    model = Model(draw, num_tensors=draw.randint(1, 8), longest=90)
    source, destination = model.layout("policy-0", num_sources), model.layout("rollout-0", num_destinations)
    check_peaks(source, destination, bucket_bytes, in_place=in_place)


def test_peaks_match_the_executor_on_fused_and_strided_tensors() -> None:
    for in_place in (False, True):
        check_peaks(*layouts(3), 8 << 20, in_place=in_place)


def test_local_transport_needs_buffers_for_device_tensors_only() -> None:
    source, destination = layouts(2)
    plan = make_plan(source, destination, bucket_bytes=8 << 20)
    on_device = {
        transport: destination_peak(plan, destination, 0, transport, in_place=True, on_device=True)
        for transport in ("local", "tcp")
    }
    most = sum(sorted((bucket.extent_bytes for bucket in plan.buckets), reverse=True)[: plan.buckets_in_flight])
    assert on_device["local"].scratch_bytes == on_device["tcp"].scratch_bytes == most
    staged = destination_peak(plan, destination, 0, "local", on_device=True)
    assert staged == destination_peak(plan, destination, 0, "local")


def test_packing_grows_with_readers_up_to_a_limit_of_each() -> None:
    source, destination = layouts(8)
    plan = make_plan(source, destination, bucket_bytes=32 << 20)
    one, many, most = (
        {
            transport: publisher_peak(source, 0, plan, destination, transport, in_place=True, num_replicas=num)
            for transport in ("local", "tcp", "ucx")
        }
        for num in (1, 2, 50)
    )
    assert most["local"].packing_bytes == 0
    assert 24 << 20 < one["tcp"].packing_bytes <= 32 << 20
    assert [peaks["tcp"].packing_bytes for peaks in (many, most)] == [n * one["tcp"].packing_bytes for n in (2, 50)]
    assert one["ucx"].packing_bytes == min(4 * one["tcp"].packing_bytes, MAX_PACKING_BYTES)
    assert [peaks["ucx"].packing_bytes for peaks in (many, most)] == [n * one["ucx"].packing_bytes for n in (2, 50)]
    assert len({peak.snapshots_bytes for peaks in (one, many, most) for peak in peaks.values()}) == 1


def test_arena_size_equals_its_estimate() -> None:
    source, destination = layouts(1)
    peak = publisher_peak(source, 0, make_plan(source, destination), destination, "local")
    arena = Arena(pieces_of(source, 0))
    try:
        assert arena.slots[0].nbytes * 2 + 4096 == peak.snapshots_bytes == peak.total_bytes
    finally:
        arena.close()


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 2)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
)
def test_is_contiguous_agrees_with_numpy(shape: list[int], cuts: list[tuple[int, int, int]], order: list[int]) -> None:
    whole = np.zeros(shape, np.uint16)
    assert is_contiguous(shape, row_major(shape))
    part = whole[tuple(slice(*cut) for cut in cuts[: len(shape)])]
    part = part.transpose([dim for dim in order if dim < len(shape)])
    assert is_contiguous(part.shape, [stride // 2 for stride in part.strides]) == part.flags.c_contiguous


@given(
    rows=st.sampled_from([1, 3, 15, 16, 40]),
    columns=st.sampled_from([5, 4096, 33_000]),
    item_bytes=st.sampled_from([1, 2, 8]),
    salt=st.integers(0, 40),
)
@examples(40)
def test_sampled_digest_is_independent_of_strides(rows: int, columns: int, item_bytes: int, salt: int) -> None:
    draw = np.random.default_rng(rows * columns + salt)
    wide = draw.integers(0, 256, rows * (columns + 7) * item_bytes, np.uint8).view(f"u{item_bytes}")
    box = wide.reshape(rows, columns + 7)[:, 3 : columns + 3]
    packed = np.ascontiguousarray(box)
    assert digest_of_array(box, "sampled", salt) == digest_of_array(packed, "sampled", salt)


@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    columns=st.sampled_from([0, 1, 700_000]),
    item_bytes=st.sampled_from([1, 4]),
)
@examples(30)
def test_digest_during_the_copy_equals_the_digest_of_the_box(
    shape: tuple[int, ...], columns: int, item_bytes: int
) -> None:
    shape = (*shape[:1], columns) if columns else shape
    draw = np.random.default_rng(columns)
    wide = draw.integers(0, 256, tuple(2 * n for n in shape), np.uint8).astype(f"u{item_bytes}")
    box = wide[tuple(slice(n // 2, n // 2 + n) for n in shape)]
    place = np.zeros(shape, box.dtype)
    assert digest_of_copy(place, box) == digest_of_array(box)
    np.testing.assert_array_equal(place, box)
