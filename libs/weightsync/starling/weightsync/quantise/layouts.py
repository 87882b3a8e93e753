"""Layouts of quantised tensors: codes and scales in place of each tensor that a recipe quantises.

A source publishes for each of its boxes the codes and the scales that it *owns*: those of the groups whose first
element it holds, so that boxes which tile a tensor publish every scale once. A destination receives the codes of its
boxes and the scales of every group that they intersect. Both are ordinary layouts: plans, transports, digests and
relays do not depend on quantisation. Quantised parts of fused parameters are arranged as their originals, without gaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.compact import CompactLayout, TensorSplit, make_tensor_split
from starling.weightsync.plan.layout import (
    Box,
    Layout,
    RankLayout,
    Shard,
    TensorSpec,
    check_layout,
    item_bytes,
    packed_offsets,
)
from starling.weightsync.quantise.formats import FORMATS, QuantFormat
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.quantise.spec import QuantSpec


class Spot(NamedTuple):
    """Position of a box in memory, in elements of its own type."""

    storage: str
    offset: int
    strides: tuple[int, ...]


def spot_of(layout: Layout, shard: Shard) -> Spot:
    """Return the position of `shard`."""
    return Spot(shard.storage, shard.offset_bytes // item_bytes(layout.tensors[shard.tensor]), shard.strides)


def arranged(layout: Layout, shards: Sequence[Shard], sizes: Sequence[tuple[int, ...]]) -> list[Spot]:
    """Return positions for boxes of `sizes` that are arranged as the shards of one storage.

    Each dim of the storage is cut where a shard begins; an interval becomes as long as the longest new box in it.
    Disjoint shards become disjoint boxes; if the shards fill the storage like a grid, as in fused and stacked
    parameters, the boxes fill theirs.

    Raises:
        WeightsError: shards of different strides, or that extend from one row into the next.
    """
    order = _outermost_first(layout, shards)
    indices = [_index(layout, shard, order) for shard in shards]
    begins: list[dict[int, int]] = []
    lengths: list[int] = []
    for dim in range(len(order)):
        intervals: dict[int, int] = {}
        for index, size in zip(indices, sizes, strict=True):
            intervals[index[dim]] = max(intervals.get(index[dim], 0), size[dim])
        end, begin = 0, {}
        for at in sorted(intervals):
            begin[at] = end
            end += intervals[at]
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
        f"Box {shard.box} of {layout.tensors[shard.tensor].name} is not in rows of storage {shard.storage} of "
        f"{layout.replica}, so the position of its scales is undefined; give that layout shard by shard."
    )


SNAPSHOT: Final = "snapshot"
"""Storage of all published pieces, one after another, as in a publisher's snapshot."""
CODES, SCALES, TOTAL = 0, 1, 2
"""Parts of a quantised tensor; a tensor that is not quantised has the first only."""
SCALAR: Final = Box(offset=(), size=())


@dataclass(frozen=True)
class Quantisation:
    """A recipe applied to a model's tensors."""

    specs: tuple[QuantSpec | None, ...]
    """For each original its quantised form; None if it is not quantised."""
    tensors: tuple[TensorSpec, ...]
    """All tensors that are sent."""
    first: tuple[int, ...]
    """For each original the index of its codes in `tensors`; the scales, and the whole tensor's scale, come next."""
    scale_of: tuple[int, ...]
    """For each original the index of the first tensor with which it shares the whole tensor's scale, if it has one."""


class PublishedEntry(NamedTuple):
    """One box that a rank publishes or receives."""

    tensor: int
    """Index of the sent tensor."""
    box: Box
    shard: int
    """Index of the rank's shard that it is made from."""
    part: int
    """`CODES`, `SCALES` or `TOTAL`."""


def quantisation_of(tensors: Sequence[TensorSpec], recipe: QuantRecipe) -> Quantisation:
    """Apply `recipe` to a model's tensors. A tied tensor is treated as its owner.

    Raises:
        WeightsError: a tensor that the recipe cannot quantise.
    """
    by_name = {spec.name: spec for spec in tensors}
    specs: list[QuantSpec | None] = []
    sent: list[TensorSpec] = []
    first: list[int] = []
    scales: dict[tuple[str, QuantFormat | None], int] = {}
    scale_of: list[int] = []
    for index, spec in enumerate(tensors):
        owner = by_name.get(spec.same_as, spec)
        form = recipe.format_of(owner)
        made = None if form is None else QuantSpec(tensor=spec, format=form)
        specs.append(made)
        scale_of.append(scales.setdefault((recipe.scale_of(owner.name), form), index))
        first.append(len(sent))
        if form is None or made is None:
            sent.append(spec)
            continue
        owners = QuantSpec(tensor=owner, format=form).tensors()
        for part, own in zip(made.tensors(), owners, strict=True):
            sent.append(msgspec.structs.replace(part, same_as=own.name if spec.same_as else ""))
    return Quantisation(specs=tuple(specs), tensors=tuple(sent), first=tuple(first), scale_of=tuple(scale_of))


