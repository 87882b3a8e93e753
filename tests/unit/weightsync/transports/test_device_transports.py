"""Transports between memory of devices: sent or fetched from there, and received there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_sources import PIECES, DeviceSource
from transport_peers import piece, reader, served_transports
from weights_peers import ANSWER_S, blank, same, source, weights

from starling.weightsync.memory.device_memory import SnapshotPolicy
from starling.weightsync.offers.offer import Transport
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller import puller as pulling
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

TRANSPORTS = [transport for transport in served_transports() if transport in ("ucx", "nixl")]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contiguous_boxes_are_sent_from_the_device_and_others_are_packed(transport: Transport) -> None:
    boxes = [PIECES[0], piece("w", "uint8", (7, 1000)), piece("x", "uint8", (10, 20), (0, 64)), PIECES[1]]
    strided = piece("x", "uint8", (0, 300), (3, 9))
    there = DeviceSource(transport)
    with reader(transport) as made:
        assert not made.connect(there.offer).reason
        for _ in range(3):
            answer, arrays = made.read([*boxes, strided])
            assert not answer.reason
            assert [np.unique(array).tolist() for array in arrays] == [[2]] * 4 + [[1]]
    there.close()
    assert not there.server.failure


@pytest.mark.sample(1)
@pytest.mark.system
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("snapshots", ["host", "device"])
def test_boxes_are_received_straight_by_tensors_that_numpy_does_not_reach(
    snapshots: SnapshotPolicy, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GPU; small and strided ones arrive by way of a buffer."""
    monkeypatch.setattr(pulling, "array_of", lambda tensor: None)
    placed: list[torch.Size] = []
    place = pulling.place_array

    def noted(tensor: torch.Tensor, array: np.ndarray) -> None:
        placed.append(tensor.shape)
        place(tensor, array)

    monkeypatch.setattr(pulling, "place_array", noted)
    engine = blank()
    engine["odd"] = torch.zeros(7, 13, 22)[:, :, ::2]
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with source(transport, snapshots=snapshots) as peer:
        plan = make_plan(peer.layout, wanted)
        for version in range(3):
            offer = peer.publish()
            puller.pull(offer, plan, deadline_s=ANSWER_S, into=engine)
            assert puller.attest(engine, offer) == offer.root
            assert same(engine, weights(version))
        puller.close()
        assert peer.end() == 0
    assert torch.Size((7, 13, 11)) in placed
    assert engine["large"].shape not in placed
