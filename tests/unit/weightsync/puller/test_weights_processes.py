"""Weights between real processes, with killed, stopped and slow peers."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from transport_peers import needs_nixl
from weights_peers import ANSWER_S, BUCKET_BYTES, Source, blank, die_reading, same, source, weights

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.layout import encode
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

torch.set_num_threads(1)
pytestmark = pytest.mark.system


@pytest.fixture(scope="module", params=["ucx", "local", "tcp", pytest.param("nixl", marks=needs_nixl)])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "ucx":
        pytest.importorskip("ucxx")
    return request.param


@pytest.fixture(scope="module")
def peer(transport: Transport) -> Iterator[Source]:
    with source(transport) as running:
        yield running
        assert running.end() == 0


class Rollout:
    """A destination in this process."""

    def __init__(self, peer: Source) -> None:
        self.tensors = blank()
        layout = layout_of(self.tensors, "rollout-0")
        self.plan: Plan = make_plan(peer.layout, layout, bucket_bytes=BUCKET_BYTES)
        self.puller = Puller(layout)

    def pull(self, offer: Offer, deadline_s: float = ANSWER_S, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.puller.pull(offer, self.plan, deadline_s=deadline_s, cancelled=cancelled)

    def adopt(self, offer: Offer) -> None:
        self.pull(offer)
        self.puller.switch(self.tensors)

    def halfway(self, act: Callable[[], object]) -> Callable[[], bool]:
        """Return a `cancelled` callback that calls `act` once, when some buckets have arrived and others have not."""
        done: list[object] = []

        def asked() -> bool:
            if not done and self.puller._staging is not None and self.puller._staging.any():
                done.append(act())
            return False

        return asked


@pytest.fixture
def rollout(peer: Source) -> Iterator[Rollout]:
    made = Rollout(peer)
    yield made
    made.puller.close()


def shared_files() -> set[str]:
    """Return the names in /dev/shm that UCX or this code may have created."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "starling"))}


@pytest.mark.sample(1)
def test_every_version_arrives_bit_exact(peer: Source, rollout: Rollout) -> None:
    assert rollout.puller.state == "stale"
    for _ in range(3):
        offer = peer.publish()
        rollout.pull(offer)
        assert (rollout.puller.state, rollout.puller.version) == ("staged", offer.version - 1 if _ else -1)
        assert rollout.puller.switch(rollout.tensors) == offer.version == rollout.puller.version
        assert rollout.puller.state == "current"
        assert same(rollout.tensors, weights(offer.version))
        assert rollout.puller.attest(rollout.tensors, offer) == offer.root


