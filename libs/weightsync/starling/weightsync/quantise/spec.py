"""Geometry of a quantised tensor: scale groups, packed shapes, and the boxes that follow from a box of the original.

A format shares one scale among the elements of a *group*: a tile of the last two dims (of the last dim only, for most
formats). The *grid* of a tensor has one cell per group and is the shape of its scales. Groups are counted from the
tensor's first element. Where a size is no multiple of the group, the last group is shorter; nothing is padded, and the
numbers equal those of a tensor that is padded with zeros and cut afterwards. Four-bit codes are packed in pairs along
the last dim, the even element in the low bits; the last byte of an odd row has zero in its high bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.boxes import BoxIndex
from starling.weightsync.plan.layout import Box, TensorSpec
from starling.weightsync.quantise.formats import QuantFormat

SOURCE_DTYPES: Final = ("bfloat16", "float16", "float32")
"""Element types that can be quantised."""


class Run(NamedTuple):
    """Neighbouring groups of one length along one dim of a box; positions count from the begin of the box."""

    begin: int
    first_group: int
    groups: int
    length: int


class Exchange(NamedTuple):
    """Rank `destination` needs the partial maxima of `source` for `groups`, a box of the grid."""

    destination: int
    source: int
    groups: Box


class QuantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in one format.

    Raises:
        WeightsError: an element type that cannot be quantised, or too few dims for the format.
    """

    tensor: TensorSpec
    """The original."""
    format: QuantFormat

    def __post_init__(self) -> None:
        if self.tensor.dtype not in SOURCE_DTYPES:
            raise WeightsError(
                f"Tensor {self.tensor.name} is {self.tensor.dtype}; to be quantised it must be one of "
                f"{', '.join(SOURCE_DTYPES)}."
            )
        num_dims = 1 if self.format.rows == 1 else 2
        if len(self.tensor.shape) < num_dims:
            raise WeightsError(
                f"Tensor {self.tensor.name} has shape {self.tensor.shape}; format {self.format.name} needs at least "
                f"{num_dims} dims."
            )

    @property
    def group(self) -> tuple[int, ...]:
        """Size of a group, per dim."""
        shape = self.tensor.shape
        last = (self.format.rows, self.format.columns or max(1, shape[-1]))
        return ((1,) * (len(shape) - 2) + last)[-len(shape) :]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of groups per dim: the shape of the scales."""
        return tuple(-(-n // g) for n, g in zip(self.tensor.shape, self.group, strict=True))

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed codes."""
        *rest, last = self.tensor.shape
        return (*rest, -(-last // self.format.codes_per_byte))

    @property
    def packed_dtype(self) -> str:
        """Element type of the packed codes; pairs of four-bit codes are bytes."""
        return "uint8" if self.format.codes_per_byte == 2 else self.format.element

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors that replace the original: codes, scales, and the whole tensor's scale if there is one."""
        name = self.tensor.name
        codes = TensorSpec(name=name, shape=self.packed_shape, dtype=self.packed_dtype)
        scale_name = name + self.format.scale_suffix
        scales = TensorSpec(name=scale_name, shape=self.grid, dtype=self.format.scale_dtype)
        if not self.format.two_level:
            return codes, scales
        return codes, scales, TensorSpec(name=f"{scale_name}_2", shape=(), dtype="float32")

    def check_box(self, box: Box) -> None:
        """Check that `box` lies inside the original.

        Raises:
            WeightsError: it does not.
        """
        shape = self.tensor.shape
        if not len(box.offset) == len(box.size) == len(shape) or any(
            begin < 0 or n < 0 or begin + n > extent
            for begin, n, extent in zip(box.offset, box.size, shape, strict=True)
        ):
            raise WeightsError(f"Box {box} leaves tensor {self.tensor.name} of shape {shape}.")

    def packed_box(self, box: Box) -> Box:
        """Return the box of the packed codes that contains the elements of `box`.

        Raises:
            WeightsError: `box` begins or ends inside a byte.
        """
        self.check_box(box)
        per_byte = self.format.codes_per_byte
        begin, n = box.offset[-1], box.size[-1]
        end = begin + n
        if n and (begin % per_byte or (end % per_byte and end != self.tensor.shape[-1])):
            raise WeightsError(
                f"Box {box} of tensor {self.tensor.name} cuts through a byte of {self.format.name} codes; "
                "split its last dim at even elements."
            )
        packed = begin // per_byte
        size = -(-end // per_byte) - packed if n else 0
        return Box(offset=(*box.offset[:-1], packed), size=(*box.size[:-1], size))

    def scale_box(self, box: Box) -> Box:
        """Return the groups that intersect `box`: the scales that its reader needs."""
        self.check_box(box)
        return _grid_box(
            (begin // g, -(-(begin + n) // g) if n else begin // g)
            for begin, n, g in zip(box.offset, box.size, self.group, strict=True)
        )

    def owned_scale_box(self, box: Box) -> Box:
        """Return the groups whose first element is in `box`.

        Boxes that tile the tensor own every group exactly once: the publisher of `box` publishes these scales.
        """
        self.check_box(box)
        return _grid_box(
            (-(-begin // g), -(-(begin + n) // g)) for begin, n, g in zip(box.offset, box.size, self.group, strict=True)
        )

    def element_box(self, groups: Box) -> Box:
        """Return the elements of `groups`, a box of the grid."""
        return _grid_box(
            (begin * g, max(begin * g, min((begin + n) * g, extent)))
            for begin, n, g, extent in zip(groups.offset, groups.size, self.group, self.tensor.shape, strict=True)
        )

    def cut_groups(self, box: Box) -> tuple[Box, ...]:
        """Return the groups that are partly in `box` and partly outside, as disjoint boxes of the grid.

        Their maxima must be exchanged; without any, `box` can be quantised alone (except for the whole tensor's scale).
        """
        touched = self.scale_box(box)
        if not touched.volume:
            return ()
        whole: list[tuple[int, int]] = []
        for begin, n, g, extent in zip(box.offset, box.size, self.group, self.tensor.shape, strict=True):
            end = begin + n
            whole.append((-(-begin // g), -(-end // g) if end == extent else end // g))
        if any(begin >= end for begin, end in whole):
            return (touched,)
        spans = [(begin, begin + n) for begin, n in zip(touched.offset, touched.size, strict=True)]
        cut: list[Box] = []
        for dim, (begin, end) in enumerate(whole):
            for span in ((spans[dim][0], begin), (end, spans[dim][1])):
                if span[0] < span[1]:
                    cut.append(_grid_box((*spans[:dim], span, *spans[dim + 1 :])))
            spans[dim] = (begin, end)
        return tuple(cut)

    def is_whole(self, box: Box) -> bool:
        """Whether no group is cut by the sides of `box`."""
        return not self.cut_groups(box)

    def exchanges(self, boxes: Sequence[Box]) -> tuple[Exchange, ...]:
        """Return the exchanges of partial maxima if rank i holds `boxes[i]`, in the order of the destinations.

        Ranks with equal boxes are copies and exchange nothing; the lowest of them is the source for others. A two-level
        format also needs the tensor's amax of every rank.
        """
        first: dict[Box, int] = {}
        grid: dict[Box, list[int]] = {}
        for rank, box in enumerate(boxes):
            touched = self.scale_box(box)
            if touched.volume and first.setdefault(box, rank) == rank:
                grid.setdefault(touched, []).append(rank)
        index = BoxIndex(tuple(grid))
        found: list[Exchange] = []
        for rank, box in enumerate(boxes):
            for cut in self.cut_groups(box):
                found.extend(
                    Exchange(rank, source, groups)
                    for position, groups in index.intersecting(cut)
                    for source in grid[index.boxes[position]]
                    if boxes[source] != box
                )
        return tuple(found)

    def runs(self, box: Box, dim: int) -> Iterator[Run]:
        """Yield the groups of `box` along `dim` (-1 or -2) in runs of one length; empty for an empty dim."""
        begin, n, g = box.offset[dim], box.size[dim], self.group[dim]
        origin, end = begin, begin + n
        first = origin // g
        while begin < end:
            ahead = (end - begin) // g if begin % g == 0 else 0
            length = g if ahead else min(end, (begin // g + 1) * g) - begin
            yield Run(begin=begin - origin, first_group=begin // g - first, groups=max(1, ahead), length=length)
            begin += max(1, ahead) * length


def _grid_box(spans: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> Box:
    pairs = tuple(spans)
    return Box(offset=tuple(begin for begin, _ in pairs), size=tuple(end - begin for begin, end in pairs))
