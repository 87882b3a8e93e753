"""Failing pulls: fallback sources, retries, clear errors, and never half a version undetected."""

from __future__ import annotations

import multiprocessing as mp
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from puller_models import Model, Storages, equal, local, publish, publishers, zeros
from transport_peers import served_transports

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import SnapshotsBusyError
from starling.weightsync.offers.offer import Offer, Transport, make_offer
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullProgress, PullReport
from starling.weightsync.transports.endpoints import ServingOptions

torch.set_num_threads(1)
DEADLINE_S = 30.0
SERVED = served_transports()


class World:
    """Two policy ranks with the same content, and a rollout that needs half of each tensor."""

    def __init__(self, transport: Transport, *, copies: bool = True, seed: int = 3, longest: int = 60) -> None:
        self.model = Model(random.Random(seed), num_tensors=12, longest=longest)
        self.source = self.model.layout("policy-0", 2, copies=copies)
        self.destination: Layout = self.model.layout("rollout-0", 2)
        self.plan: Plan = make_plan(self.source, self.destination, bucket_bytes=1024)
        self.live: Storages = zeros(self.destination, 0)
        self._publishers = publishers(self.source, [transport] * 2)
        self.publishers = self._publishers.__enter__()
        self.puller = Puller(self.destination, stall_s=5.0)

    def publish(self, version: int) -> Offer:
        return publish(self.publishers, self.source, version, self.model.full(version))

    def pull(self, offer: Offer, **options: object) -> PullReport:
        return self.puller.pull(offer, self.plan, deadline_s=DEADLINE_S, **options)  # type: ignore[arg-type]

    def holds(self, version: int) -> bool:
        return equal(self.live, local(self.destination, 0, self.model.full(version)))

    def close(self) -> None:
        self.puller.close()
        self._publishers.__exit__(None, None, None)


@pytest.fixture(params=["local", *SERVED])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.mark.sample(2)
def test_lost_source_is_replaced_by_its_copy(world: World) -> None:
    offer = world.publish(0)
    world.publishers[0].close()
    report = world.pull(offer)
    world.puller.switch(world.live)
    assert world.holds(0)
    assert world.puller.attest(world.live, offer) == offer.root
    assert list(report.bytes_by_source) == [offer.ranks[1].address]


def test_refusing_source_is_replaced_by_its_copy(world: World) -> None:
    offer = world.publish(0)
    forged = msgspec.structs.replace(offer.ranks[0], secret="0" * 32)
    world.pull(msgspec.structs.replace(offer, ranks=(forged, offer.ranks[1])))
    world.puller.switch(world.live)
    assert world.holds(0)


@pytest.mark.sample(2)
def test_pull_without_fallback_names_the_reason(world: World) -> None:
    offer = world.publish(0)
    forged = tuple(msgspec.structs.replace(rank, secret="0" * 32) for rank in offer.ranks)
    with pytest.raises(WeightsError, match=r"The ticket for snapshot \d+ is wrong"):
        world.pull(msgspec.structs.replace(offer, ranks=forged))
    assert world.puller.state == "stale"
    world.pull(offer)
    world.puller.switch(world.live)
    assert world.holds(0)


def poison(publisher: Publisher) -> None:
    """Make a source send wrong digests, as if every payload were corrupted on the way."""
    publisher._digests._source.cache = lambda snapshot: WrongDigests()  # type: ignore[method-assign,assignment,return-value]


class WrongDigests:
    def get_or_compute(self, key: object, compute: Callable[[], bytes]) -> bytes:
        return bytes(b ^ 1 for b in compute())


@pytest.mark.parametrize("transport", SERVED)
def test_corrupted_box_is_requested_from_another_source(transport: Transport) -> None:
    world = World(transport)
    try:
        offer = world.publish(0)
        poison(world.publishers[0])
        report = world.pull(offer)
        assert report.num_retries > 0
        world.puller.switch(world.live)
        assert world.holds(0)
        assert world.puller.attest(world.live, offer) == offer.root
        poison(world.publishers[1])
        with pytest.raises(WeightsError, match=r"arrived from .* with another digest"):
            world.pull(offer)
        assert world.holds(0)
    finally:
        world.close()