def test_attest_detects_a_single_flipped_bit(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    rollout.adopt(offer)
    rollout.tensors["counts"][77] ^= 1
    assert rollout.puller.attest(rollout.tensors, offer) != offer.root


def test_report_counts_what_was_moved(peer: Source, transport: Transport, rollout: Rollout) -> None:
    report = rollout.puller.pull(peer.publish(), rollout.plan, deadline_s=ANSWER_S)
    assert (report.transport, report.size_bytes) == (transport, rollout.plan.total_bytes)
    assert report.num_buckets == len(rollout.plan.buckets) > 10


def test_wrong_token_is_refused(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    forged = msgspec.structs.replace(offer.ranks[0], secret="0" * 32)
    with pytest.raises(WeightsError, match=r"ticket for snapshot .* is wrong"):
        rollout.pull(msgspec.structs.replace(offer, ranks=(forged,)))
    assert rollout.puller.state == "stale"
    rollout.adopt(offer)
    assert same(rollout.tensors, weights(offer.version))


def test_overwritten_version_is_refused(peer: Source, rollout: Rollout) -> None:
    old = peer.publish()
    peer.publish()
    newest = peer.publish()
    with pytest.raises(WeightsError, match="is gone"):
        rollout.pull(old)
    rollout.adopt(newest)
    assert rollout.puller.attest(rollout.tensors, newest) == newest.root


def test_inconsistent_root_of_an_offer_is_refused(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    rollout.adopt(offer)
    offer = peer.publish()
    rank = msgspec.structs.replace(offer.ranks[0], root="0" * 32)
    with pytest.raises(WeightsError, match="does not follow from its ranks"):
        rollout.pull(msgspec.structs.replace(offer, ranks=(rank,)))
    assert same(rollout.tensors, weights(offer.version - 1))


def test_cancelled_pull_keeps_the_old_version(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    rollout.adopt(offer)
    newer = peer.publish()
    with pytest.raises(WeightsError, match="Cancelled while"):
        rollout.pull(newer, cancelled=lambda: True)
    assert (rollout.puller.state, rollout.puller.version) == ("stale", offer.version)
    assert same(rollout.tensors, weights(offer.version))
    rollout.adopt(newer)
    assert same(rollout.tensors, weights(newer.version))


def test_second_concurrent_pull_is_refused(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()

    def again() -> None:
        with pytest.raises(WeightsError, match="Another pull"):
            rollout.pull(offer)

    rollout.pull(offer, cancelled=rollout.halfway(again))
    assert rollout.puller.state == "staged"


def test_leased_snapshot_is_not_overwritten(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    rollout.pull(offer, cancelled=rollout.halfway(lambda: [peer.publish() for _ in range(3)]))
    rollout.puller.switch(rollout.tensors)
    assert same(rollout.tensors, weights(offer.version))


@pytest.mark.sample(1)
def test_reader_killed_in_mid_read_affects_no_other(peer: Source, rollout: Rollout) -> None:
    offer = peer.publish()
    victim = mp.get_context("forkserver").Process(target=die_reading, args=(encode(peer.layout), encode(offer)))
    victim.start()
    victim.join(ANSWER_S)
    assert victim.exitcode == -signal.SIGKILL
    for _ in range(3):  # both slots, more than once: a lease that outlived its holder would block
        newest = peer.publish()
        rollout.adopt(newest)
        assert same(rollout.tensors, weights(newest.version))


@pytest.mark.campaign
def test_environment_cannot_override_required_ucx_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ucxx")
    monkeypatch.setenv("UCX_RCACHE_ENABLE", "n")  # without it, a reader's death crashes the source
    with source("ucx", start_method="spawn") as peer:
        rollout = Rollout(peer)
        test_reader_killed_in_mid_read_affects_no_other(peer, rollout)
        rollout.puller.close()
        assert peer.end() == 0


@pytest.mark.sample(1)
def test_slow_reader_is_revoked(transport: Transport) -> None:
    with source(transport, read_timeout_s=0.02) as peer:
        slow, slower = Rollout(peer), Rollout(peer)
        first = peer.publish()
        second: list[Offer] = []

        def hold_both() -> None:
            second.append(peer.publish())
            slower.pull(second[0], cancelled=slower.halfway(peer.publish))

        with pytest.raises(WeightsError, match="was revoked while it was read"):
            slow.pull(first, cancelled=slow.halfway(hold_both))
        assert slow.puller.state == "stale"
        slower.puller.switch(slower.tensors)
        assert same(slower.tensors, weights(second[0].version))
        slow.adopt(peer.publish())
        assert same(slow.tensors, weights(peer.version))
        for each in (slow, slower):
            each.puller.close()


def test_source_stopped_or_killed_in_mid_read_fails_the_pull() -> None:
    pytest.importorskip("ucxx")
    before = shared_files()
    with source("ucx") as peer:
        rollout = Rollout(peer)
        first = peer.publish()
        rollout.adopt(first)
        with pytest.raises(WeightsError, match=r"The deadline of 0\.5 s passed"):
            rollout.pull(peer.publish(), 0.5, rollout.halfway(lambda: peer.signal(signal.SIGSTOP)))
        assert (rollout.puller.state, rollout.puller.version) == ("stale", first.version)
        assert same(rollout.tensors, weights(first.version))
        peer.signal(signal.SIGCONT)
        second = peer.publish()
        rollout.adopt(second)
        with pytest.raises(WeightsError, match=r"connection to .* broke"):
            rollout.pull(peer.publish(), ANSWER_S, rollout.halfway(lambda: peer.signal(signal.SIGKILL)))
        assert same(rollout.tensors, weights(second.version))
        with pytest.raises(WeightsError, match=r"connection to .* broke|No connection"):
            rollout.pull(second)
        rollout.puller.close()
    assert shared_files() <= before


def test_mapped_snapshot_outlives_its_source() -> None:
    before = shared_files()
    with source("local") as peer:
        rollout = Rollout(peer)
        stopped = peer.publish()
        rollout.pull(stopped, cancelled=rollout.halfway(lambda: peer.signal(signal.SIGSTOP)))
        rollout.puller.switch(rollout.tensors)
        assert same(rollout.tensors, weights(stopped.version))
        peer.signal(signal.SIGCONT)
        orphan = peer.publish()
        rollout.pull(
            orphan, cancelled=rollout.halfway(lambda: (peer.signal(signal.SIGKILL), peer.process.join(ANSWER_S)))
        )
        rollout.puller.switch(rollout.tensors)
        assert same(rollout.tensors, weights(orphan.version))
        rollout.puller.close()
        with pytest.raises(WeightsError, match="did its process end"):
            rollout.pull(orphan)
    assert shared_files() <= before
