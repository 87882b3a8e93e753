"""Memory of CUDA devices for snapshots, from torch's allocator; what is shared is from CUDA's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_handles import DeviceHandle
from starling.weightsync.memory.device_memory import CpuAllocator, DeviceAllocator
from starling.weightsync.tensors import cuda_ipc


class CudaMemory:
    """A `DeviceMemory` of a CUDA device. Copies to the host run on a stream of their own, beside training."""

    def __init__(self, flat: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = flat.device, stream
        self._flat: torch.Tensor | None = flat
        self._filled = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """See `DeviceMemory.opened`: a flat tensor of bytes, for operations on the current stream."""
        assert self._flat is not None, "freed memory was opened"
        yield self._flat
        self._filled.record(torch.cuda.current_stream(self._device))

    def copy_to(self, host: Memory) -> None:
        """See `DeviceMemory.copy_to`."""
        assert self._flat is not None, "freed memory was read"
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._filled)
                torch.from_numpy(host).copy_(self._flat[: host.nbytes], non_blocking=True)
            self._stream.synchronize()
        except RuntimeError as error:
            raise WeightsError(f"A snapshot could not be copied from {self._device}: {error}.") from error

    def free(self) -> None:
        """See `DeviceMemory.free`. Torch may reuse it at once: nothing uses it after `copy_to`."""
        self._flat = None


class SharedCudaMemory(CudaMemory):
    """A `SharedDeviceMemory` of a CUDA device."""

    def __init__(self, allocation: cuda_ipc.Allocation, stream: torch.cuda.Stream) -> None:
        super().__init__(allocation.flat, stream)
        self._allocation = allocation

    @property
    def handle(self) -> DeviceHandle:
        """See `SharedDeviceMemory.handle`."""
        return self._allocation.handle

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        """See `SharedDeviceMemory.reading`."""
        flat = self._flat
        if flat is None:
            raise WeightsError("The memory of the snapshot was freed.")
        yield flat

    def free(self) -> None:
        """See `DeviceMemory.free`."""
        super().free()
        self._allocation.free()


class CudaAllocator:
    """The `DeviceAllocator` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def available_bytes(self) -> int:
        """See `DeviceAllocator.available_bytes`: what is free, and what torch keeps for reuse."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def allocate(self, size_bytes: int) -> CudaMemory:
        """See `DeviceAllocator.allocate`."""
        try:
            flat = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightsError(f"No {size_bytes} bytes of memory on {self._device}.") from error
        return CudaMemory(flat, self._stream)

    def allocate_shared(self, size_bytes: int) -> SharedCudaMemory:
        """See `DeviceAllocator.allocate_shared`."""
        return SharedCudaMemory(cuda_ipc.allocate(size_bytes, self._device), self._stream)

    def pin(self, memory: Memory) -> None:
        """See `DeviceAllocator.pin`."""
        if not memory.nbytes:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if code != 0:
            raise WeightsError(
                f"{memory.nbytes} bytes cannot be locked into memory (CUDA error {code}): choose the snapshot policy "
                "'host'."
            )

    def unpin(self, memory: Memory) -> None:
        """See `DeviceAllocator.unpin`."""
        if memory.nbytes:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.ctypes.data)


def allocator_of(device: torch.device) -> DeviceAllocator | None:
    """Return the allocator of a device; None for kinds of devices that are copied from directly only."""
    if device.type == "cpu":
        return CpuAllocator()
    return CudaAllocator(device) if device.type == "cuda" else None
