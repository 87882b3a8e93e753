"""Regions: strided pieces of flat memory, the common tongue of snapshots, staging and requests.

A reader asks for regions of a snapshot; the payload that answers holds them row-major, each starting at a multiple of
`ALIGNMENT`. Where the memory on one side already looks like that, nothing is packed or unpacked there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.layout import Box, aligned, packed_offsets
from starling.weightsync.plan import MAX_BUCKET_BYTES

Memory = npt.NDArray[np.uint8]
"""Flat memory, one byte per element."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A box of elements in flat memory."""

    offset_bytes: int
    item_bytes: int
    size: tuple[int, ...]
    strides_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the payload."""
        return math.prod(self.size) * self.item_bytes

    @property
    def is_dense(self) -> bool:
        """Whether the region is one run of bytes."""
        run = self.item_bytes
        for n, stride in zip(reversed(self.size), reversed(self.strides_bytes), strict=True):
            if n != 1 and stride != run:
                return False
            run *= n
        return True


@dataclass(frozen=True)
class BucketRead:
    """One bucket, ready to execute: regions of a source's snapshot and the regions of staging that they fill."""

    source_rank: int
    sources: tuple[Region, ...]
    destinations: tuple[Region, ...]


def _strides_bytes(box: Box, item_bytes: int) -> tuple[int, ...]:
    """Return the strides of `box` stored row-major."""
    strides = [item_bytes] * len(box.size)
    for dim in range(len(box.size) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * box.size[dim + 1]
    return tuple(strides)


def region_pair(
    part: Box, source: tuple[Box, int], destination: tuple[Box, int], item_bytes: int
) -> tuple[Region, Region]:
    """Return where `part` lies in two boxes that contain it, each stored row-major at the byte given with it.

    Dims that adjoin on both sides are merged, so the two regions have the same few dims.
    """
    strides = [_strides_bytes(box, item_bytes) for box, _ in (source, destination)]
    offsets = [
        base + sum((b - o) * s for b, o, s in zip(part.offset, box.offset, steps, strict=True))
        for (box, base), steps in zip((source, destination), strides, strict=True)
    ]
    merged: list[tuple[int, int, int]] = []
    for n, a, b in zip(part.size, *strides, strict=True):
        if merged and merged[-1][1] == n * a and merged[-1][2] == n * b:
            merged[-1] = (merged[-1][0] * n, a, b)
        elif n != 1:
            merged.append((n, a, b))
    size = tuple(n for n, _, _ in merged)
    return (
        Region(offsets[0], item_bytes, size, tuple(a for _, a, _ in merged)),
        Region(offsets[1], item_bytes, size, tuple(b for _, _, b in merged)),
    )


def view(memory: Memory, region: Region) -> npt.NDArray[Any]:
    """Return the region as an array of unsigned integers that shares `memory`.

    Raises:
        WeightsError: the region leaves the memory.
    """
    try:
        return np.ndarray(region.size, f"u{region.item_bytes}", memory, region.offset_bytes, region.strides_bytes)
    except (ValueError, TypeError, OverflowError) as error:
        raise WeightsError(f"A region leaves the memory of {memory.nbytes} bytes: {region}.") from error


def check_regions(regions: Sequence[Region], extent_bytes: int) -> None:
    """Check what a stranger asks for: every byte inside the snapshot, and not too much in all.

    Raises:
        WeightsError: a region outside `extent_bytes`, or too much in all.
    """
    total = 0
    for region in regions:
        alike = len(region.size) == len(region.strides_bytes) <= 32
        if not alike or region.item_bytes not in (1, 2, 4, 8) or min((*region.size, region.offset_bytes)) < 0:
            raise WeightsError(f"Refused to read a malformed region: {region}.")
        if min(region.strides_bytes, default=region.item_bytes) < region.item_bytes:
            raise WeightsError(f"Refused to read a region that repeats bytes: {region}.")
        last = sum((n - 1) * stride for n, stride in zip(region.size, region.strides_bytes, strict=True))
        if region.offset_bytes + last + region.item_bytes > extent_bytes:
            raise WeightsError(f"Refused to read outside the snapshot of {extent_bytes} bytes: {region}.")
        total += region.num_bytes
    if total > MAX_BUCKET_BYTES:
        raise WeightsError(f"Refused to read {total} bytes at once, more than {MAX_BUCKET_BYTES}.")


def as_run(memory: Memory, regions: Sequence[Region]) -> Memory | None:
    """Return the part of `memory` that is the payload of `regions` as it lies, or None when they must be packed."""
    position = regions[0].offset_bytes
    for region in regions:
        if not region.is_dense or region.offset_bytes != position:
            return None
        position += aligned(region.num_bytes)
    return memory[regions[0].offset_bytes : regions[-1].offset_bytes + regions[-1].num_bytes]


def payload_bytes(regions: Sequence[Region]) -> int:
    """Return the length of the payload of `regions`: no padding after the last."""
    _, extent = packed_offsets(region.num_bytes for region in regions)
    last = regions[-1].num_bytes
    return extent - aligned(last) + last


def pack(memory: Memory, regions: Sequence[Region], payload: Memory) -> None:
    """Copy `regions` of `memory` into `payload`."""
    for region, part in _parts(regions, payload):
        np.copyto(part, view(memory, region))


def unpack(payload: Memory, regions: Sequence[Region], memory: Memory) -> None:
    """Copy `payload` into `regions` of `memory`."""
    for region, part in _parts(regions, payload):
        np.copyto(view(memory, region), part)


def _parts(regions: Sequence[Region], payload: Memory) -> list[tuple[Region, npt.NDArray[Any]]]:
    offsets, _ = packed_offsets(region.num_bytes for region in regions)
    return [
        (region, np.ndarray(region.size, f"u{region.item_bytes}", payload, offset))
        for region, offset in zip(regions, offsets, strict=True)
    ]
