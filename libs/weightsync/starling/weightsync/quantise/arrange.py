"""Where the quantised parts of fused parameters lie: as their originals do, closed up to the parts' own sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.layout import Layout, Shard, item_bytes
from starling.weightsync.layouts.fused import contiguous


class Spot(NamedTuple):
    """Where a box lies; counted in elements of its own type."""

    storage: str
    offset: int
    strides: tuple[int, ...]


def spot_of(layout: Layout, shard: Shard) -> Spot:
    """Return where `shard` lies."""
    return Spot(shard.storage, shard.offset_bytes // item_bytes(layout.tensors[shard.tensor]), shard.strides)


def arranged(layout: Layout, shards: Sequence[Shard], sizes: Sequence[tuple[int, ...]]) -> list[Spot]:
    """Return spots for boxes of `sizes`, which lie one beside the other as the shards of one storage do.

    Each dim of the storage is cut where a shard begins; a stretch becomes as long as the longest new box in it.
    Disjoint shards so become disjoint boxes; where the shards fill the storage like a grid, as in fused and stacked
    parameters, the boxes fill theirs.

    Raises:
        WeightsError: shards of different strides, or that reach from one row into the next.
    """
    order = _outermost_first(layout, shards)
    indices = [_index(layout, shard, order) for shard in shards]
    begins: list[dict[int, int]] = []
    lengths: list[int] = []
    for dim in range(len(order)):
        stretches: dict[int, int] = {}
        for index, size in zip(indices, sizes, strict=True):
            stretches[index[dim]] = max(stretches.get(index[dim], 0), size[dim])
        end, begin = 0, {}
        for at in sorted(stretches):
            begin[at] = end
            end += stretches[at]
        begins.append(begin)
        lengths.append(end)
    steps = dict(zip(order, contiguous([lengths[dim] for dim in order]), strict=True))
    strides = tuple(steps[dim] for dim in range(len(order)))
    return [
        Spot(shard.storage, sum(begins[dim][at] * strides[dim] for dim, at in enumerate(index)), strides)
        for shard, index in zip(shards, indices, strict=True)
    ]


def _outermost_first(layout: Layout, shards: Sequence[Shard]) -> list[int]:
    """Return the dims in the order of their strides."""
    strides = shards[0].strides
    for shard in shards:
        if shard.strides != strides:
            raise _unfit(layout, shard)
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _index(layout: Layout, shard: Shard, order: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the shard's first element in its storage."""
    rest = spot_of(layout, shard).offset
    index = [0] * len(order)
    row = 0
    for dim in order:
        stride = max(shard.strides[dim], 1)
        index[dim], rest = divmod(rest, stride)
        if row and (index[dim] + shard.box.size[dim]) * stride > row:
            raise _unfit(layout, shard)
        row = stride
    if rest or any(not stride and n > 1 for stride, n in zip(shard.strides, shard.box.size, strict=True)):
        raise _unfit(layout, shard)
    return tuple(index)


def _unfit(layout: Layout, shard: Shard) -> WeightsError:
    return WeightsError(
        f"Box {shard.box} of {layout.tensors[shard.tensor].name} does not lie in rows of storage {shard.storage} of "
        f"{layout.replica}, so there is no telling where its scales would; give that layout shard by shard."
    )
