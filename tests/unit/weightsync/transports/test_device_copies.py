"""Snapshots that stay in memory of a device: readers on the same machine check it, and copy from there."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from transport_peers import Reader, ServedSource, local_offer, piece, proof_for, reader
from weights_peers import ANSWER_S, BUCKET_BYTES, blank, same, source, weights

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena, ArenaMapping
from starling.weightsync.memory.device_handles import DeviceHandle
from starling.weightsync.memory.protected_pages import OpenedPages, SharedPages
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.base import AnswerReceived, ReadTarget

torch.set_num_threads(1)
PIECES = (piece("w", "float32", (0, 64), (0, 48)), piece("b", "bfloat16", (0, 33)), piece("none", "int8", (0, 0)))
EXTENT = 64 * 48 * 4 + 128  # `b` takes 66 bytes of 128
NAMES = "starling-device"


def opened_regions() -> int:
    """Return how many mappings of device memory this process has."""
    return Path("/proc/self/maps").read_text().count(NAMES)


class DeviceSource(ServedSource):
    """A source by shared memory whose snapshots are on a device, too, with other bits: who copies from there shows."""

    def __init__(self) -> None:
        self.memory = SharedPages(EXTENT)
        super().__init__("local", PIECES)

    def publish(self, handle: DeviceHandle | None = None) -> RankOffer:
        slot = self.arena.claim(0.0)
        self.arena.slots[slot][:EXTENT] = 1
        with self.memory.opened() as flat:
            flat[:] = 2
        snapshot, secret = self.arena.commit(slot, handle or self.memory.handle)
        return self.serving.offer(rank=0, snapshot=snapshot, secret=secret, holds="", root="")

    def close(self) -> None:
        super().close()
        self.memory.free()


@pytest.fixture
def there() -> Iterator[DeviceSource]:
    made = DeviceSource()
    yield made
    made.close()


@contextmanager
def opened(there: DeviceSource, offer: RankOffer | None = None) -> Iterator[Reader]:
    with reader("local") as made:
        assert not made.connect(offer or there.offer).reason
        yield made


def test_boxes_are_copied_from_the_device_and_proven_by_the_arena(there: DeviceSource) -> None:
    part = piece("w", "float32", (3, 60), (5, 7))
    with opened(there) as made:
        answer, arrays = made.read([*PIECES, part])
        assert not answer.reason
        assert all((array.reshape(-1).view(np.uint8) == 2).all() for array in arrays)
        assert made.client.lanes("source") == ("shared memory", "cpu memory")
        sizes = [array.nbytes for array in arrays]
        digests = [xxhash.xxh3_128_digest(bytes([1]) * size) for size in sizes]
        assert answer.digests == b"".join(digests)


def test_boxes_are_copied_to_any_strides(there: DeviceSource) -> None:
    with opened(there) as made:
        whole = np.zeros((100, 128), np.uint32)
        answer = made.ask(made.request([PIECES[0]]), ReadTarget((whole[7:71, 1:97:2],), ()))
        assert not answer.reason
        assert (whole[7:71, 1:97:2] == 0x02020202).all()
        assert whole.sum() == 0x02020202 * 64 * 48


def test_boxes_for_a_device_are_placed_there_and_not_in_their_arrays(there: DeviceSource) -> None:
    with opened(there) as made:
        array, place, other = (np.zeros((64, 48), np.uint32) for _ in range(3))
        target = ReadTarget((array, other), (), (place, None))
        made.client.ask("source", made.request([PIECES[0], PIECES[0]]), target)
        event = made.event()
        assert isinstance(event, AnswerReceived)
        assert event.placed
        assert (place == 0x02020202).all()
        assert (other == 0x02020202).all()
        assert not array.any()


def test_memory_is_open_until_the_snapshot_is_released(there: DeviceSource) -> None:
    before = opened_regions()
    with opened(there) as made:
        assert opened_regions() == before
        made.read(PIECES)
        made.read(PIECES)
        assert opened_regions() == before + 1
        assert not made.release().reason
        assert opened_regions() == before
        assert not made.open(there.publish()).reason
        made.read(PIECES)
        made.client.drop("source")
        assert opened_regions() == before


def test_snapshot_revoked_during_a_copy_is_refused(there: DeviceSource) -> None:
    with opened(there) as made:
        there.arena.revoke_all()
        assert "revoked" in made.read(PIECES)[0].reason


def test_memory_that_cannot_be_opened_is_read_from_the_host(
    there: DeviceSource, caplog: pytest.LogCaptureFixture
) -> None:
    gone = SharedPages(EXTENT)
    gone.free()
    for handle in (gone.handle, msgspec.structs.replace(there.memory.handle, size_bytes=1 << 40)):
        offer = there.publish(handle)
        with opened(there, offer) as made, caplog.at_level(logging.WARNING):
            for _ in range(2):
                answer, arrays = made.read(PIECES)
                assert not answer.reason
                assert (arrays[0] == 0x01010101).all()
        assert caplog.text.count("weights are copied from memory of the host") == 1
        caplog.clear()


def test_memory_of_a_gpu_is_not_opened_for_arrays_of_the_host(there: DeviceSource) -> None:
    handle = DeviceHandle(kind="cuda", device="GPU-0", size_bytes=EXTENT, handle=bytes(64))
    with opened(there, there.publish(handle)) as made:
        answer, arrays = made.read(PIECES)
        assert not answer.reason
        assert (arrays[0] == 0x01010101).all()
        assert made.client.lanes("source") == ("shared memory",)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"handle": b"/proc/1/fd/3"}, "names memory of another process"),
        ({"handle": b""}, "names memory of another process"),
        ({"size_bytes": EXTENT - 1}, f"names {EXTENT - 1} bytes; its pieces take {EXTENT}"),
        ({"size_bytes": 1 << 61}, "cannot be decoded"),
        ({"kind": "tpu"}, "cannot be decoded"),
        ({"device": "x" * 65}, "cannot be decoded"),
    ],
)
def test_false_handle_is_refused(there: DeviceSource, change: dict[str, object], complaint: str) -> None:
    offer = there.publish(msgspec.structs.replace(there.memory.handle, **change))
    with reader("local") as made:
        assert complaint in made.connect(offer).reason


def test_long_or_garbled_entry_is_refused() -> None:
    arena = Arena(PIECES)
    snapshot, secret = arena.commit(arena.claim(0.0))
    begin = 512 + snapshot % 2 * 256
    arena._bytes[begin : begin + 256] = 0xFF
    mapping = ArenaMapping(arena.address)
    mapping.open(snapshot, proof_for(local_offer(snapshot, secret)))
    with pytest.raises(WeightsError, match="cannot be decoded"):
        mapping.device_handle(EXTENT)
    arena.revoke_all()
    assert mapping.device_handle(EXTENT) is None
    mapping.close()
    arena.close()


def test_file_that_can_be_made_smaller_is_not_device_memory() -> None:
    descriptor = os.memfd_create(NAMES, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    handle = DeviceHandle(
        kind="cpu",
        device="cpu",
        size_bytes=8192,
        handle=f"/proc/{os.getpid()}/fd/{descriptor} {os.fstat(descriptor).st_ino}".encode(),
    )
    with pytest.raises(WeightsError, match="is not device memory: it can be made smaller"):
        OpenedPages(handle)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(WeightsError, match="is not device memory: it has 8192 bytes"):
        OpenedPages(msgspec.structs.replace(handle, size_bytes=8193))
    OpenedPages(handle).close()
    with pytest.raises(WeightsError, match="is not the device memory that was there"):
        OpenedPages(msgspec.structs.replace(handle, handle=handle.handle + b"1"))
    os.close(descriptor)


def test_reader_does_not_write_to_the_device() -> None:
    memory = SharedPages(4096)
    there = OpenedPages(memory.handle)
    with there.opened() as flat, pytest.raises(ValueError, match="read-only"):
        flat[0] = 1
    there.close()
    memory.free()


def test_memory_may_be_freed_while_it_is_sent_from() -> None:
    memory = SharedPages(4096)
    with memory.reading() as flat:
        memory.free()
        assert not flat.any()


def test_opened_memory_outlives_its_owner() -> None:
    memory = SharedPages(4096)
    with memory.opened() as flat:
        flat[:] = 7
    there = OpenedPages(memory.handle)
    memory.free()
    with there.opened() as flat:
        assert (flat == 7).all()
    there.close()


# --- publishers ------------------------------------------------------------------------------------------------------


def test_version_stays_until_its_slot_is_written_again() -> None:
    tensors = {"w": torch.zeros(4096, dtype=torch.uint8)}
    before = opened_regions()
    with Publisher(layout_of(tensors, "policy-0"), transport="local", snapshots="device") as publisher:
        for version in range(6):
            tensors["w"].fill_(version)
            publisher.publish(version, tensors)
            publisher.settle()
            assert opened_regions() == before + min(version + 1, 2)
    assert opened_regions() == before


@pytest.mark.parametrize(("policy", "transport"), [("auto", "local"), ("host", "local"), ("device", "tcp")])
def test_version_stays_nowhere_else(policy: str, transport: str) -> None:
    tensors = {"w": torch.zeros(4096, dtype=torch.uint8)}
    before = opened_regions()
    with Publisher(layout_of(tensors, "policy-0"), transport=transport, snapshots=policy) as publisher:  # type: ignore[arg-type]
        publisher.publish(0, tensors)
        assert opened_regions() == before


@pytest.mark.system
@pytest.mark.parametrize("in_place", [False, True])
def test_versions_of_another_process_arrive_bit_for_bit(in_place: bool) -> None:
    engine, before = blank(), opened_regions()
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with source("local", snapshots="device") as peer:
        plan = make_plan(peer.layout, wanted, bucket_bytes=BUCKET_BYTES)
        for version in range(4):
            offer = peer.publish()
            puller.pull(offer, plan, deadline_s=ANSWER_S, into=engine if in_place else None)
            if not in_place:
                puller.switch(engine)
            assert puller.attest(engine, offer) == offer.root
            assert same(engine, weights(version))
            assert opened_regions() == before
        puller.close()
        assert peer.end() == 0
