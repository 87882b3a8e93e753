"""Layouts of what travels: codes and scales in the place of each tensor that a recipe quantises.

A source publishes of each of its boxes the codes and the scales that it *owns*: those of the groups whose first element
it holds, so that boxes which tile a tensor publish every scale once. A destination receives the codes of its boxes and
the scales of every group that they touch. Both are ordinary layouts: plans, transports, digests and relays need not
know that anything is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.layout import (
    Box,
    Layout,
    RankLayout,
    Shard,
    TensorSpec,
    check_layout,
    item_bytes,
    packed_offsets,
)
from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.quantise.arrange import Spot, arranged, spot_of
from starling.weightsync.quantise.formats import Format
from starling.weightsync.quantise.recipe import Recipe
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.splits import CompactLayout, Split, make_split

SNAPSHOT: Final = "snapshot"
"""Storage of all that is published: the pieces one after the other, as they lie in a publisher's snapshot."""
CODES, SCALES, TOTAL = 0, 1, 2
"""Parts of a quantised tensor; a tensor that stays as it is has the first only."""
SCALAR: Final = Box(offset=(), size=())


@dataclass(frozen=True)
class Quantisation:
    """What a recipe makes of a model's tensors."""

    specs: tuple[QuantSpec | None, ...]
    """For each original its format; None if it travels as it is."""
    tensors: tuple[TensorSpec, ...]
    """All that travels."""
    first: tuple[int, ...]
    """For each original the index of its codes among `tensors`; scales, and the tensor's own scale, come next."""
    scale_of: tuple[int, ...]
    """For each original the index of the first that its own scale, if it has one, is common with."""


class Entry(NamedTuple):
    """One box that a rank publishes or receives."""

    tensor: int
    """Index of the tensor that travels."""
    box: Box
    shard: int
    """Index of the rank's shard that it is made of."""
    part: int
    """`CODES`, `SCALES` or `TOTAL`."""


def quantisation_of(tensors: Sequence[TensorSpec], recipe: Recipe) -> Quantisation:
    """Apply `recipe` to a model's tensors. A tied tensor travels as its owner does.

    Raises:
        WeightsError: a tensor that cannot be quantised as the recipe says.
    """
    by_name = {spec.name: spec for spec in tensors}
    specs: list[QuantSpec | None] = []
    travelling: list[TensorSpec] = []
    first: list[int] = []
    scales: dict[tuple[str, Format | None], int] = {}
    scale_of: list[int] = []
    for index, spec in enumerate(tensors):
        owner = by_name.get(spec.same_as, spec)
        form = recipe.format_of(owner)
        made = None if form is None else QuantSpec(tensor=spec, format=form)
        specs.append(made)
        scale_of.append(scales.setdefault((recipe.scale_of(owner.name), form), index))
        first.append(len(travelling))
        if form is None or made is None:
            travelling.append(spec)
            continue
        owners = QuantSpec(tensor=owner, format=form).tensors()
        for part, own in zip(made.tensors(), owners, strict=True):
            travelling.append(msgspec.structs.replace(part, same_as=own.name if spec.same_as else ""))
    return Quantisation(specs=tuple(specs), tensors=tuple(travelling), first=tuple(first), scale_of=tuple(scale_of))