def test_modified_shared_memory_is_detected() -> None:
    world = World("local")
    try:
        offer = world.publish(0)
        for publisher in world.publishers:
            for arrays in publisher._arrays:
                for array in arrays:
                    if array.size:
                        np.copyto(array, np.zeros_like(array))
        whole = world.model.layout("rollout-1", 1)
        puller = Puller(whole)
        with pytest.raises(WeightsError, match="has another digest than when it was published"):
            puller.pull(offer, make_plan(world.source, whole), deadline_s=DEADLINE_S)
        puller.close()
    finally:
        world.close()


@pytest.mark.sample(2)
def test_interrupted_pull_in_place_is_torn_until_repaired(world: World) -> None:
    offer = world.publish(0)
    world.pull(offer, into=world.live)
    assert (world.puller.state, world.puller.version) == ("current", 0)
    newer = world.publish(1)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4

    with pytest.raises(WeightsError, match="Cancelled while"):
        world.pull(newer, into=world.live, cancelled=cancelled)
    assert (world.puller.state, world.puller.version) == ("torn", -1)
    with pytest.raises(WeightsError, match="nothing to attest"):
        world.puller.attest(world.live, newer)
    with pytest.raises(WeightsError, match="no staged version"):
        world.puller.switch(world.live)
    world.pull(newer)
    assert world.puller.state == "staged"
    world.puller.switch(world.live)
    assert (world.puller.state, world.puller.version) == ("current", 1)
    assert world.holds(1)


def test_pull_in_place_frees_the_staging(world: World) -> None:
    world.pull(world.publish(0))
    world.pull(world.publish(1), into=world.live)
    assert world.puller._staging is None
    assert world.holds(1)
    world.pull(world.publish(2))
    world.puller.switch(world.live)
    assert world.holds(2)


def test_progress_grows_to_the_total(world: World) -> None:
    seen: list[PullProgress] = []
    world.pull(world.publish(0), progress=seen.append)
    done = [step.bytes_done for step in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, seen[-1].bytes_total)
    assert seen[-1].seconds_left == 0.0
    assert seen[-1].bytes_total == sum(bucket.size_bytes for bucket in world.plan.of_destination(0))


def test_too_small_buffer_pool_is_refused() -> None:
    world = World("tcp")
    try:
        puller = Puller(world.destination, buffer_bytes=64)
        with pytest.raises(WeightsError, match="pool of 64 bytes is too small"):
            puller.pull(world.publish(0), world.plan, deadline_s=DEADLINE_S)
        puller.close()
    finally:
        world.close()


def chain(pullers: list[Puller], offer: Offer, plan: Plan, announced: list[list[Offer]]) -> dict[int, PullReport]:
    """Pull with all pullers at once, each from the previous one; the last one begins first."""
    was_announced = [threading.Event() for _ in pullers]
    reports: dict[int, PullReport] = {}

    def run(number: int) -> None:
        def announce(mine: Offer) -> None:
            announced[number].append(mine)
            was_announced[number].set()

        if number:
            was_announced[number - 1].wait(DEADLINE_S)
        reports[number] = pullers[number].pull(
            offer,
            plan,
            deadline_s=DEADLINE_S,
            relays=announced[number - 1] if number else (),
            relays_first=True,
            announce=announce,
        )

    with ThreadPoolExecutor(len(pullers)) as pool:
        for done in [pool.submit(run, number) for number in reversed(range(len(pullers)))]:
            done.result(DEADLINE_S)
    return reports


