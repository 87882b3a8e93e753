"""Snapshots of CUDA tensors, pulled into CUDA tensors (`make test-gpu`)."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch
from transport_peers import served_transports
from weights_peers import ANSWER_S, BUCKET_BYTES, blank, publish_while_training, same, source, weights

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import allocate
from starling.weightsync.memory.device_handles import decode_handle, encode_handle
from starling.weightsync.memory.device_memory import SnapshotPolicy
from starling.weightsync.offers.offer import Transport
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.cuda_ipc import PAGE_BYTES, open_memory
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


PAIRS = [
    ("cuda:0", "cuda:0"),
    pytest.param(
        *("cuda:1", "cuda:0"),
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1),
            reason="there are no two GPUs with peer access: not yet run here",
        ),
    ),
]


DEVICE_TRANSPORTS = ["local", *(transport for transport in served_transports() if transport in ("ucx", "nixl"))]


@pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)
@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_versions_of_another_process_arrive_on_the_device(there: str, here: str, transport: Transport) -> None:
    engine = {name: tensor.to(here) for name, tensor in blank().items()}
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with source(transport, start_method="spawn", device=there, snapshots="device") as peer:
        plan = make_plan(peer.layout, wanted, bucket_bytes=BUCKET_BYTES)
        for version in range(4):
            offer = peer.publish()
            report = puller.pull(offer, plan, deadline_s=ANSWER_S, into=engine)
            assert transport != "local" or report.lanes == ("cuda memory", "shared memory")
            assert puller.attest(engine, offer) == offer.root
            assert same({name: tensor.cpu() for name, tensor in engine.items()}, weights(version))
        puller.close()
        assert peer.end() == 0


def test_staging_on_the_host_is_filled_from_the_host() -> None:
    tensors, engine = tensors_of(0), tensors_of(1)
    wanted = layout_of(engine, "rollout-0")
    puller = Puller(wanted)
    with Publisher(layout_of(tensors, "policy-0"), transport="local", snapshots="device") as publisher:
        report = puller.pull(publisher.publish(0, tensors), make_plan(publisher.layout, wanted), deadline_s=ANSWER_S)
    assert report.lanes == ("shared memory",)
    puller.close()


def _share(pipe: Connection) -> None:
    memory = CudaAllocator(torch.device("cuda", 0)).allocate_shared(PAGE_BYTES)
    pipe.send_bytes(encode_handle(memory.handle))
    pipe.recv_bytes()
    memory.free()


def test_handle_that_names_more_memory_than_there_is_is_refused() -> None:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_share, args=(theirs,), daemon=True)
    process.start()
    assert pipe.poll(ANSWER_S)
    handle = decode_handle(pipe.recv_bytes(), "", PAGE_BYTES)
    open_memory(handle).close()
    with pytest.raises(WeightsError, match="bytes, expected"):
        open_memory(msgspec.structs.replace(handle, size_bytes=1 << 40))
    with pytest.raises(WeightsError, match="cudaIpcOpenMemHandle has failed"):
        open_memory(msgspec.structs.replace(handle, handle=bytes(64)))
    assert torch.ones(4, device="cuda").sum() == 4, "torch must not find the error of a refused handle"
    pipe.send_bytes(b"end")
    process.join(ANSWER_S)
    assert process.exitcode == 0


def test_shared_memory_of_a_closed_publisher_is_free() -> None:
    tensors = {"a": torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")}
    before = torch.cuda.mem_get_info()[0]
    with Publisher(layout_of(tensors, "policy-0"), transport="local", snapshots="device") as publisher:
        publisher.publish(0, tensors)
        assert torch.cuda.mem_get_info()[0] <= before - (256 << 20)
    assert torch.cuda.mem_get_info()[0] > before - (256 << 20)


def test_memory_of_the_device_is_free_after_a_version_has_moved() -> None:
    tensors = {"a": torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")}
    with Publisher(layout_of(tensors, "policy-0"), transport="tcp", snapshots="device") as publisher:
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
