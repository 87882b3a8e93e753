"""UCX and memory of devices: what is sent from there, and what is received there; with closed pages of a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_sources import PIECES, SIZE, DeviceSource
from transport_peers import read_target, reader

from starling.common.errors import WeightsError
from starling.weightsync.memory.protected_pages import SharedPages
from starling.weightsync.transports.ucx.device import exposed, register, unregister
from starling.weightsync.transports.ucx.server import UcxServer
from starling.weightsync.transports.ucx.worker import UcxWorker, has_ucx

pytestmark = pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")


def worker_of(source: DeviceSource) -> UcxWorker:
    assert isinstance(source.server, UcxServer)
    return source.server.worker


@pytest.fixture
def there() -> Iterator[DeviceSource]:
    made = DeviceSource("ucx")
    yield made
    made.close()


def test_device_that_ucx_does_not_support_is_sent_from_the_host(
    there: DeviceSource, caplog: pytest.LogCaptureFixture
) -> None:
    worker_of(there).kinds = frozenset()
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
        assert len(worker_of(there)._registered) == 1
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
    assert "cpu" in worker.kinds
    assert "cuda" not in worker.kinds or torch.cuda.is_available()
    memory = SharedPages(1 << 20)
    with memory.opened() as flat:
        mapped = register(int(worker._context.handle), flat, "cpu")
        unregister(int(worker._context.handle), mapped)
    memory.free()
    worker.close()
