"""Policies of snapshots: every one publishes the same bits, and training may go on as soon as `snapshot` returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from covering import covering
from transport_peers import served_transports
from weights_peers import blank, publish_while_training, weights

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_memory import ROOM, CpuAllocator, SnapshotPolicy
from starling.weightsync.memory.protected_pages import ProtectedMemory, SharedPages
from starling.weightsync.offers.offer import Transport
from starling.weightsync.plan.layout import pieces_of
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.publisher.snapshot_writer import SnapshotWriter
from starling.weightsync.puller.puller import Puller
from starling.weightsync.quantise.layouts import received_layout
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.modules import layout_of

torch.set_num_threads(1)
DEADLINE_S = 30.0
GPU = torch.device("cuda")
TRANSPORTS: tuple[Transport, ...] = ("local", *served_transports())


@pytest.mark.parametrize(("transport", "policy"), covering(TRANSPORTS, ["auto", "device", "pinned", "host"]))
def test_training_goes_on_after_a_snapshot_of_any_policy(policy: SnapshotPolicy, transport: Transport) -> None:
    tensors, engine = weights(0), blank()
    layout, wanted = layout_of(tensors, "policy-0"), layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with Publisher(layout, transport=transport, snapshots=policy, delta_versions=2) as publisher:
        publish_while_training(publisher, puller, tensors, engine, weights)
    puller.close()


@pytest.mark.parametrize("policy", ["device", "host"])
def test_quantised_snapshot_of_any_policy_has_the_same_codes(policy: SnapshotPolicy) -> None:
    tensors = {"a.weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()}
    recipe = linear_weights("fp8_block")
    layout = layout_of(tensors, "policy-0")
    wanted = received_layout(layout_of(tensors, "rollout-0"), recipe)
    roots = []
    for chosen in (policy, "host"):
        with Publisher(layout, transport="tcp", snapshots=chosen, quantise=recipe) as publisher:
            offer = publisher.publish(1, tensors)
            with_plan = make_plan(publisher.layout, wanted)
            puller = Puller(wanted)
            puller.pull(offer, with_plan, deadline_s=DEADLINE_S)
            puller.close()
            roots.append(offer.root)
    assert roots[0] == roots[1]


# --- a device with rules of its own ----------------------------------------------------------------------------------


class BlockedMemory(ProtectedMemory):
    """Memory of a device whose copies to the host wait for a gate, and may fail."""

    def __init__(self, size_bytes: int, device: Device) -> None:
        super().__init__(size_bytes)
        self._device = device

    def copy_to(self, host: Memory) -> None:
        assert self._device.gate.wait(DEADLINE_S)
        if self._device.fails:
            raise WeightsError("The device has failed.")
        super().copy_to(host)

    def free(self) -> None:
        super().free()
        self._device.num_used -= 1


class Device(CpuAllocator):
    """A device with as much memory as a test says."""

    def __init__(self, available_bytes: int = 1 << 30) -> None:
        self.available, self.num_used, self.num_allocated, self.num_pinned = available_bytes, 0, 0, 0
        self.has_memory, self.may_pin, self.fails, self.shares = True, True, False, True
        self.gate = threading.Event()
        self.gate.set()

    def available_bytes(self) -> int:
        return self.available

    def allocate(self, size_bytes: int) -> BlockedMemory:
        if not self.has_memory:
            raise WeightsError(f"No {size_bytes} bytes of memory on this device.")
        self.num_used, self.num_allocated = self.num_used + 1, self.num_allocated + 1
        return BlockedMemory(size_bytes, self)

    def allocate_shared(self, size_bytes: int) -> SharedPages:
        if not self.shares:
            raise WeightsError("This device shares no memory.")
        return super().allocate_shared(size_bytes)

    def pin(self, memory: Memory) -> None:
        if not self.may_pin:
            raise WeightsError("This system locks no pages.")
        self.num_pinned += 1

    def unpin(self, memory: Memory) -> None:
        self.num_pinned -= 1


class Written:
    """A writer to an arena, and versions of one tensor."""

    def __init__(self, device: Device | None, policy: SnapshotPolicy, *, stays: bool = False) -> None:
        self.tensor = torch.arange(1000, dtype=torch.int32)
        layout = layout_of({"a": self.tensor}, "policy-0")
        self.arena = Arena(pieces_of(layout, 0))
        self.writer = SnapshotWriter(layout, 0, self.arena, policy, stays=stays, allocator_of=lambda _: device)

    def write(self, slot: int, value: int) -> object:
        self.tensor.fill_(value)
        return self.writer.write(slot, lambda views: views[0].copy_(self.tensor), GPU)

    def value(self, slot: int) -> int:
        values = np.unique(self.arena.slots[slot][:4000].view(np.int32))
        assert len(values) == 1
        return int(values[0])


@contextmanager
def written(device: Device | None, policy: SnapshotPolicy, *, stays: bool = False) -> Iterator[Written]:
    made = Written(device, policy, stays=stays)
    try:
        yield made
    finally:
        made.writer.close()
        made.arena.close()


def test_snapshot_moves_to_the_host_while_training_goes_on() -> None:
    device = Device()
    device.gate.clear()
    with written(device, "device") as made:
        assert made.write(0, 5) is not None
        made.tensor.fill_(99)
        assert (made.value(0), device.num_used) == (0, 1)
        device.gate.set()
        made.writer.settle()
        assert (made.value(0), device.num_used) == (5, 0)
        for version in range(6, 10):
            made.write(version % 2, version)
        made.writer.settle()
        assert (made.value(0), made.value(1), device.num_used, device.num_pinned) == (8, 9, 0, 0)


def test_gpu_is_used_by_itself_while_there_is_room() -> None:
    device = Device(available_bytes=ROOM * 4032)
    with written(device, "auto") as made:
        assert device.num_pinned == 0
        assert made.write(0, 1) is not None
        made.writer.settle()
        device.available -= 64
        assert made.write(1, 2) is None
        assert (made.value(0), made.value(1), device.num_allocated, device.num_pinned) == (1, 2, 1, 2)
    assert device.num_pinned == 0


@pytest.mark.parametrize("policy", ["auto", "device"])
def test_version_is_written_straight_to_the_host_where_the_device_has_no_memory(
    policy: SnapshotPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.has_memory = False
    with written(device, policy) as made, caplog.at_level(logging.WARNING):
        assert made.write(0, 3) is None
        assert made.value(0) == 3
    assert "training waits until a snapshot is in memory of the host: No " in caplog.text


def test_failed_move_fails_its_own_version_only() -> None:
    device = Device()
    device.fails = True
    with written(device, "device") as made:
        failed = made.write(0, 1)
        made.writer.settle()
        assert device.num_used == 0
        with pytest.raises(WeightsError, match="The device has failed"):
            failed.result()
        device.fails = False
        made.write(1, 2)
        made.writer.settle()
        assert made.value(1) == 2


def test_failed_fill_leaves_no_memory_on_the_device() -> None:
    def fails(_: object) -> None:
        raise WeightsError("cannot be quantised")

    device = Device()
    with written(device, "device") as made:
        with pytest.raises(WeightsError, match="cannot be quantised"):
            made.writer.write(0, fails, GPU)
        assert device.num_used == 0


def test_system_that_locks_no_pages_serves_all_but_the_policy_that_needs_them(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(available_bytes=0)
    device.may_pin = False
    with written(device, "auto") as made, caplog.at_level(logging.WARNING):
        assert made.write(0, 4) is None
        assert made.value(0) == 4
    assert "memory that is not locked: This system locks no pages." in caplog.text
    with written(device, "pinned") as made, pytest.raises(WeightsError, match="This system locks no pages"):
        made.write(0, 4)


def test_policy_that_is_not_available_is_refused_before_the_first_version() -> None:
    with written(None, "pinned") as made, pytest.raises(WeightsError, match=r"'cuda' tensors cannot be 'pinned'"):
        made.writer.prepare(GPU)
    device = Device()
    device.may_pin = False
    with written(device, "pinned") as made, pytest.raises(WeightsError, match="This system locks no pages"):
        made.writer.prepare(GPU)


def test_device_without_an_allocator_is_copied_from_directly() -> None:
    with written(None, "auto") as made:
        assert made.write(0, 6) is None
        assert made.value(0) == 6
    with written(None, "device") as made, pytest.raises(WeightsError, match=r"'cuda' tensors cannot be 'device'"):
        made.write(0, 6)


def test_version_stays_in_the_memory_of_its_slot() -> None:
    with written(Device(), "device", stays=True) as made:
        for version in range(6):
            made.write(version % 2, version)
        made.writer.settle()
        for slot, version in enumerate((4, 5)):
            memory = made.writer.memory(slot)
            assert memory is not None
            with memory.reading() as flat:
                assert set(flat[:4000].view(np.int32)) == {version} == {made.value(slot)}
        kept = made.writer.memory(0)
        made.writer.close()
        assert made.writer.memory(0) is None
        assert kept is not None
        with pytest.raises(WeightsError, match="was freed"), kept.reading():
            pass


def test_device_that_shares_no_memory_is_gone_through(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.shares = False
    with written(device, "device", stays=True) as made, caplog.at_level(logging.WARNING):
        for version in range(4):
            assert made.write(version % 2, version) is not None
            assert made.writer.memory(version % 2) is None
        made.writer.settle()
        assert (made.value(0), made.value(1), device.num_allocated, device.num_used) == (2, 3, 4, 0)
    assert caplog.text.count("readers copy snapshots from memory of the host: This device shares no memory.") == 1


def test_failed_fill_leaves_no_memory_of_its_slot() -> None:
    def fails(_: object) -> None:
        raise WeightsError("cannot be quantised")

    with written(Device(), "device", stays=True) as made:
        made.write(0, 1)
        with pytest.raises(WeightsError, match="cannot be quantised"):
            made.writer.write(0, fails, GPU)
        assert made.writer.memory(0) is None
        made.write(0, 2)
        made.writer.settle()
        assert made.value(0) == 2
