"""Snapshots of CUDA tensors, pulled into CUDA tensors (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
from transport_peers import served_transports
from weights_peers import publish_while_training

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import allocate
from starling.weightsync.memory.device_memory import SnapshotPolicy
from starling.weightsync.offers.offer import Transport
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.cuda_memory import CudaAllocator
from starling.weightsync.tensors.modules import layout_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]

SHAPES = {"a": (1024, 1025), "b": (7, 33), "c": (1,), "none": (0, 4)}


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float32)
    return {
        name: torch.randn(shape, device="cuda", generator=generator).to(dtype)
        for (name, shape), dtype in zip(SHAPES.items(), dtypes, strict=True)
    }


@pytest.mark.parametrize("transport", ["local", *served_transports()])
@pytest.mark.parametrize("policy", ["auto", "device", "pinned", "host"])
@pytest.mark.parametrize("in_place", [False, True])
def test_training_goes_on_after_a_snapshot_of_any_policy(
    policy: SnapshotPolicy, transport: Transport, in_place: bool
) -> None:
    tensors, engine = tensors_of(0), tensors_of(99)
    layout, wanted = layout_of(tensors, "policy-0"), layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with Publisher(layout, transport=transport, snapshots=policy, delta_versions=2) as publisher:
        publish_while_training(publisher, puller, tensors, engine, tensors_of, in_place=in_place)
        assert publisher.snapshot_place == ("device" if policy == "auto" else policy)
    puller.close()


def test_memory_of_the_device_is_free_after_a_version_has_moved() -> None:
    tensors = {"a": torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")}
    with Publisher(layout_of(tensors, "policy-0"), transport="local", snapshots="device") as publisher:
        publisher.publish(0, tensors)
        publisher.settle()
        before = torch.cuda.memory_allocated()
        publisher.publish(1, tensors)
        publisher.settle()
        assert torch.cuda.memory_allocated() == before


def test_pages_of_the_host_are_pinned_until_they_are_unpinned() -> None:
    allocator, memory = CudaAllocator(torch.device("cuda", torch.cuda.current_device())), allocate(1 << 21)
    allocator.pin(memory)
    assert torch.from_numpy(memory).is_pinned()
    allocator.unpin(memory)
    assert not torch.from_numpy(memory).is_pinned()


def test_device_without_memory_is_refused_in_a_sentence() -> None:
    allocator = CudaAllocator(torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(WeightsError, match=r"No 1125899906842624 bytes of memory on cuda"):
        allocator.allocate(1 << 50)
