"""UCX and memory of devices: what is sent from there, and what is received there; with closed pages of a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transport_peers import ServedSource, piece, read_target, reader
from weights_peers import ANSWER_S, blank, same, source, weights

from starling.common.errors import WeightsError
from starling.weightsync.memory.protected_pages import SharedPages
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller import puller as pulling
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.ucx.device import exposed, register, unregister
from starling.weightsync.transports.ucx.server import UcxServer
from starling.weightsync.transports.ucx.worker import UcxWorker, has_ucx

pytestmark = pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")

SIZE = 8 << 20
PIECES = (piece("w", "uint8", (0, SIZE)), piece("x", "uint8", (0, 300), (0, 64)))
EXTENT = SIZE + 300 * 64


class DeviceSource(ServedSource):
    """A source over UCX whose snapshots are on a device, too, with other bits: what is sent from there shows."""

    def __init__(self) -> None:
        self.memory = SharedPages(EXTENT)
        with self.memory.opened() as flat:
            flat[:] = 2
        super().__init__("ucx", PIECES)
        self.source.device_memory = lambda _: self.memory

    def publish(self) -> RankOffer:
        slot = self.arena.claim(0.0)
        self.arena.slots[slot][:EXTENT] = 1
        snapshot, secret = self.arena.commit(slot, self.memory.handle)
        return self.serving.offer(rank=0, snapshot=snapshot, secret=secret, holds="", root="")

    @property
    def worker(self) -> UcxWorker:
        assert isinstance(self.server, UcxServer)
        return self.server.worker

    def close(self) -> None:
        super().close()
        self.memory.free()


@pytest.fixture
def there() -> Iterator[DeviceSource]:
    made = DeviceSource()
    yield made
    made.close()


def test_contiguous_boxes_are_sent_from_the_device_and_others_are_packed(there: DeviceSource) -> None:
    boxes = [PIECES[0], piece("w", "uint8", (7, 1000)), piece("x", "uint8", (10, 20), (0, 64)), PIECES[1]]
    strided = piece("x", "uint8", (0, 300), (3, 9))
    with reader("ucx") as made:
        assert not made.connect(there.offer).reason
        for _ in range(3):
            answer, arrays = made.read([*boxes, strided])
            assert not answer.reason
            assert [np.unique(array).tolist() for array in arrays] == [[2]] * 4 + [[1]]
    assert len(there.worker._registered) == 1


def test_device_that_ucx_does_not_support_is_sent_from_the_host(
    there: DeviceSource, caplog: pytest.LogCaptureFixture
) -> None:
    there.worker.kinds = frozenset()
    with reader("ucx") as made, caplog.at_level(logging.WARNING):
        assert not made.connect(there.offer).reason
        for _ in range(3):
            assert np.unique(made.read([PIECES[0]])[1][0]).tolist() == [1]
    assert caplog.text.count("this UCX has no support for 'cpu' memory") == 1


def test_memory_is_closed_after_the_last_message(there: DeviceSource) -> None:
    """Also that of a reader who leaves in between: the pages are inaccessible, and UCX must not touch them then."""
    for _ in range(4):
        with reader("ucx") as made:
            made.connect(there.offer)
            array = np.zeros(SIZE, np.uint8)

            for _ in range(4):
                made.client.ask("source", made.request([PIECES[0]]), read_target([array]))
            made.client.drop("source")
    with reader("ucx") as made:
        assert not made.connect(there.offer).reason
        assert np.unique(made.read([PIECES[0]])[1][0]).tolist() == [2]
        assert not made.release().reason
    there.close()
    assert there.memory._num_open == 0
    assert not there.server.failure


def test_freed_memory_ends_the_connection_and_not_the_server(there: DeviceSource) -> None:
    with reader("ucx") as made:
        assert not made.connect(there.offer).reason
        there.memory.free()
        made.client.ask("source", made.request([PIECES[0]]), read_target([np.zeros(SIZE, np.uint8)]))
        assert made.event() is not None
    there.source.device_memory = lambda _: None
    with reader("ucx") as made:
        assert not made.connect(there.publish()).reason
        assert np.unique(made.read([PIECES[0]])[1][0]).tolist() == [1]


def test_memory_of_devices_is_flat_bytes() -> None:
    class Faked:
        def __init__(self, **changes: object) -> None:
            self.__cuda_array_interface__ = {"shape": (4,), "typestr": "|u1", "data": (0, False), **changes}

    memory = Faked()
    assert exposed(memory) is memory
    assert exposed(torch.zeros(4, dtype=torch.uint8)).nbytes == 4
    for wrong in (
        Faked(shape=(2, 2)),
        Faked(typestr="<f4"),
        Faked(strides=(2,)),
        torch.zeros(4),
        np.zeros((2, 2), "u1"),
    ):
        with pytest.raises(WeightsError, match="UCX moves flat bytes, not"):
            exposed(wrong)


def test_worker_asks_ucx_which_memory_it_supports() -> None:
    worker = UcxWorker(host="127.0.0.1")
    assert ("cuda" in worker.kinds) == torch.cuda.is_available()
    assert "cpu" in worker.kinds
    memory = SharedPages(1 << 20)
    with memory.opened() as flat:
        mapped = register(int(worker._context.handle), flat, "cpu")
        unregister(int(worker._context.handle), mapped)
    memory.free()
    worker.close()


@pytest.mark.system
@pytest.mark.parametrize("snapshots", ["host", "device"])
def test_boxes_are_received_straight_by_tensors_that_numpy_does_not_reach(
    snapshots: str, monkeypatch: pytest.MonkeyPatch
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
    with source("ucx", snapshots=snapshots) as peer:  # type: ignore[arg-type]
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
