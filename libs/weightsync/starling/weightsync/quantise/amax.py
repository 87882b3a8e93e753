"""The largest magnitude of each scale group: the only thing that ranks must exchange to quantise a cut group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from starling.common.errors import WeightsError
from starling.weightsync.boxes import contains, intersection
from starling.weightsync.layout import Box
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.quantise.tiles import check_shard, folded, tiles


@dataclass(frozen=True)
class Amax:
    """Largest magnitudes of the groups of one box of the grid."""

    box: Box
    groups: torch.Tensor
    """float32, of the box's size; exact for every element type that can be quantised."""
    total: torch.Tensor | None
    """float32 scalar: largest magnitude of the tensor, as far as known; None unless the format has two levels.

    Tensors that an engine keeps fused under one scale are quantised with the largest of theirs in this place.
    """

    def part(self, box: Box) -> Amax:
        """Return the groups of `box`, as a view: what another rank asks for.

        Raises:
            WeightsError: `box` has groups that are not known here.
        """
        if not contains(self.box, box):
            raise WeightsError(f"The maxima of groups {box} are asked for, but only those of {self.box} are here.")
        groups = self.groups
        for dim, (origin, begin, n) in enumerate(zip(self.box.offset, box.offset, box.size, strict=True)):
            groups = groups.narrow(dim, begin - origin, n)
        return Amax(box=box, groups=groups, total=self.total)

    def without_groups(self) -> Amax:
        """Return only what is known of the tensor: what all ranks tell one another for a format of two levels."""
        nothing = Box(offset=self.box.offset, size=(0,) * len(self.box.size))
        return Amax(box=nothing, groups=self.groups.new_empty(nothing.size), total=self.total)


def partial_amax(shard: torch.Tensor, box: Box, spec: QuantSpec) -> Amax:
    """Return the largest magnitude that `shard`, which is `box` of the tensor, has in each group it touches.

    Raises:
        WeightsError: a shard that is not `box`, or an infinite or NaN element.
    """
    check_shard(shard, box, spec)
    grid = spec.scale_box(box)
    shard = shard.detach()
    groups = torch.zeros(grid.size, dtype=torch.float32, device=shard.device)
    source, target = folded(shard, spec), folded(groups, spec)
    # Magnitudes of IEEE numbers are ordered as their bits are, and integers reduce several times faster. Infinities
    # and NaNs come out on top, so the maxima show whether there was any.
    whole, magnitude = (torch.int32, 0x7FFFFFFF) if shard.dtype == torch.float32 else (torch.int16, 0x7FFF)
    for tile in tiles(box, spec, shard.device):
        bits = source[tile.elements].view(whole).bitwise_and(magnitude)
        leads, row_groups, rows, column_groups, columns = tile.blocks
        if rows > 1:
            bits = bits.reshape(leads, row_groups, rows, column_groups * columns).amax(2)
        bits = bits.reshape(leads, row_groups, column_groups, columns).amax(-1)
        target[tile.groups] = bits.view(shard.dtype)
    total = groups.amax() if groups.numel() else groups.new_zeros(())
    if not bool(total.isfinite()):
        _refuse(groups, box, grid, spec)
    return Amax(box=grid, groups=groups, total=total if spec.format.two_level else None)


def combine(own: Amax, others: Iterable[Amax]) -> Amax:
    """Return `own` raised to whatever `others` know of the same groups and of the tensor. Any order gives the same.

    Raises:
        WeightsError: maxima of another grid, or of formats with and without a scale of the tensor.
    """
    groups, total = own.groups.clone(), own.total
    for other in others:
        if len(other.box.offset) != len(own.box.offset) or (other.total is None) != (total is None):
            raise WeightsError(f"The maxima of groups {other.box} and {own.box} are not of one tensor.")
        if total is not None and other.total is not None:
            total = torch.maximum(total, other.total.to(total.device))
        shared = intersection(own.box, other.box)
        if shared is None:
            continue
        view = Amax(box=own.box, groups=groups, total=None).part(shared).groups
        torch.maximum(view, other.part(shared).groups.to(view.device), out=view)
    return Amax(box=own.box, groups=groups, total=total)


def _refuse(groups: torch.Tensor, box: Box, grid: Box, spec: QuantSpec) -> None:
    """Name the first group that has an infinite or NaN element."""
    cell = torch.nonzero(~groups.isfinite())[0].tolist()
    sides = zip(cell, grid.offset, spec.group, box.offset, box.size, strict=True)
    begins, sizes = [], []
    for index, first, g, begin, n in sides:
        low = max(begin, (first + index) * g)
        begins.append(low)
        sizes.append(min(begin + n, (first + index + 1) * g) - low)
    where = Box(offset=tuple(begins), size=tuple(sizes))
    raise WeightsError(
        f"Tensor {spec.tensor.name} has an infinite or NaN element in {where} and cannot be quantised; "
        "look at the last training step."
    )
