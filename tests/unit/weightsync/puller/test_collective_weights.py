"""Weights between two processes over collectives: gloo between CPUs, and NCCL between two GPUs (`make test-gpu`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from weights_peers import ANSWER_S, BUCKET_BYTES, Source, blank, same, source, weights

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Transport
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

pytestmark = pytest.mark.system


class Way(NamedTuple):
    """A transport between the devices of two processes."""

    transport: Transport
    there: str
    here: str

    def source(self) -> AbstractContextManager[Source]:
        method = "forkserver" if self.there == "cpu" else "spawn"
        return source(self.transport, start_method=method, device=self.there)

    def engine(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.here) for name, tensor in blank().items()}

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.here == "cpu" else torch.cuda.device(self.here)


TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs: not yet run here"),
]


@pytest.fixture(
    params=[Way("gloo", "cpu", "cpu"), pytest.param(Way("nccl", "cuda:1", "cuda:0"), marks=TWO_GPUS)],
    ids=lambda way: way.transport,
)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    chosen: Way = request.param
    with chosen.current():
        yield chosen


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return same({name: tensor.cpu() for name, tensor in tensors.items()}, weights(version))


@pytest.mark.parametrize("in_place", [False, True])
def test_versions_arrive_bit_for_bit(way: Way, in_place: bool) -> None:
    engine = way.engine()
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with way.source() as peer:
        plan = make_plan(peer.layout, wanted, bucket_bytes=BUCKET_BYTES)
        for version in range(3):
            offer = peer.publish()
            report = puller.pull(offer, plan, deadline_s=ANSWER_S, into=engine if in_place else None)
            if not in_place:
                puller.switch(engine)
            assert report.transport == way.transport
            assert puller.attest(engine, offer) == offer.root
            assert is_version(engine, version)
        puller.close()
        assert peer.end() == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_group_of_a_lost_source_is_aborted(way: Way, number: signal.Signals) -> None:
    """The reader fails by its deadline, keeps what it has, and reads from another source afterwards."""
    engine = way.engine()
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with way.source() as peer:
        plan = make_plan(peer.layout, wanted, bucket_bytes=BUCKET_BYTES)
        puller.pull(peer.publish(), plan, deadline_s=ANSWER_S)
        puller.switch(engine)
        offer = peer.publish()
        peer.signal(number)
        with pytest.raises(WeightsError):
            puller.pull(offer, plan, deadline_s=3.0)
        assert is_version(engine, 0)
    with way.source() as other:
        other.publish()
        puller.pull(other.publish(), plan, deadline_s=ANSWER_S)
        puller.switch(engine)
        assert is_version(engine, 1)
    puller.close()
