"""Quantisation of tensors and their shards; any split gives the bits of quantising the whole tensor.

A box is processed in tiles of whole runs of groups that fit the CPU cache. Ranks that share a cut group exchange only
the largest magnitude (amax) of each scale group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import contains, intersection
from starling.weightsync.plan.layout import Box
from starling.weightsync.quantise.spec import QuantSpec, Run
from starling.weightsync.tensors.codes import decode, encode, global_scale_of, scales_of, values_of_bytes

CPU_TILE: Final = 1 << 18
"""Elements of a tile on the CPU: a few float32 tiles fit the cache."""
DEVICE_TILE: Final = 1 << 26
"""Elements of a tile elsewhere: bounds the working memory to a few float32 copies of a tile."""


class Tile(NamedTuple):
    """Part of a folded tensor in which every group has the same size, and its part of the folded grid."""

    elements: tuple[slice, slice, slice]
    groups: tuple[slice, slice, slice]
    blocks: tuple[int, int, int, int, int]
    """The tile's shape, its rows and columns split by group: leads, groups, rows of each, groups, columns of each."""


def check_shard(shard: torch.Tensor, box: Box, spec: QuantSpec) -> None:
    """Check that `shard` can be `box` of the tensor.

    Raises:
        WeightsError: another shape or element type, or a box outside the tensor.
    """
    spec.check_box(box)
    dtype = str(shard.dtype).removeprefix("torch.")
    if dtype != spec.tensor.dtype or tuple(shard.shape) != box.size:
        raise WeightsError(
            f"Tensor {spec.tensor.name} has a shard of {dtype} {tuple(shard.shape)}; "
            f"box {box} is {spec.tensor.dtype} {box.size}."
        )


