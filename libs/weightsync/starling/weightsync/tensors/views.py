"""Views of live tensors and of flat memory as the shards of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Array, Memory
from starling.weightsync.plan.buckets import DIRECT_BYTES
from starling.weightsync.plan.layout import Box, Layout, item_bytes, packed_offsets, pieces_of

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def live_views(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return each shard of `rank` as a view into `tensors`, which maps storage names to tensors.

    Raises:
        WeightsError: a storage that is missing, of another element type, or too small.
    """
    return tuple(live_view(layout, rank, index, tensors) for index in range(len(layout.ranks[rank].shards)))


def live_view(layout: Layout, rank: int, index: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return one shard of `rank` as a view. Raises WeightsError as `live_views`."""
    shard = layout.ranks[rank].shards[index]
    spec = layout.tensors[shard.tensor]
    tensor = tensors.get(shard.storage)
    if tensor is None:
        raise WeightsError(f"Tensor {shard.storage} of {layout.replica} is in the layout but was not given.")
    tensor, offset_bytes = tensor.detach(), shard.offset_bytes
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and spec.dtype != "uint8":  # a memory-mapped file, or an arena
        extent = sum((n - 1) * stride for n, stride in zip(shard.box.size, shard.strides, strict=True)) + 1
        end = offset_bytes + extent * item_bytes(spec) if shard.box.volume else offset_bytes
        try:
            tensor, offset_bytes = tensor[offset_bytes:end].view(getattr(torch, spec.dtype)), 0
        except RuntimeError as error:
            raise WeightsError(
                f"{spec.name} lies at byte {offset_bytes} of {shard.storage}, where {spec.dtype} cannot be: {error}."
            ) from error
    if str(tensor.dtype).removeprefix("torch.") != spec.dtype:
        raise WeightsError(
            f"Tensor {shard.storage} is {tensor.dtype} but {spec.dtype} in the layout of {layout.replica}."
        )
    if offset_bytes == 0 and (tuple(tensor.shape), tensor.stride()) == (shard.box.size, shard.strides):
        return tensor
    offset = tensor.storage_offset() + offset_bytes // item_bytes(spec)
    try:
        return tensor.as_strided(shard.box.size, shard.strides, offset)
    except RuntimeError as error:
        raise WeightsError(
            f"Box {shard.box} of {spec.name} does not fit tensor {shard.storage} of shape {tuple(tensor.shape)}."
        ) from error


def packed_views(layout: Layout, rank: int, memory: Memory | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each shard of `rank` as a contiguous tensor inside `memory`, at `packed_offsets` of the shards.

    Args:
        layout: of all ranks.
        rank: whose shards.
        memory: flat memory, or a flat tensor of bytes on any device.
    """
    pieces = pieces_of(layout, rank)
    offsets, _ = packed_offsets(piece.size_bytes for piece in pieces)
    flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
    return tuple(
        flat[offset : offset + piece.size_bytes].view(getattr(torch, piece.dtype)).view(piece.box.size)
        if piece.size_bytes
        else torch.empty(piece.box.size, dtype=getattr(torch, piece.dtype), device=flat.device)
        for piece, offset in zip(pieces, offsets, strict=True)
    )


def array_of(tensor: torch.Tensor) -> Array | None:
    """Return a tensor's memory as an array of unsigned integers; None where numpy cannot reach it."""
    if tensor.device.type != "cpu":
        return None
    integers = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
    return integers.view(f"u{integers.itemsize}")


def tensor_part(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return `part` of a tensor that holds `box`, as a view."""
    for dim, (origin, begin, n) in enumerate(zip(box.offset, part.offset, part.size, strict=True)):
        tensor = tensor.narrow(dim, begin - origin, n)
    return tensor


def place_array(tensor: torch.Tensor, array: Array) -> None:
    """Copy the bits of an array into a tensor of the same shape, wherever it is."""
    signed = torch.from_numpy(array.view(f"i{array.itemsize}") if array.itemsize > 1 else array)
    with torch.no_grad():
        tensor.copy_(signed.view(tensor.dtype))


def is_direct_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a transport receives a box straight into a tensor: a contiguous one that is not small."""
    return tensor.is_contiguous() and tensor.nbytes >= DIRECT_BYTES


def flat_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat tensor that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8)
