"""Delta pulls: as exact as full pulls, with a fallback to full boxes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from covering import covering
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from puller_models import Model, Storages, equal, evolved, local, publish, publishers, zeros
from transport_peers import opening, piece, served_transports, serving

from starling.common.errors import WeightsError
from starling.weightsync.delta.boxes import apply_box
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, ShardPiece, TensorSpec
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.delta_history import (
    MIN_PART_BYTES,
    DeltaHistory,
    DeltaPart,
    DeltaStep,
    ForwardedDeltas,
    parts_of,
)
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullReport
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.transports.messages import MeasureDeltas, ReadBoxes, decode_request, with_checksum
from starling.weightsync.transports.source import Grant, PendingBoxes, ReaderSession

torch.set_num_threads(1)
DEADLINE_S = 30.0
SERVED = served_transports()


class World:
    """Two policy ranks with a half of each tensor, and one rollout rank that needs parts of both halves."""

    def __init__(self, transport: Transport, *, delta_versions: int = 2, in_place: bool = False, seed: int = 3) -> None:
        self.model = Model(random.Random(seed), num_tensors=8, longest=90)
        self.versions = [self.model.full(0)]
        self.source, self.destination = self.model.layout("policy-0", 2), self.model.layout("rollout-0", 2)
        self.plan = make_plan(self.source, self.destination, bucket_bytes=4096, buckets_in_flight=3)
        self._publishers = publishers(self.source, [transport] * 2, delta_versions=delta_versions)
        self.publishers = self._publishers.__enter__()
        self.live: Storages = zeros(self.destination, 0)
        self.in_place = in_place
        self.puller = Puller(self.destination)

    def publish(self, share: float = 0.01) -> Offer:
        """Publish the next version, of which about `share` of the elements changed."""
        offer = publish(self.publishers, self.source, len(self.versions) - 1, self.versions[-1])
        self.versions.append(evolved(self.versions[-1], len(self.versions), share))
        return offer

    def pull(self, offer: Offer) -> PullReport:
        """Pull, switch, and check every bit."""
        into = self.live if self.in_place else None
        report = self.puller.pull(offer, self.plan, deadline_s=DEADLINE_S, into=into)
        if not self.in_place:
            self.puller.switch(self.live)
        assert equal(self.live, local(self.destination, 0, self.versions[offer.version]))
        assert self.puller.attest(self.live, offer) == offer.root
        return report

    def compared(self) -> None:
        """Wait until the newest version has been compared with the one before; the next snapshot would interrupt it."""
        running = [each._comparison._running for each in self.publishers if each._comparison is not None]
        assert all(future is None or future.result(DEADLINE_S) for future in running)

    def close(self) -> None:
        self.puller.close()
        self._publishers.__exit__(None, None, None)


def travelled(report: PullReport) -> int:
    return sum(report.bytes_by_source.values())


@pytest.fixture(params=[pytest.param(one.values, marks=one.marks) for one in covering(SERVED, (False, True))], ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    transport, in_place = request.param
    made = World(transport, in_place=in_place)
    yield made
    made.close()


@pytest.mark.sample(1)
def test_first_version_travels_whole_and_the_next_as_deltas(world: World) -> None:
    first = world.pull(world.publish())
    assert first.num_deltas == 0
    assert travelled(first) == first.size_bytes
    for _ in range(3):
        report = world.pull(world.publish())
        assert report.num_deltas > 0
        assert report.size_bytes == first.size_bytes
        assert travelled(report) < report.size_bytes / 3
        assert report.num_retries == 0
        assert report.buffer_bytes <= world.plan.peak_bytes(0, in_place=True)


@pytest.mark.sample(1)
def test_missed_version_is_bridged_by_a_chain_and_more_by_a_full_pull(world: World) -> None:
    world.pull(world.publish())
    for missed, deltas in ((1, True), (2, False)):
        for _ in range(missed):
            world.publish()
            world.compared()
        report = world.pull(world.publish())
        assert (report.num_deltas > 0) == deltas
        assert (travelled(report) < report.size_bytes) == deltas


def test_steps_that_were_never_published_are_spanned_by_one_delta() -> None:
    """Publications need not be of consecutive versions: each is compared with the one before it."""
    layout = matrix(64, 512)
    plan = make_plan(layout, layout, bucket_bytes=256 << 10, buckets_in_flight=2)
    full, live = {"t": torch.zeros(64, 512, dtype=torch.int16)}, {"t": torch.ones(64, 512, dtype=torch.int16)}
    puller = Puller(layout)
    with publishers(layout, ["tcp"], delta_versions=1) as made:
        for version in (0, 1, 4, 9):
            full["t"][version] += 1
            report = puller.pull(publish(made, layout, version, full), plan, deadline_s=DEADLINE_S, into=live)
            assert torch.equal(live["t"], full["t"])
            assert (report.num_deltas > 0) == (version > 0)
    puller.close()


@pytest.mark.sample(1)
def test_large_change_travels_whole(world: World) -> None:
    world.pull(world.publish(share=4.0))
    report = world.pull(world.publish())
    assert travelled(report) == report.size_bytes


@pytest.mark.sample(1)
def test_delta_against_a_corrupted_base_is_detected_and_replaced(world: World) -> None:
    """A bit flipped at the destination: the digest reveals it, and the bucket is requested as a whole."""
    world.pull(world.publish())
    if world.in_place:
        largest = max(world.live.values(), key=lambda tensor: tensor.nbytes)
        largest.view(-1).view(torch.uint8)[77] ^= 1
    else:
        assert world.puller._staging is not None
        world.puller._staging[world.puller._staging.nbytes // 2] ^= 1
    report = world.pull(world.publish())
    assert report.num_retries == 1
    assert report.num_deltas > 0


@pytest.mark.sample(1)
def test_interrupted_pull_resumes_from_the_versions_of_its_boxes(world: World) -> None:
    world.pull(world.publish())
    offer, seen = world.publish(), []
    with pytest.raises(WeightsError, match="Cancelled"):
        world.puller.pull(
            offer,
            world.plan,
            deadline_s=DEADLINE_S,
            into=world.live if world.in_place else None,
            progress=lambda progress: seen.append(progress.bytes_done),
            cancelled=lambda: len(seen) > 0,
        )
    world.compared()
    report = world.pull(world.publish())  # some hold the first version, some perhaps the second
    assert report.num_deltas > 0


@pytest.mark.parametrize(("transport", "in_place"), covering(SERVED, [False, True]))
def test_deltas_of_direct_boxes_get_buffers(transport: Transport, in_place: bool) -> None:
    layout = matrix(1024, 512)
    plan = make_plan(layout, layout, bucket_bytes=256 << 10, buckets_in_flight=2)
    full = {"t": torch.zeros(1024, 512, dtype=torch.int16)}
    live = {"t": torch.ones(1024, 512, dtype=torch.int16)}
    puller = Puller(layout)
    with publishers(layout, [transport], delta_versions=1) as made:
        for version in range(2):
            full["t"][version] += 1
            offer = publish(made, layout, version, full)
            report = puller.pull(offer, plan, deadline_s=DEADLINE_S, into=live if in_place else None)
            assert report.num_deltas == 4 * version
            assert report.buffer_bytes <= plan.peak_bytes(0, in_place=True)
            assert report.buffer_bytes == 0 or version
        if not in_place:
            puller.switch(live)
        assert equal(live, full)
    puller.close()


def matrix(rows: int, columns: int) -> Layout:
    """One tensor of 2 bytes per element on one rank."""
    spec = TensorSpec(name="t", shape=(rows, columns), dtype="int16")
    box = Box(offset=(0, 0), size=spec.shape)
    shard = Shard(tensor=0, box=box, storage="t", offset_bytes=0, strides=(columns, 1))
    return Layout(replica="r", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("compared", [False, True])
def test_slow_reader_keeps_the_deltas_of_its_snapshot(share: float, compared: bool) -> None:
    """Two more versions are published once a `share` of the buckets has arrived; the snapshot stays readable."""
    world = World("tcp")
    try:
        world.pull(world.publish())
        offer, num_left = world.publish(), list[int]()
        if compared:  # else the next version interrupts the comparison
            world.compared()

        def publish_twice() -> bool:
            schedule, arrived = world.puller._schedule, len(world.puller._sent)
            assert schedule is not None
            opened = all(each.state == "open" for each in world.puller._connections._connected.values())
            if not num_left and opened and arrived >= share * len(schedule.reads):
                num_left.append(len(schedule.reads) - arrived)
                world.publish()
                world.publish()
            return False

        report = world.puller.pull(offer, world.plan, deadline_s=DEADLINE_S, cancelled=publish_twice)
        world.puller.switch(world.live)
        assert num_left > [0]
        assert equal(world.live, local(world.destination, 0, world.versions[offer.version]))
        assert report.num_retries == 0
        assert report.num_deltas > 0 or not (compared and share)
    finally:
        world.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", SERVED)
def test_publisher_without_delta_versions_sends_everything(transport: Transport) -> None:
    world = World(transport, delta_versions=0)
    try:
        for _ in range(2):
            report = world.pull(world.publish())
            assert report.num_deltas == 0
            assert travelled(report) == report.size_bytes
    finally:
        world.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", SERVED)
def test_deltas_require_full_digests(transport: Transport) -> None:
    """Only full digests would reveal a delta against another base."""
    world = World(transport)
    world.puller.close()
    world.puller = Puller(world.destination, digests="sampled")
    try:
        for _ in range(2):
            offer = world.publish()
            report = world.puller.pull(offer, world.plan, deadline_s=DEADLINE_S)
            assert report.num_deltas == 0
    finally:
        world.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", SERVED)
def test_relay_forwards_deltas_unchanged(transport: Transport) -> None:
    world = World(transport)
    relay = Puller(world.destination, serving=ServingOptions(transport, "127.0.0.1"))
    try:
        for number in range(3):
            offer, announced = world.publish(), list[Offer]()
            first = relay.pull(offer, world.plan, deadline_s=DEADLINE_S, announce=announced.append)
            report = world.puller.pull(offer, world.plan, deadline_s=DEADLINE_S, relays=announced, relays_first=True)
            world.puller.switch(world.live)
            assert equal(world.live, local(world.destination, 0, world.versions[number]))
            assert list(report.bytes_by_source) == [announced[0].ranks[0].address]
            assert travelled(report) == travelled(first)
            assert (report.num_deltas > 0) == (number > 0)
            assert report.num_deltas == first.num_deltas
    finally:
        relay.close()
        world.close()


def test_relay_says_that_there_are_no_deltas_before_the_boxes_arrive() -> None:
    """Its reader would otherwise request each bucket only when the relay has it."""
    wanted = piece("w", "uint8", (0, 1000))
    with serving("tcp", [wanted]) as made:
        made.source.pending = PendingBoxes([(0, wanted.box)])
        made.source.deltas = deltas = ForwardedDeltas()
        deltas.begin(made.offer.snapshot, (6,))
        session = ReaderSession(made.source)
        assert session.grant(opening(made.offer)).bases == (6,)
        measured = session.grant(MeasureDeltas(number=2, base=6, boxes=(wanted,)))
        assert not measured.ready()
        deltas.expect_whole([(0, wanted.box)])
        assert measured.ready()
        assert measured.answer(2).sizes == (0,)
        read = ReadBoxes(number=3, tag=3, segments=(1,), boxes=(wanted,), digests="full", salt=0)
        assert not session.grant(read).ready()
        session.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_buckets_are_read_in_the_order_of_the_plan(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay and its reader would otherwise wait for each other's next bucket."""
    granted: list[tuple[str, ...]] = []
    read = ReaderSession._read

    def recorded(session: ReaderSession, request: ReadBoxes, boxes: list[tuple[int, Box]]) -> Grant:
        granted.append(tuple(str(box) for box in request.boxes))
        return read(session, request, boxes)

    world = World("tcp")
    try:
        world.pull(world.publish())
        world.versions[-1] = evolved(world.versions[-2], 1, share)
        offer = world.publish()
        world.compared()
        monkeypatch.setattr(ReaderSession, "_read", recorded)
        world.pull(offer)
        schedule = world.puller._schedule
        assert schedule is not None
        for rank in schedule.source_ranks:
            planned = [tuple(map(str, one.boxes)) for one in schedule.reads if one.source_rank == rank]
            assert len(planned) > 4
            assert [boxes for boxes in granted if boxes in planned] == planned
    finally:
        world.close()