@pytest.mark.sample(2)
@pytest.mark.parametrize(("transport", "encrypt"), [*((transport, False) for transport in SERVED), ("tcp", True)])
def test_chained_relays_each_read_from_the_previous_one(transport: Transport, encrypt: bool) -> None:
    """A relay serves while it receives: all pull at once, and the publisher sends one model."""
    world = World(transport, longest=100)
    whole = [world.model.layout(f"rollout-{number}", 1) for number in range(3)]
    plan = make_plan(world.source, whole[0], bucket_bytes=4096)
    pullers = [Puller(layout, serving=ServingOptions(transport, "127.0.0.1", encrypt)) for layout in whole]
    lives = [zeros(layout, 0) for layout in whole]
    try:
        for version in range(2):
            offer = world.publish(version)
            announced: list[list[Offer]] = [[] for _ in whole]
            reports = chain(pullers, offer, plan, announced)
            for number, (puller, live) in enumerate(zip(pullers, lives, strict=True)):
                puller.switch(live)
                assert equal(live, local(whole[number], 0, world.model.full(version)))
                assert puller.attest(live, offer) == offer.root
                if number:
                    assert not encrypt or reports[number].lanes == ("tcp+aes-gcm",)
                    assert list(reports[number].bytes_by_source) == [announced[number - 1][0].ranks[0].address]
    finally:
        for puller in pullers:
            puller.close()
        world.close()


@pytest.mark.parametrize("transport", SERVED)
def test_cancelled_relay_is_replaced_by_the_source(transport: Transport) -> None:
    world = World(transport)
    relay = Puller(world.destination, serving=ServingOptions(transport, "127.0.0.1"))
    try:
        offer = world.publish(0)
        announced: list[Offer] = []
        with pytest.raises(WeightsError, match="Cancelled"):
            relay.pull(
                offer,
                world.plan,
                deadline_s=DEADLINE_S,
                announce=announced.append,
                cancelled=lambda: bool(announced),
            )
        report = world.pull(offer, relays=announced, relays_first=True)
        assert announced[0].ranks[0].address not in report.bytes_by_source
        world.puller.switch(world.live)
        assert world.holds(0)
    finally:
        relay.close()
        world.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", SERVED)
def test_relay_that_fails_in_mid_transfer_leaves_what_has_arrived(transport: Transport) -> None:
    world = World(transport, longest=100)
    relay = Puller(world.destination, serving=ServingOptions(transport, "127.0.0.1"))
    reader = Puller(world.destination, stall_s=DEADLINE_S)  # leaves the relay because of its failure alone
    announced: list[Offer] = []
    was_announced, fails = threading.Event(), threading.Event()

    def announce(offer: Offer) -> None:
        announced.append(offer)
        was_announced.set()

    def asked_by_relay() -> bool:
        """Receive a part, with the bucket for which the reader waits first; wait until it has arrived, and fail."""
        return 0 in relay._sent and fails.wait(DEADLINE_S)

    def asked_by_reader() -> bool:
        if reader._sent:
            fails.set()
        return False

    try:
        offer = world.publish(0)
        with ThreadPoolExecutor(1) as pool:
            failing = pool.submit(
                relay.pull, offer, world.plan, deadline_s=DEADLINE_S, announce=announce, cancelled=asked_by_relay
            )
            assert was_announced.wait(DEADLINE_S)
            report = reader.pull(
                offer,
                world.plan,
                deadline_s=DEADLINE_S,
                relays=announced,
                relays_first=True,
                cancelled=asked_by_reader,
            )
            with pytest.raises(WeightsError, match="Cancelled"):
                failing.result(DEADLINE_S)
        relayed = report.bytes_by_source[announced[0].ranks[0].address]
        assert 0 < relayed < report.size_bytes
        assert sum(report.bytes_by_source.values()) == report.size_bytes
        reader.switch(world.live)
        assert world.holds(0)
        assert reader.attest(world.live, offer) == offer.root
    finally:
        fails.set()
        reader.close()
        relay.close()
        world.close()


