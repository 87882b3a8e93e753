"""Walk a box in tiles of whole runs of groups, small enough for the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from starling.common.errors import WeightsError
from starling.weightsync.layout import Box
from starling.weightsync.quantise.spec import QuantSpec, Run

CPU_TILE: Final = 1 << 18
"""Elements of a tile on the CPU: a few tiles of float32 stay in the processor's cache."""
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
    """Return a tensor of any number of dims with three: leads, rows and columns.

    Dims in which groups have size 1 are folded together, so that few loops go over many elements. A view where the
    strides allow it.
    """
    if spec.format.rows == 1:
        return tensor.reshape(1, -1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty((1, 0, 0))
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.numel() else tensor.new_empty((0, 0, 0))


def tiles(box: Box, spec: QuantSpec, device: torch.device) -> Iterator[Tile]:
    """Yield tiles that make up `box`, folded."""
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