def test_snapshot_does_not_wait_for_the_comparison() -> None:
    """Publishing faster than versions can be compared costs deltas only."""
    world = World("tcp")
    try:
        for _ in range(20):
            offer = world.publish()
        world.pull(offer)
        totals = []
        for number in range(100, 103):
            tensors = local(world.source, 0, world.versions[-1])
            totals.append(world.publishers[0].snapshot(number, tensors).changes(DEADLINE_S))
        assert totals[1] is not None
        assert totals[1].num_compared > 0
        assert totals[1].num_changed == 0  # the same tensors again
    finally:
        world.close()


def test_changes_report_the_changed_elements_of_a_version() -> None:
    layout = Model(random.Random(1), num_tensors=1, longest=40).layout("policy-0", 1)
    spec = layout.tensors[0]
    tensor = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    with Publisher(layout, transport="tcp", delta_versions=1) as publisher:
        assert publisher.snapshot(0, {spec.name: tensor}).changes(DEADLINE_S) is None
        tensor.view(-1).view(torch.uint8)[0] ^= 1
        total = publisher.snapshot(1, {spec.name: tensor}).changes(DEADLINE_S)
        assert total is not None
        assert (total.num_changed, total.num_compared) == (1, tensor.numel())


@examples(15, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_sources=st.integers(1, 3),
    bucket_bytes=st.sampled_from((256, 4096, 1 << 20)),
    shares=st.lists(st.sampled_from((0.0, 0.003, 0.05, 0.5, 4.0)), min_size=1, max_size=4),
    in_place=st.booleans(),
    misses=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_delta_pulls_between_random_layouts_are_exact(
    seed: int, num_sources: int, bucket_bytes: int, shares: list[float], in_place: bool, misses: list[bool]
) -> None:
    draw = random.Random(seed)
    model = Model(draw, num_tensors=draw.randint(1, 6))
    source, destination = model.layout("policy-0", num_sources), model.layout("rollout-0", 1)
    plan = make_plan(source, destination, bucket_bytes=bucket_bytes)
    full = model.full(0)
    transports = [draw.choice(SERVED) for _ in range(num_sources)]
    puller, live = Puller(destination), zeros(destination, 0)
    with publishers(source, transports, delta_versions=2) as made:
        try:
            for version, (share, missed) in enumerate(zip([0.0, *shares], [False, *misses], strict=False)):
                full = evolved(full, seed + version, share) if version else full
                offer = publish(made, source, version, full)
                if missed:
                    continue
                puller.pull(offer, plan, deadline_s=DEADLINE_S, into=live if in_place else None)
                if not in_place:
                    puller.switch(live)
                assert equal(live, local(destination, 0, full))
                assert puller.attest(live, offer) == offer.root
        finally:
            puller.close()


PIECE = ShardPiece(names=("a",), dtype="uint16", box=Box(offset=(0,), size=(100_000,)))


def history_of(num_versions: int, limit_bytes: int = 1 << 30) -> tuple[DeltaHistory, list[np.ndarray]]:
    """Five versions of a piece of which 1 % changes each time, versions 0 to 4 in snapshots 1 to 5."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1 << 16, 100_000, np.uint16)]
    history = DeltaHistory([PIECE], num_versions, limit_bytes, lambda snapshot: snapshot >= len(arrays) - 1)
    history.begin(1, 0, -1)
    for version in range(1, 5):
        new = arrays[-1].copy()
        new[rng.integers(0, len(new), 1000)] ^= 1
        arrays.append(new)
        history.begin(version + 1, version, version - 1)
        assert not history.ready(version + 1, [(0, PIECE.box)])
        assert history.compare([arrays[-2]], [new], lambda: False, lambda: None) is not None
        assert history.ready(version + 1, [(0, PIECE.box)])
    return history, arrays


def test_cuts_for_boxes_that_a_reader_makes_up_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.weightsync.publisher.delta_history.MIN_CUT_BYTES", 0, raising=False)
    limit = 1 << 17
    history, _ = history_of(3, limit)
    boxes = [Box(offset=(begin,), size=(20_000,)) for begin in range(500)]
    found = [history.delta(5, 0, box, 3) for box in boxes]
    assert found[0] is not None
    assert history.cached_delta(5, 0, boxes[0], 3) is found[0]
    assert found[-1] is None  # the whole box is sent
    assert sum(data.nbytes for data in found if data is not None) <= limit
    assert history.delta(4, 0, boxes[-1], 2) is not None


def test_history_keeps_the_given_number_of_versions() -> None:
    history, _ = history_of(3)
    assert history.bases(5) == (1, 2, 3)
    assert history.bases(4) == (1, 2)
    assert history.bases(1) == ()  # a snapshot that is gone
    found = [history.delta(5, 0, PIECE.box, base) for base in range(5)]
    assert [data is not None for data in found] == [False, True, True, True, False]
    sizes = [data.nbytes for data in found if data is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert history.cached_delta(5, 0, PIECE.box, 3) is found[3]
    assert history.cached_delta(5, 0, Box(offset=(0,), size=(5,)), 3) is None


def test_history_respects_its_memory_limit() -> None:
    history, _ = history_of(4, limit_bytes=10_000)
    assert 0 < len(history.bases(5)) < 4


def test_missing_step_ends_the_chain() -> None:
    history, arrays = history_of(4)
    history.begin(6, 5, 4)
    assert history.bases(6) == (1, 2, 3, 4)
    assert history.compare([arrays[4]], [arrays[4]], lambda: True, lambda: None) is None
    assert history.bases(6) == ()
    assert history.delta(6, 0, PIECE.box, 4) is None


ROWS = ShardPiece(names=("m",), dtype="uint16", box=Box(offset=(2, 3), size=(8, MIN_PART_BYTES)))


def rows(first: int, num: int) -> Box:
    return Box(offset=(first, 3), size=(num, MIN_PART_BYTES))


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ([], [ROWS.box]),
        ([ROWS.box], [ROWS.box]),
        ([rows(6, 4), rows(2, 4)], [rows(2, 4), rows(6, 4)]),
        ([rows(3, 2), rows(7, 1)], [rows(2, 1), rows(3, 2), rows(5, 2), rows(7, 1), rows(8, 2)]),
        ([rows(2, 4), rows(5, 5)], [ROWS.box]),  # two kinds of readers
        ([Box(offset=(2, 3), size=(8, 10))], [ROWS.box]),  # columns
    ],
)
def test_piece_is_compared_in_the_requested_runs_of_rows(requested: list[Box], expected: list[Box]) -> None:
    assert parts_of(ROWS, requested) == tuple(expected)


def test_small_pieces_and_scalars_are_compared_whole() -> None:
    small = ShardPiece(names=("m",), dtype="uint16", box=Box(offset=(0,), size=(MIN_PART_BYTES // 2,)))
    assert parts_of(small, [Box(offset=(0,), size=(5,))]) == (small.box,)
    scalar = ShardPiece(names=("s",), dtype="uint16", box=Box(offset=(), size=()))
    assert parts_of(scalar, [scalar.box]) == (scalar.box,)
    assert parts_of(ShardPiece(names=("e",), dtype="uint16", box=Box(offset=(0,), size=(0,))), []) == ()


def test_compared_parts_are_available_before_the_rest() -> None:
    first, second = rows(2, 4), rows(6, 4)
    step = DeltaStep(0, 1, [[first, second]])
    step.add(0, DeltaPart(first, None, None))
    assert [step.is_compared(0, box) for box in (first, rows(3, 2), second, ROWS.box)] == [True, True, False, False]
    step.add(0, DeltaPart(second, None, None))
    assert step.is_compared(0, ROWS.box)
    assert step.part(0, ROWS.box) is None


def test_requested_parts_are_compared_next_and_boxes_across_them_travel_whole() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1 << 16, ROWS.box.size, np.uint16)]
    history = DeltaHistory([ROWS], 2, 1 << 30, lambda _: True)
    history.begin(1, 0, -1)
    halves = [rows(2, 4), rows(6, 4)]
    for version in range(1, 3):
        new = arrays[-1].copy()
        new[:, :: 100 + version] ^= 1
        arrays.append(new)
        history.begin(version + 1, version, version - 1)
        assert not history.ready(version + 1, [(0, halves[0])])
        total = history.compare([arrays[-2]], [new], lambda: False, lambda: None)
        assert total is not None
        assert sum(total.num_pieces.values()) == version
        assert all(history.delta(version + 1, 0, half, version - 1) is not None for half in halves)
    assert history.delta(3, 0, ROWS.box, 1) is None
    for half, begin in zip(halves, (0, 4), strict=True):
        data = history.delta(3, 0, half, 0)  # a chain of a part that is cut and of one that is not
        assert data is not None
        held = arrays[0][begin : begin + 4].copy()
        apply_box(data, held)
        np.testing.assert_array_equal(held, arrays[2][begin : begin + 4])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"encoded": (5, 6)}, "2 deltas of 1 boxes"),
        ({"encoded": (-1,)}, "malformed request"),
        ({"base": -1}, "malformed request"),
    ],
)
def test_malformed_request_for_deltas_is_refused(change: dict[str, object], sentence: str) -> None:
    whole = ReadBoxes(number=1, tag=1, segments=(1,), boxes=(PIECE,), digests="full", salt=0)
    with pytest.raises(WeightsError, match=sentence):
        decode_request(with_checksum(msgspec.msgpack.encode(msgspec.structs.replace(whole, **change))))
    with pytest.raises(WeightsError, match="0 boxes"):
        decode_request(with_checksum(msgspec.msgpack.encode(MeasureDeltas(number=1, base=0, boxes=()))))