@pytest.mark.sample(2)
def test_relay_of_another_version_is_refused(world: World) -> None:
    old = world.publish(0)
    with pytest.raises(WeightsError, match="A relay offers version 0, not 1"):
        world.pull(world.publish(1), relays=[old])


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_busy_publisher_waits_or_skips(when_busy: str) -> None:
    model = Model(random.Random(1), num_tensors=3)
    layout = model.layout("policy-0", 1)
    destination = model.layout("rollout-0", 1)
    plan = make_plan(layout, destination, bucket_bytes=256)
    live = zeros(destination, 0)
    publisher = Publisher(layout, transport="local", read_timeout_s=0.05, when_busy=when_busy)  # type: ignore[arg-type]
    first, second = Puller(destination), Puller(destination)
    offers = [publisher.publish(version, local(layout, 0, model.full(version))) for version in range(2)]

    def while_both_read() -> None:
        with pytest.raises(SnapshotsBusyError, match="is still being read"):
            publisher.publish(2, local(layout, 0, model.full(2)))

    def second_pull() -> None:
        second.pull(offers[1], plan, deadline_s=DEADLINE_S, cancelled=once(while_both_read, second))

    first.pull(offers[0], plan, deadline_s=DEADLINE_S, cancelled=once(second_pull, first))
    first.switch(live)
    assert equal(live, local(destination, 0, model.full(0)))
    third = publisher.publish(2, local(layout, 0, model.full(2)))
    second.pull(third, plan, deadline_s=DEADLINE_S)
    second.switch(live)
    assert equal(live, local(destination, 0, model.full(2)))
    for each in (first, second):
        each.close()
    publisher.close()


def once(act: Callable[[], None], puller: Puller) -> Callable[[], bool]:
    """Return a `cancelled` callback that calls `act` once, when a bucket has arrived."""
    done: list[bool] = []

    def asked() -> bool:
        if not done and puller._sent:
            done.append(True)
            act()
        return False

    return asked


def test_snapshot_returns_before_its_offer_is_ready() -> None:
    model = Model(random.Random(2), num_tensors=4)
    layout = model.layout("policy-0", 1)
    with Publisher(layout, transport="local") as publisher:
        publication = publisher.snapshot(4, local(layout, 0, model.full(0)))
        assert publication.version == publication.offer().version == 4
        assert publication.offer() == publication.offer()
    with pytest.raises(WeightsError, match="closed"):
        publisher.snapshot(6, local(layout, 0, model.full(0)))


def _end_in_the_midst_of_a_pull() -> None:
    world = World("tcp")
    world.pull(world.publish(0))
    offer = world.publish(1)
    main = threading.current_thread()
    threading.Thread(target=world.pull, args=(offer,), kwargs={"progress": lambda _: main.join()}).start()


def test_process_exits_during_a_pull() -> None:
    """After the end of the main thread, thread pools accept no more work."""
    process = mp.get_context("forkserver").Process(target=_end_in_the_midst_of_a_pull)
    process.start()
    process.join(2 * DEADLINE_S)
    has_ended = process.exitcode is not None
    process.kill()
    assert has_ended


@pytest.mark.parametrize("transport", SERVED)
def test_relay_that_names_the_address_of_the_source_does_not_take_its_place(transport: Transport) -> None:
    """Connections are kept by address: with the ticket for the relay the source would refuse."""
    world = World(transport)
    try:
        offer = world.publish(0)
        forged = msgspec.structs.replace(offer.ranks[0], secret="0" * 32)
        world.pull(offer, relays=[make_offer(0, [forged])], relays_first=True)
        world.puller.switch(world.live)
        assert world.holds(0)
    finally:
        world.close()


def test_shared_memory_relays_nothing() -> None:
    """Its readers would not wait for what has not arrived."""
    world, announced = World("tcp"), list[Offer]()
    relay = Puller(world.destination, serving=ServingOptions("local", ""))
    try:
        relay.pull(world.publish(0), world.plan, deadline_s=DEADLINE_S, announce=announced.append)
        assert not announced
    finally:
        relay.close()
        world.close()