def folded(tensor: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return a tensor of any number of dims as one of three: leads, rows and columns.

    Dims in which groups have size 1 are folded, so that few loops cover many elements. A view if the strides allow it.
    """
    if spec.format.rows == 1:
        return tensor.reshape(1, -1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty((1, 0, 0))
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.numel() else tensor.new_empty((0, 0, 0))


def tiles(box: Box, spec: QuantSpec, device: torch.device) -> Iterator[Tile]:
    """Yield tiles that cover `box`, folded."""
    if not box.volume:
        return
    limit = CPU_TILE if device.type == "cpu" else DEVICE_TILE
    if spec.format.rows == 1:
        leads = 1
        rows = box.volume // box.size[-1]
        row_runs = [Run(begin=0, first_group=0, groups=rows, length=1)]
    else:
        leads = box.volume // (box.size[-1] * box.size[-2])
        row_runs = list(spec.runs(box, -2))
    for row_run in row_runs:
        for column_run in spec.runs(box, -1):
            yield from _tiles_of_runs(leads, row_run, column_run, limit)


def _tiles_of_runs(leads: int, row_run: Run, column_run: Run, limit: int) -> Iterator[Tile]:
    # As many columns as fit, then rows, then leads.
    columns_step = min(column_run.groups, max(1, limit // (row_run.length * column_run.length)))
    rows_step = min(row_run.groups, max(1, limit // (row_run.length * columns_step * column_run.length)))
    leads_step = max(1, limit // (rows_step * row_run.length * columns_step * column_run.length))
    for lead in range(0, leads, leads_step):
        lead_end = min(leads, lead + leads_step)
        for row in range(0, row_run.groups, rows_step):
            num_rows = min(rows_step, row_run.groups - row)
            for column in range(0, column_run.groups, columns_step):
                num_columns = min(columns_step, column_run.groups - column)
                yield Tile(
                    elements=(
                        slice(lead, lead_end),
                        _elements(row_run, row, num_rows),
                        _elements(column_run, column, num_columns),
                    ),
                    groups=(
                        slice(lead, lead_end),
                        slice(row_run.first_group + row, row_run.first_group + row + num_rows),
                        slice(column_run.first_group + column, column_run.first_group + column + num_columns),
                    ),
                    blocks=(lead_end - lead, num_rows, row_run.length, num_columns, column_run.length),
                )


def _elements(run: Run, group: int, num_groups: int) -> slice:
    begin = run.begin + group * run.length
    return slice(begin, begin + num_groups * run.length)


@dataclass(frozen=True)
class Amax:
    """Largest magnitudes of the groups of one box of the grid."""

    box: Box
    groups: torch.Tensor
    """float32, of the box's size; exact for every element type that can be quantised."""
    total: torch.Tensor | None
    """float32 scalar: largest magnitude of the tensor, as far as known; None unless the format has two levels.

    For tensors that an engine fuses under one scale it is the largest of all of them.
    """

    def part(self, box: Box) -> Amax:
        """Return the groups of `box`, as a view, for another rank.

        Raises:
            WeightsError: `box` has groups outside this one.
        """
        if not contains(self.box, box):
            raise WeightsError(f"The maxima of groups {box} were requested, but only those of {self.box} are known.")
        groups = self.groups
        for dim, (origin, begin, n) in enumerate(zip(self.box.offset, box.offset, box.size, strict=True)):
            groups = groups.narrow(dim, begin - origin, n)
        return Amax(box=box, groups=groups, total=self.total)

    def without_groups(self) -> Amax:
        """Return only the total, which all ranks exchange for a two-level format."""
        nothing = Box(offset=self.box.offset, size=(0,) * len(self.box.size))
        return Amax(box=nothing, groups=self.groups.new_empty(nothing.size), total=self.total)


def partial_amax(shard: torch.Tensor, box: Box, spec: QuantSpec) -> Amax:
    """Return the largest magnitude of `shard`, which is `box` of the tensor, in each group that it intersects.

    Raises:
        WeightsError: a shard that is not `box`, or an infinite or NaN element.
    """
    check_shard(shard, box, spec)
    grid = spec.scale_box(box)
    shard = shard.detach()
    groups = torch.zeros(grid.size, dtype=torch.float32, device=shard.device)
    source, target = folded(shard, spec), folded(groups, spec)
    # Magnitudes of IEEE numbers are ordered as their bits, and integers reduce several times faster. Infinities and
    # NaNs are largest, so the maxima show whether there is any.
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
    """Return the elementwise maximum of `own` and `others` for the groups of `own` and the total, in any order.

    Raises:
        WeightsError: maxima of another grid, or of formats with and without a scale of the whole tensor.
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
        "check the last training step."
    )


@dataclass(frozen=True)
class Quantised:
    """Codes and scales of a box of a tensor: `packed_box` and `scale_box` of it."""

    data: torch.Tensor
    """`packed_dtype`, contiguous."""
    scales: torch.Tensor
    """The format's `scale_dtype`, contiguous; of a group that the box cuts, the scale of the whole group."""
    global_scale: torch.Tensor | None
    """float32 scalar: the scale of the whole tensor in a two-level format, else None."""


def empty_quantised(
    box: Box, spec: QuantSpec, device: torch.device | str = "cpu", data: torch.Tensor | None = None
) -> Quantised:
    """Return uninitialised memory for `box`; `data`, if given, is used for the codes."""
    if data is None:
        data = torch.empty(spec.packed_box(box).size, dtype=getattr(torch, spec.packed_dtype), device=device)
    return Quantised(
        data=data,
        scales=torch.empty(spec.scale_box(box).size, dtype=getattr(torch, spec.format.scale_dtype), device=device),
        global_scale=torch.empty((), dtype=torch.float32, device=device) if spec.format.two_level else None,
    )


def quantise(tensor: torch.Tensor, spec: QuantSpec, out: Quantised | None = None) -> Quantised:
    """Quantise a whole tensor, into `out` if given. It may have any strides.

    Raises:
        WeightsError: a tensor or `out` that does not fit `spec`, or an infinite or NaN element.
    """
    box = _whole(spec)
    return quantise_with(tensor, box, partial_amax(tensor, box, spec), spec, out)


def quantise_with(
    shard: torch.Tensor, box: Box, amax: Amax, spec: QuantSpec, out: Quantised | None = None
) -> Quantised:
    """Quantise `shard`, which is `box` of the tensor, by the maxima of whole groups, into `out` if given.

    `amax` is this rank's `partial_amax`, combined with those of the ranks that share its groups (and, for a two-level
    format, of all ranks). Temporary memory: a few float32 tiles.

    Raises:
        WeightsError: a shard, `amax` or `out` that does not fit `box`, or a box that cuts through a byte of codes.
    """
    check_shard(shard, box, spec)
    if spec.format.two_level and amax.total is None:
        raise WeightsError(
            f"The maxima for tensor {spec.tensor.name} lack that of the whole tensor; {spec.format.name} needs it."
        )
    amax = amax.part(spec.scale_box(box))
    if out is None:
        out = empty_quantised(box, spec, shard.device)
    else:
        _check_out(out, box, spec)
    global_scale = None
    if out.global_scale is not None and amax.total is not None:
        global_scale = global_scale_of(amax.total.to(shard.device), spec.format)
        out.global_scale.copy_(global_scale)
    source, data, stored = folded(shard.detach(), spec), folded(out.data, spec), folded(out.scales, spec)
    groups = folded(amax.groups.to(shard.device), spec)
    for tile in tiles(box, spec, shard.device):
        scales = scales_of(groups[tile.groups], global_scale, spec.format, shard.dtype)
        stored[tile.groups] = scales.stored
        scaled = source[tile.elements].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        blocks, factor = scaled.view(tile.blocks), scales.factor[:, :, None, :, None]
        if scales.divide:
            blocks.div_(factor)
        else:
            blocks.mul_(factor)
        data[(*tile.elements[:2], _packed(tile.elements[2], spec))] = encode(scaled, spec.format)
    return out


def dequantise(
    quantised: Quantised, spec: QuantSpec, box: Box | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of `box` (of all, if None): code x scale in float32, then rounded to `dtype`.

    Raises:
        WeightsError: a `quantised` that does not fit `box`.
    """
    box = box or _whole(spec)
    _check_out(quantised, box, spec)
    result = torch.empty(box.size, dtype=dtype, device=quantised.data.device)
    scales = quantised.scales.float()
    if quantised.global_scale is not None:
        scales = quantised.global_scale * scales
    data, factor, target = folded(quantised.data, spec), folded(scales, spec), folded(result, spec)
    values = values_of_bytes(spec.format, data.device)
    for tile in tiles(box, spec, data.device):
        columns = tile.elements[2]
        packed = data[(*tile.elements[:2], _packed(columns, spec))]
        decoded = decode(packed, values, columns.stop - columns.start)
        blocks = decoded.reshape(tile.blocks) * factor[tile.groups][:, :, None, :, None]
        target[tile.elements] = blocks.view(decoded.shape)
    return result


def _whole(spec: QuantSpec) -> Box:
    return Box(offset=(0,) * len(spec.tensor.shape), size=spec.tensor.shape)


def _packed(columns: slice, spec: QuantSpec) -> slice:
    """Return the bytes or codes of packed data that contain `columns`; paired codes begin at an even column."""
    per_byte = spec.format.codes_per_byte
    return slice(columns.start // per_byte, -(-columns.stop // per_byte))


def _check_out(out: Quantised, box: Box, spec: QuantSpec) -> None:
    expected = [(spec.packed_box(box).size, spec.packed_dtype), (spec.scale_box(box).size, spec.format.scale_dtype)]
    for tensor, (size, dtype) in zip((out.data, out.scales), expected, strict=True):
        found = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), found) != (size, dtype) or not tensor.is_contiguous():
            raise WeightsError(
                f"Box {box} of tensor {spec.tensor.name} in {spec.format.name} is {dtype} {size}, contiguous; "
                f"got {found} {tuple(tensor.shape)}."
            )
    if (out.global_scale is None) == spec.format.two_level:
        raise WeightsError(
            f"Tensor {spec.tensor.name} in {spec.format.name} has {'a' if spec.format.two_level else 'no'} scale of "
            "the whole tensor."
        )