def published_layout(layout: Layout, recipe: QuantRecipe) -> Layout:
    """Return the layout that the ranks of `layout` publish by `recipe`: codes, and the scales that they own.

    Its storage is the snapshot of each rank, in which every piece is contiguous. The scale of a whole tensor is
    published by every rank with a shard of it.

    Raises:
        WeightsError: an inconsistent layout, a tensor that the recipe cannot quantise, or a box that cuts through a
            byte of codes.
    """
    check_layout(layout)
    made = quantisation_of(layout.tensors, recipe)
    ranks: list[RankLayout] = []
    for held in layout.ranks:
        entries = published_entries(held.shards, made)
        specs = [made.tensors[entry.tensor] for entry in entries]
        sizes = (entry.box.volume * item_bytes(spec) for entry, spec in zip(entries, specs, strict=True))
        offsets, _ = packed_offsets(sizes)
        shards = tuple(
            Shard(
                tensor=entry.tensor,
                box=entry.box,
                storage=SNAPSHOT,
                offset_bytes=offset,
                strides=contiguous(entry.box.size),
            )
            for entry, offset in zip(entries, offsets, strict=True)
        )
        ranks.append(RankLayout(place=held.place, shards=shards))
    return Layout(replica=layout.replica, tensors=made.tensors, ranks=tuple(ranks), base=layout.base)


def received_layout(layout: Layout, recipe: QuantRecipe) -> Layout:
    """Return the layout that the ranks of `layout`, which describes an unquantised destination, receive by `recipe`.

    Codes are placed as the originals, in storages of the same names. Scales are in storages with the codes' names and
    the format's suffix, arranged as the boxes in the original storage, without gaps, so that fused and stacked
    parameters have fused and stacked scales. Four-bit codes are arranged likewise, in pairs. The scales of whole
    tensors are in a row, in the order of the shards. An engine with another arrangement needs a `Layout` of its own.

    Raises:
        WeightsError: as `published_layout`; or a storage that holds tensors of several formats, or not in rows.
    """
    check_layout(layout)
    made = quantisation_of(layout.tensors, recipe)
    ranks = (
        RankLayout(place=held.place, shards=_received_shards(layout, rank, made))
        for rank, held in enumerate(layout.ranks)
    )
    return Layout(replica=layout.replica, tensors=made.tensors, ranks=tuple(ranks), base=layout.base)


def published_splits(layout: CompactLayout, recipe: QuantRecipe) -> CompactLayout:
    """Return `published_layout` in compact form, for a layout that follows from a model and a parallelism.

    Raises:
        WeightsError: as `published_layout`.
    """
    return _quantised_splits(layout, recipe, QuantSpec.owned_scale_box)


def received_splits(layout: CompactLayout, recipe: QuantRecipe) -> CompactLayout:
    """Return `received_layout` in compact form; as `published_splits`."""
    return _quantised_splits(layout, recipe, QuantSpec.scale_box)


def published_entries(shards: Sequence[Shard], made: Quantisation) -> list[PublishedEntry]:
    """Return the boxes that a rank with `shards` publishes, in the order of its snapshot."""
    return _entries(shards, made, QuantSpec.owned_scale_box)


def _entries(
    shards: Sequence[Shard], made: Quantisation, scales: Callable[[QuantSpec, Box], Box]
) -> list[PublishedEntry]:
    """Return the boxes in the order of the tensors, then of the shards."""
    entries: list[PublishedEntry] = []
    seen: set[int] = set()
    for index, shard in enumerate(shards):
        spec, first = made.specs[shard.tensor], made.first[shard.tensor]
        if spec is None:
            entries.append(PublishedEntry(first, shard.box, index, CODES))
            continue
        entries.append(PublishedEntry(first, spec.packed_box(shard.box), index, CODES))
        entries.append(PublishedEntry(first + SCALES, scales(spec, shard.box), index, SCALES))
        if spec.format.two_level and shard.tensor not in seen:
            entries.append(PublishedEntry(first + TOTAL, SCALAR, index, TOTAL))
            seen.add(shard.tensor)
    return sorted(entries, key=lambda entry: entry.tensor)


def _received_shards(layout: Layout, rank: int, made: Quantisation) -> tuple[Shard, ...]:
    shards = layout.ranks[rank].shards
    entries = _entries(shards, made, QuantSpec.scale_box)
    boxes = {(entry.shard, entry.part): entry.box for entry in entries}
    storages: dict[str, dict[int, Shard]] = {}
    for index, shard in enumerate(shards):
        storages.setdefault(shard.storage, {})[index] = shard
    where: dict[tuple[int, int], Spot] = {}
    for members in storages.values():
        form = _format_of_storage(layout, members.values(), made)
        where.update(_spots(layout, members, form, boxes))
    found: list[Shard] = []
    for entry in entries:
        spot, spec = where[entry.shard, entry.part], made.tensors[entry.tensor]
        found.append(
            Shard(
                tensor=entry.tensor,
                box=entry.box,
                storage=spot.storage,
                offset_bytes=spot.offset * item_bytes(spec),
                strides=spot.strides,
            )
        )
    return tuple(found)


