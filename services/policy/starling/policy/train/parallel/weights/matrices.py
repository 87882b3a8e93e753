"""Matrices whose parts are on several ranks, for an optimizer that computes from whole ones.

As many matrices as ranks are exchanged at a time: each rank receives all parts of one of them, computes, and sends the
parts of the result back. So the ranks compute different matrices, each of them once, and hold one whole at a time; an
element is sent twice per update, as in one gather and one scatter.

Stacks of matrices, such as the experts of a mixture, are exchanged only where single matrices are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.optim.muon import orthogonalised
from starling.policy.train.parallel.collectives import all_to_all
from starling.policy.train.parallel.mesh import MATRICES, Mesh
from starling.weightsync.layouts.placements import Held, Sharded, held_boxes, local_shape
from starling.weightsync.tensors.modules import placements_of


class DividedMatrices:
    """The matrices of an optimizer on a mesh; see `starling.policy.train.optim.muon.Matrices`."""

    def __init__(self, tensors: Mapping[Tensor, Tensor], mesh: Mesh) -> None:
        """Describe them.

        Args:
            tensors: distributed tensors and whole ones, by this rank's part.
            mesh: of the ranks.
        """
        self._shapes = {part: tuple(tensor.shape) for part, tensor in tensors.items()}
        self._divisions = {part: _division(tensor, mesh) for part, tensor in tensors.items()}

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole matrix, or stack of them, of this rank's part."""
        return self._shapes[part]

    def batches(self, parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the `parts` that are exchanged at a time, those of large matrices first."""
        by_group: dict[str, list[Tensor]] = {}
        for part in parts:
            division = self._divisions[part]
            if division is None:
                yield [part]
            else:
                by_group.setdefault(division.group.group_name, []).append(part)
        for members in by_group.values():
            members.sort(key=lambda part: -prod(self._shapes[part]))
            division = self._divisions[members[0]]
            assert division is not None
            size = division.group.size()
            for start in range(0, len(members), size):
                yield members[start : start + size]

    def orthogonalised(self, parts: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's parts of the orthogonalised matrices of which `updates` are its parts.

        Args:
            parts: a batch.
            updates: for each of them, of its shape. All ranks that have the other parts call this.
        """
        divisions = [self._divisions[part] for part in parts]
        if divisions[0] is None:
            return [orthogonalised(update) for update in updates]
        group = divisions[0].group
        rank, size = group.rank(), group.size()
        own = divisions[rank] if rank < len(parts) else None
        sent = [update.numel() for update in updates] + [0] * (size - len(updates))
        received = [0] * size if own is None else own.sizes
        rows = all_to_all(torch.cat([update.flatten() for update in updates]), sent, received, group)
        if own is not None:
            rows = own.split(orthogonalised(own.join(rows)).to(rows.dtype))
        rows = all_to_all(rows, received, sent, group)
        return [
            one.view_as(update) for one, update in zip(torch.split(rows, sent[: len(updates)]), updates, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Division:
    """How the ranks of a group divide one tensor."""

    group: dist.ProcessGroup
    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[tuple[Held, ...], ...]
    """What each rank of the group holds."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each rank's part."""
    start: tuple[int, ...]
    """Of the region that all of them hold together."""
    region: tuple[int, ...]
    """Its shape."""

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank."""
        return [prod(shape) for shape in self.shapes]

    def join(self, rows: Tensor) -> Tensor:
        """Return the region, from the parts of all ranks one after the other."""
        found = rows.new_empty(self.region)
        for own, box in self._pairs(found, rows):
            own.copy_(box)
        return found

    def split(self, region: Tensor) -> Tensor:
        """Return the parts of all ranks one after the other."""
        found = region.new_empty(sum(self.sizes))
        for own, box in self._pairs(region, found):
            box.copy_(own)
        return found

    def _pairs(self, region: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each box as a view of the region, and as one of the parts."""
        for held, shape, piece in zip(self.boxes, self.shapes, torch.split(rows, self.sizes), strict=True):
            for offset, box in Part(self.shape, held, piece.view(shape)).boxes().items():
                place = tuple(
                    slice(first - start, first - start + size)
                    for first, start, size in zip(offset, self.start, box.shape, strict=True)
                )
                yield region[place], box


def _division(tensor: Tensor, mesh: Mesh) -> _Division | None:
    """Return how single matrices of `tensor` are divided; None where this rank has whole ones."""
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "the axes of the mesh have names"
    placements, shape = placements_of(tensor, "a matrix"), tuple(tensor.shape)
    dividing = [
        name
        for name, placement in zip(names, placements, strict=True)
        if isinstance(placement, Sharded) and placement.dim >= len(shape) - 2
    ]
    if not dividing:
        return None
    group = mesh.group(dividing[0] if len(dividing) == 1 else MATRICES)
    grid, sizes = tensor.device_mesh.mesh, tuple(tensor.device_mesh.shape)
    places = [tuple((grid == rank).nonzero()[0].tolist()) for rank in dist.get_process_group_ranks(group)]
    boxes = tuple(held_boxes(shape, sizes, place, placements) for place in places)
    every = [held.box for one in boxes for held in one]
    start = tuple(min(box.offset[dim] for box in every) for dim in range(len(shape)))
    end = tuple(max(box.offset[dim] + box.size[dim] for box in every) for dim in range(len(shape)))
    return _Division(
        group,
        shape,
        boxes,
        tuple(local_shape(shape, sizes, place, placements) for place in places),
        start,
        tuple(last - first for first, last in zip(start, end, strict=True)),
    )
