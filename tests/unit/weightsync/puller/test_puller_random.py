"""Pulls between random layouts: exact, within the planned memory, and every flipped bit is detected."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from puller_models import Model, equal, local, publish, publishers, zeros
from transport_peers import served_transports

from starling.weightsync.costs.estimate import destination_peak
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.puller.puller import Puller

torch.set_num_threads(1)
DEADLINE_S = 30.0
TRANSPORTS: tuple[Transport, ...] = ("local", *served_transports())


@examples(15, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_sources=st.integers(1, 4),
    num_destinations=st.integers(1, 3),
    bucket_bytes=st.sampled_from((256, 4096, 1 << 20)),
    copies=st.booleans(),
    in_place=st.booleans(),
)
def test_pull_between_random_layouts_is_exact(
    seed: int, num_sources: int, num_destinations: int, bucket_bytes: int, copies: bool, in_place: bool
) -> None:
    draw = random.Random(seed)
    model = Model(draw, num_tensors=draw.randint(1, 8))
    source = model.layout("policy-0", num_sources, copies=copies)
    destination = model.layout("rollout-0", num_destinations)
    plan = make_plan(source, destination, bucket_bytes=bucket_bytes)
    with publishers(source, [draw.choice(TRANSPORTS) for _ in range(num_sources)]) as made:
        pullers = [Puller(destination, rank=rank) for rank in range(num_destinations)]
        lives = [zeros(destination, rank) for rank in range(num_destinations)]
        try:
            for version in range(2):
                full = model.full(version)
                offer = publish(made, source, version, full)
                for rank, (puller, live) in enumerate(zip(pullers, lives, strict=True)):
                    report = puller.pull(offer, plan, deadline_s=DEADLINE_S, into=live if in_place else None)
                    if not in_place:
                        puller.switch(live)
                    assert equal(live, local(destination, rank, full))
                    assert puller.attest(live, offer) == offer.root
                    assert report.size_bytes == sum(bucket.size_bytes for bucket in plan.of_destination(rank))
                    assert sum(report.bytes_by_source.values()) == report.size_bytes
                    assert {read.address: read.num_bytes for read in report.reads} == report.bytes_by_source
                    assert all(0 < read.seconds <= report.seconds for read in report.reads)
                    peak = destination_peak(
                        plan, destination, rank, bounding_transport(offer, plan, rank), in_place=in_place
                    )
                    assert report.buffer_bytes == peak.scratch_bytes <= plan.peak_bytes(rank, in_place=True)
                    assert report.num_retries == 0
                    flip(draw, live)
                    assert not any(x.numel() for x in live.values()) or puller.attest(live, offer) != offer.root
        finally:
            for puller in pullers:
                puller.close()


def bounding_transport(offer: Offer, plan: Plan, rank: int) -> Transport:
    """Return `local` where all possible sources are, else `tcp`, which needs as many buffers as any other transport."""
    holds = {offer.ranks[bucket.source_rank].holds for bucket in plan.of_destination(rank)}
    found = {other.transport for other in offer.ranks if other.holds in holds}
    return "local" if found <= {"local"} else "tcp"


def flip(draw: random.Random, live: dict[str, torch.Tensor]) -> None:
    """Flip one bit of one element."""
    filled = [tensor for tensor in live.values() if tensor.numel()]
    if filled:
        raw = draw.choice(filled).view(-1).view(torch.uint8)
        raw[draw.randrange(raw.numel())] ^= 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("digests", ["sampled", "off"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sampled_and_disabled_digests_detect_less(transport: Transport, digests: str) -> None:
    model = Model(random.Random(5), num_tensors=6)
    source, destination = model.layout("policy-0", 2), model.layout("rollout-0", 1)
    plan = make_plan(source, destination, bucket_bytes=2048)
    live = zeros(destination, 0)
    with publishers(source, [transport] * 2) as made:
        puller = Puller(destination, digests=digests)  # type: ignore[arg-type]
        for version in range(3):
            offer = publish(made, source, version, model.full(version))
            puller.pull(offer, plan, deadline_s=DEADLINE_S)
            puller.switch(live)
            assert puller.attest(live, offer) == offer.root
        for tensor in live.values():
            tensor.view(-1).view(torch.uint8).bitwise_xor_(1)
        assert (puller.attest(live, offer) == offer.root) is (digests == "off")
        puller.close()