def _format_of_storage(layout: Layout, shards: Iterable[Shard], made: Quantisation) -> QuantFormat | None:
    """Return the single format of the tensors in a storage."""
    owners: dict[QuantFormat | None, Shard] = {}
    for shard in shards:
        spec = made.specs[shard.tensor]
        owners.setdefault(spec.format if spec else None, shard)
    if len(owners) > 1:
        one, other, *_ = owners.values()
        raise WeightsError(
            f"Storage {one.storage} of {layout.replica} holds {layout.tensors[one.tensor].name} and "
            f"{layout.tensors[other.tensor].name}, which the recipe puts into different formats; change the recipe."
        )
    return next(iter(owners))


def _spots(
    layout: Layout, members: Mapping[int, Shard], form: QuantFormat | None, boxes: Mapping[tuple[int, int], Box]
) -> Iterator[tuple[tuple[int, int], Spot]]:
    """Yield the positions of the parts of a storage's shards, by shard and part."""
    parts = {CODES: ""} if form is None else {CODES: "", SCALES: form.scale_suffix}
    for part, suffix in parts.items():
        if part == CODES and (form is None or form.codes_per_byte == 1):
            spots = [spot_of(layout, shard) for shard in members.values()]
        else:
            spots = arranged(layout, [*members.values()], [boxes[index, part].size for index in members])
        for index, spot in zip(members, spots, strict=True):
            yield (index, part), spot._replace(storage=spot.storage + suffix)
    totals = [index for index in members if (index, TOTAL) in boxes]
    for number, index in enumerate(totals):
        assert form is not None
        yield (index, TOTAL), Spot(f"{members[index].storage}{form.scale_suffix}_2", number, ())


def _quantised_splits(
    layout: CompactLayout, recipe: QuantRecipe, scales: Callable[[QuantSpec, Box], Box]
) -> CompactLayout:
    assert not layout.orders, "a layout that follows from a model has its shards in order"
    made = quantisation_of(layout.tensors, recipe)
    splits: dict[bytes, TensorSplit] = {}  # equal ones once: grids of different shapes can be split alike
    known: dict[object, tuple[bytes, ...]] = {}
    split_of: list[bytes] = []
    for spec, index in zip(made.specs, layout.split_of.tolist(), strict=True):
        kind = (index, spec and spec.format)
        if kind not in known:
            new = (layout.splits[index],) if spec is None else _parts_of_split(layout.splits[index], spec, scales)
            known[kind] = tuple(split.key for split in new)
            splits.update(zip(known[kind], new, strict=True))
        split_of.extend(known[kind])
    numbers = {key: number for number, key in enumerate(splits)}
    return CompactLayout(
        replica=layout.replica,
        tensors=made.tensors,
        places=layout.places,
        splits=tuple(splits.values()),
        split_of=np.array([numbers[key] for key in split_of], np.int64),
        base=layout.base,
    )


def _parts_of_split(
    split: TensorSplit, spec: QuantSpec, scales: Callable[[QuantSpec, Box], Box]
) -> tuple[TensorSplit, ...]:
    """Return the splits of a tensor's codes, scales, and scale of its own if it has one."""
    rows = [split.box(row) for row in range(len(split.rank))]
    parts = ((spec.packed_shape, map(spec.packed_box, rows)), (spec.grid, (scales(spec, box) for box in rows)))
    made: list[TensorSplit] = []
    for shape, mapped in parts:
        boxes = list(mapped)
        made.append(make_tensor_split(shape, split.rank, [box.offset for box in boxes], [box.size for box in boxes]))
    if spec.format.two_level:
        holders = np.unique(split.rank)
        made.append(make_tensor_split((), holders, (), ()))
    return tuple(made)


FUSED_MODULES: Final = (
    (re.compile(r"\.experts\.\d+\.\w+$"), ".experts"),
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)$"), ".fused_qkv_a_proj"),
)
"""Modules of a checkpoint that vLLM fuses into one layer."""


def packing_bytes(layout: CompactLayout) -> Ints:
    """Return the bytes of the largest quantised layer of each rank, which repacking needs; shape (ranks,).

    Layers are those of vLLM: projections that it fuses are one, and so are all routed experts of a block.
    """
    ends = tuple({form.scale_suffix for form in FORMATS.values()})
    layers = [_layer(spec.name.rpartition(".")[0]) for spec in layout.tensors]
    held = {
        layer: np.zeros(len(layout.places), np.int64)
        for layer, spec in zip(layers, layout.tensors, strict=True)
        if spec.name.endswith(ends)
    }
    for layer, index, size in zip(layers, layout.split_of.tolist(), layout.item_bytes.tolist(), strict=True):
        if layer in held:
            split = layout.splits[index]
            np.add.at(held[layer], split.rank, split.volume * size)
    return np.max([*held.values()], axis=0) if held else np.zeros(len(layout.places), np.int64)


@lru_cache(maxsize=4096)
def _layer(module: str) -> str:
    for pattern, instead in FUSED_MODULES:
        module = pattern.sub(instead, module)
    return module
