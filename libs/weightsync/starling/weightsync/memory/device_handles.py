"""Handles by which another process of this machine opens memory of a device.

A publisher whose snapshots stay in memory of a device writes their handles into its arena, which only processes of the
same user can open. A reader there copies from that memory to its own device, without the host. The memory is opened
for reading only where the kind of device has such a thing: a CPU has it, CUDA has not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import CPU, UNDECODABLE, Box, ShardPiece

CopyBox = Callable[[ShardPiece, int, Box, Any], None]
"""Fills a target with a box of a piece that lies row-major at an offset in bytes."""


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Names memory of a device for other processes of the same user on the same machine."""

    kind: Literal["cpu", "cuda"]
    device: Annotated[str, msgspec.Meta(max_length=64)]
    """UUID of the GPU; ``cpu``."""
    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    """``cudaIpcMemHandle_t``, or the address and the number of a memory file."""


_handles: Final = msgspec.msgpack.Decoder(DeviceHandle)


def encode_handle(handle: DeviceHandle) -> bytes:
    """Return a handle as `decode_handle` reads it; at most 160 bytes."""
    return msgspec.msgpack.encode(handle)


def decode_handle(data: bytes, arena: str, least_bytes: int) -> DeviceHandle:
    """Decode the handle of a peer.

    Args:
        data: from its arena.
        arena: the address of that.
        least_bytes: how much memory it must name.

    Raises:
        WeightsError: it is malformed, names memory of another process, or less memory.
    """
    try:
        handle = _handles.decode(data)
    except UNDECODABLE as error:
        raise WeightsError(f"The handle of device memory in {arena} cannot be decoded: {error}.") from error
    if handle.kind == CPU and not handle.handle.startswith(arena.rpartition("/")[0].encode() + b"/"):
        raise WeightsError(f"The handle of device memory in {arena} names memory of another process.")
    if handle.size_bytes < least_bytes:
        raise WeightsError(
            f"The handle of device memory in {arena} names {handle.size_bytes} bytes; its pieces take {least_bytes}."
        )
    return handle


def location_of(memory: Any) -> tuple[int, int]:
    """Return the address and the size in bytes of flat memory: an array, or a tensor of any device."""
    interface = getattr(memory, "__cuda_array_interface__", None) or np.asarray(memory).__array_interface__
    return int(interface["data"][0]), int(interface["shape"][0])


class OpenedMemory(Protocol):
    """Memory of a device of another process, opened by its handle. Thread-safe."""

    def copying(self) -> AbstractContextManager[CopyBox]:
        """Yield the function that copies boxes; all copies have ended when the context ends.

        Raises:
            WeightsError: the device has failed.
        """

    def close(self) -> None:
        """Close it; no copy may be under way."""
