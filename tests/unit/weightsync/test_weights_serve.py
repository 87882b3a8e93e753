"""What strangers may ask of a source over UCX: nothing without a token, nothing outside the snapshot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from weights_peers import blank, same, weights

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import Deadline
from starling.weightsync.execute.layouts import layout_of
from starling.weightsync.execute.publish import Publisher
from starling.weightsync.execute.pull import Puller
from starling.weightsync.execute.regions import BucketRead, Region
from starling.weightsync.execute.requests import REQUEST_BYTES
from starling.weightsync.execute.ucx import UcxReader
from starling.weightsync.offer import Offer
from starling.weightsync.plan import make_plan

torch.set_num_threads(1)
pytest.importorskip("ucxx")
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def served() -> Iterator[Offer]:
    with Publisher(layout_of(weights(0), "policy-0"), transport="ucx") as publisher:
        yield publisher.publish(0, weights(0))


def stray(size: int, *, offset: int = 0, strides: tuple[int, ...] = (1,)) -> BucketRead:
    region = Region(offset, 1, (size,), strides)
    return BucketRead(source_rank=0, sources=(region,), destinations=(Region(0, 1, (8,), (1,)),))


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (stray(8, offset=1 << 40), "outside the snapshot"),
        (stray(8, strides=(1 << 40,)), "outside the snapshot"),
        (stray(1 << 50), "outside the snapshot"),
        (stray(1 << 50, strides=(0,)), "repeats bytes"),
        (stray(8, offset=-1), "malformed region"),
        (stray(8, strides=(1, 1)), "malformed region"),
    ],
)
def test_a_read_outside_the_snapshot_is_refused(served: Offer, read: BucketRead, sentence: str) -> None:
    offer = served.ranks[0]
    reader = UcxReader(offer.address)
    staging = torch.zeros(8, dtype=torch.uint8).numpy()
    try:
        reader.open(offer, Deadline(DEADLINE_S))
        with pytest.raises(WeightsError, match=sentence):
            reader.read(read, staging, Deadline(DEADLINE_S))
    finally:
        reader.close()


def test_nothing_is_read_before_the_token(served: Offer) -> None:
    reader = UcxReader(served.ranks[0].address)
    with pytest.raises(WeightsError, match="open a snapshot with its token first"):
        reader.read(stray(8), torch.zeros(8, dtype=torch.uint8).numpy(), Deadline(DEADLINE_S))
    reader.close()
    reader.close()


@pytest.mark.parametrize("excess", [0, 1])
def test_garbage_does_not_end_the_server(served: Offer, excess: int) -> None:
    offer = served
    host, _, port = offer.ranks[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as plain:
        plain.sendall(os.urandom(4096))
    reader = UcxReader(offer.ranks[0].address)
    assert reader._link is not None
    reader.open(offer.ranks[0], Deadline(DEADLINE_S))
    assert reader._request_tag is not None
    garbage = np.full(REQUEST_BYTES + excess, 0xC1, np.uint8)
    sent = reader._link.send(reader._endpoint, garbage, reader._request_tag)
    with pytest.raises(WeightsError, match=r"broke|malformed"):
        reader.confirm(Deadline(DEADLINE_S))
    assert sent.completed
    reader.close()
    live = blank()
    mine = layout_of(live, "rollout-0")
    puller = Puller(mine)
    puller.pull(offer, make_plan(layout_of(weights(0), "policy-0"), mine), deadline_s=DEADLINE_S)
    puller.switch(live)
    assert same(live, weights(0))
    puller.close()
