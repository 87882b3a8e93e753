"""Placements on a mesh, and the boxes of a tensor that each rank holds. Pure.

A mesh is a grid of ranks, counted in row-major order; a tensor has one placement per axis of the mesh. They apply from
the first axis to the last, each to the remaining part: as in `torch.distributed.tensor`, whose `Replicate`, `Shard` and
`_StridedShard` have equivalents here. `Sharded` is more general, as engines need: shares of a fixed length (padded
vocabularies) and shares that several ranks hold (key-value heads). `Only` is for pipeline stages and whole experts,
which only some ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.compact import TensorSplit, make_tensor_split
from starling.weightsync.plan.layout import Box

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, disjoint pieces of one dim, as first element and length, concatenated in local memory."""


class Replicate(msgspec.Struct, frozen=True, kw_only=True, tag="replicate"):
    """Every rank along the axis holds the whole tensor."""


class Sharded(msgspec.Struct, frozen=True, kw_only=True, tag="split"):
    """Each rank along the axis holds one share of a dim, near-equal and the larger ones first, as `torch.chunk`."""

    dim: int
    factor: int = 1
    """Cut the dim into this many blocks first, then each block among the ranks: a rank holds one share per block.

    With FSDP around tensor parallelism this is the size of the inner axis (`_StridedShard`); with a tensor that is
    already several projections in one, their number.
    """
    chunk: int = 0
    """Length of each share if it is not derived from the dim; the last shares may be shorter, or empty."""
    copies: int = 1
    """Number of neighbouring ranks that hold the same share."""


class Only(msgspec.Struct, frozen=True, kw_only=True, tag="only"):
    """The ranks at these indices of the axis hold the whole tensor, the others nothing."""

    indices: tuple[int, ...]


Placement: TypeAlias = Replicate | Sharded | Only

REPLICATE = Replicate()


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A box that a rank holds, and its position in the rank's local tensor."""

    box: Box
    origin: tuple[int, ...]
    """Index of the box's first element in the local tensor, per dim."""


def coordinate_of(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the index of `rank` along each axis of `mesh`."""
    indices: list[int] = []
    for size in reversed(mesh):
        rank, index = divmod(rank, size)
        indices.append(index)
    return tuple(reversed(indices))


def held_boxes(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Held, ...]:
    """Return the non-empty boxes of a tensor that the rank at `coordinate` holds, in row-major order.

    Together they fill the rank's local tensor, whose shape is `local_shape`.

    Args:
        shape: the full tensor's shape, in elements.
        mesh: number of ranks along each axis.
        coordinate: the rank's index along each axis.
        placements: one per axis.

    Raises:
        WeightsError: placements that do not fit the mesh or the shape.
    """
    runs = _runs(shape, mesh, coordinate, placements)
    if runs is None:
        return ()
    dims: list[list[tuple[int, int, int]]] = []
    for pieces in runs:
        origin, placed = 0, []
        for begin, length in pieces:
            placed.append((begin, length, origin))
            origin += length
        dims.append(placed)
    return tuple(
        Held(
            box=Box(offset=tuple(begin for begin, _, _ in parts), size=tuple(length for _, length, _ in parts)),
            origin=tuple(origin for _, _, origin in parts),
        )
        for parts in product(*dims)
    )


def local_shape(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the shape of the local tensor of the rank at `coordinate`; arguments and errors as `held_boxes`."""
    runs = _runs(shape, mesh, coordinate, placements)
    if runs is None:
        return (0,) * len(shape)
    return tuple(sum(length for _, length in pieces) for pieces in runs)


def split_of_mesh(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> TensorSplit:
    """Return the boxes of all ranks of `mesh` as a `TensorSplit`; arguments and errors as `held_boxes`."""
    rows = [
        (rank, held.box)
        for rank in range(math.prod(mesh))
        for held in held_boxes(shape, mesh, coordinate_of(rank, mesh), placements)
    ]
    boxes = [box for _, box in rows]
    ranks, offsets, sizes = [rank for rank, _ in rows], [box.offset for box in boxes], [box.size for box in boxes]
    return make_tensor_split(tuple(shape), ranks, offsets, sizes)


def _runs(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[Runs] | None:
    """Return the runs of each dim that the rank holds, or None if it holds nothing."""
    if not len(mesh) == len(coordinate) == len(placements):
        raise WeightsError(
            f"{len(placements)} placements and coordinate {tuple(coordinate)} do not fit a mesh of shape {tuple(mesh)}."
        )
    runs: list[Runs] = [((0, length),) if length else () for length in shape]
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        if not 0 <= index < size:
            raise WeightsError(f"Coordinate {tuple(coordinate)} lies outside a mesh of shape {tuple(mesh)}.")
        if isinstance(placement, Only):
            if index not in placement.indices:
                return None
        elif isinstance(placement, Sharded):
            if not 0 <= placement.dim < len(shape):
                raise WeightsError(f"A tensor of shape {tuple(shape)} cannot be split along dim {placement.dim}.")
            runs[placement.dim] = _share(runs[placement.dim], placement, size, index)
    return runs


def _share(runs: Runs, split: Sharded, num_ranks: int, index: int) -> Runs:
    """Return the share of rank `index` of `num_ranks` in the elements of `runs`."""
    if split.factor < 1 or split.copies < 1 or split.chunk < 0 or num_ranks % split.copies:
        raise WeightsError(f"{split} cannot be spread over {num_ranks} ranks: factor, chunk or copies do not fit.")
    if split.chunk and split.factor > 1:
        raise WeightsError(f"{split} has both a chunk and a factor; give one of them.")
    length = sum(n for _, n in runs)
    num_shares, share = num_ranks // split.copies, index // split.copies
    block = -(-length // split.factor)
    taken: list[tuple[int, int]] = []
    for begin in range(0, length, block) if block else ():
        end = min(begin + block, length)
        chunk = split.chunk or -(-(end - begin) // num_shares)
        low = min(begin + share * chunk, end)
        taken.extend(_take(runs, low, min(low + chunk, end)))
    merged: list[tuple[int, int]] = []
    for first, n in taken:
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((first, n))
    return tuple(merged)


def _take(runs: Runs, low: int, high: int) -> list[tuple[int, int]]:
    """Return elements `low` to `high` (exclusive) of the concatenated `runs`."""
    taken: list[tuple[int, int]] = []
    origin = 0
    for first, n in runs:
        begin, end = max(low, origin), min(high, origin + n)
        if begin < end:
            taken.append((first + begin - origin, end - begin))
        origin += n
    return taken