def published_layout(layout: Layout, recipe: Recipe) -> Layout:
    """Return what the ranks of `layout` publish by `recipe`: codes, and the scales that they own.

    Its storage is the snapshot of each rank, in which every piece is contiguous. Of a tensor that has a scale of its
    own, every rank with a shard of it publishes that scale.

    Raises:
        WeightsError: a layout that is not consistent, a tensor that cannot be quantised as the recipe says, or a box
            that cuts through a byte of codes.
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


def received_layout(layout: Layout, recipe: Recipe) -> Layout:
    """Return what the ranks of `layout`, which describes a destination as if nothing were quantised, receive.

    Codes lie as the originals do, in storages of the same names. Scales lie in storages named as the codes' with the
    format's suffix: one beside the other as the boxes in the original storage, without gaps, so that fused and stacked
    parameters have fused and stacked scales. Four-bit codes lie likewise, in pairs. The scales of whole tensors lie in
    a row, in the order of the shards. An engine that keeps them otherwise is described by a `Layout` of its own.

    Raises:
        WeightsError: as `published_layout`; or a storage that holds tensors of several formats, or none in rows.
    """
    check_layout(layout)
    made = quantisation_of(layout.tensors, recipe)
    ranks = (
        RankLayout(place=held.place, shards=_received_shards(layout, rank, made))
        for rank, held in enumerate(layout.ranks)
    )
    return Layout(replica=layout.replica, tensors=made.tensors, ranks=tuple(ranks), base=layout.base)


def published_splits(layout: CompactLayout, recipe: Recipe) -> CompactLayout:
    """Return `published_layout` in the planner's columns, for a layout that follows from a model and a parallelism.

    Raises:
        WeightsError: as `published_layout`.
    """
    return _quantised_splits(layout, recipe, QuantSpec.owned_scale_box)


def received_splits(layout: CompactLayout, recipe: Recipe) -> CompactLayout:
    """Return `received_layout` in the planner's columns; as `published_splits`."""
    return _quantised_splits(layout, recipe, QuantSpec.scale_box)


def published_entries(shards: Sequence[Shard], made: Quantisation) -> list[Entry]:
    """Return the boxes that a rank with `shards` publishes, in the order of its snapshot."""
    return _entries(shards, made, QuantSpec.owned_scale_box)


def _entries(shards: Sequence[Shard], made: Quantisation, scales: Callable[[QuantSpec, Box], Box]) -> list[Entry]:
    """Return the boxes in the order of the tensors; of a tensor in the order of the shards."""
    entries: list[Entry] = []
    seen: set[int] = set()
    for index, shard in enumerate(shards):
        spec, first = made.specs[shard.tensor], made.first[shard.tensor]
        if spec is None:
            entries.append(Entry(first, shard.box, index, CODES))
            continue
        entries.append(Entry(first, spec.packed_box(shard.box), index, CODES))
        entries.append(Entry(first + SCALES, scales(spec, shard.box), index, SCALES))
        if spec.format.two_level and shard.tensor not in seen:
            entries.append(Entry(first + TOTAL, SCALAR, index, TOTAL))
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


def _format_of_storage(layout: Layout, shards: Iterable[Shard], made: Quantisation) -> Format | None:
    """Return the one format of all that a storage holds."""
    owners: dict[Format | None, Shard] = {}
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
    layout: Layout, members: Mapping[int, Shard], form: Format | None, boxes: Mapping[tuple[int, int], Box]
) -> Iterator[tuple[tuple[int, int], Spot]]:
    """Yield where the parts of a storage's shards lie, by shard and part."""
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


def _quantised_splits(layout: CompactLayout, recipe: Recipe, scales: Callable[[QuantSpec, Box], Box]) -> CompactLayout:
    assert not layout.orders, "a layout that follows from a model has its shards in order"
    made = quantisation_of(layout.tensors, recipe)
    splits: dict[bytes, Split] = {}  # equal ones once: different shapes can have grids that are split alike
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


def _parts_of_split(split: Split, spec: QuantSpec, scales: Callable[[QuantSpec, Box], Box]) -> tuple[Split, ...]:
    """Return the splits of a tensor's codes, scales, and scale of its own if it has one."""
    rows = [split.box(row) for row in range(len(split.rank))]
    parts = ((spec.packed_shape, map(spec.packed_box, rows)), (spec.grid, (scales(spec, box) for box in rows)))
    made: list[Split] = []
    for shape, mapped in parts:
        boxes = list(mapped)
        made.append(make_split(shape, split.rank, [box.offset for box in boxes], [box.size for box in boxes]))
    if spec.format.two_level:
        holders = np.unique(split.rank)
        made.append(make_split((), holders, (), ()))
    return tuple(made)
