"""Layouts: the boxes of tensors that each rank of a replica holds, and their positions in its memory.

Pure data, serialisable as MessagePack. Offsets and sizes of boxes, shapes and strides count elements; `*_bytes` count
bytes.

Tied tensors (two names for one memory) have one owner: the owner's name has the shards, every further name is a
`TensorSpec` with `same_as` set to the owner and no shards. A destination can request either name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.plan.shard_columns import NO_TENSOR, dims_of, shard_columns

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Supported element types, by torch's name without its prefix, and their sizes in bytes."""

ALIGNMENT: Final = 64
"""Pieces start at multiples of this many bytes, in snapshots, in staging and on the wire alike."""

MAX_DIMS: Final = 32
"""Maximum number of dims of a tensor."""
MAX_NAMES: Final = 64
"""Maximum number of names of a box: those that are tied to its tensor. A source looks each of them up."""
MAX_TENSOR_BYTES: Final = 1 << 48
"""Maximum size of a tensor, and maximum distance in a storage from its start to the end of a shard: 256 TiB."""
MAX_LAYOUT_BYTES: Final = 1 << 56
"""Maximum size of all shards of a layout. All three are far beyond any model: they are there because a peer may send
any number, and plans are computed in 64 bits."""

MAX_LAYOUT_RANKS: Final = 4096
MAX_LAYOUT_TENSORS: Final = 1 << 18
MAX_LAYOUT_BOXES: Final = 1 << 20
"""Maximum numbers in a layout from a peer. A model of 140,000 tensors is possible, with each expert and its scales on
their own, and a replica of 1,024 ranks; a million boxes take 5 s or more to decode, and to plan for."""
FREE_BOXES: Final = 1 << 17
BYTES_PER_BOX: Final = 1 << 17
BOXES_PER_TENSOR: Final = 16
"""A layout from a peer has at most so many boxes, and more for each so many bytes of the model and for each tensor:
139,000 for half a billion parameters, 260,000 for eight. A replica of 16 ranks has 5,000 boxes of such a model. Of one
of 30 billion parameters in NVFP4, with each expert and its scales on their own, eight ranks have 450,000. The
controller decodes them and plans for them, and a policy digests them at each version."""
MAX_OTHER_BYTES: Final = 4 << 20
"""Maximum bytes of a layout besides its tensors and boxes: names of hosts, devices and rails."""
MAX_RANK_RAILS: Final = 32
MAX_LAYOUT_RAILS: Final = 4096
"""Maximum numbers of rails in a layout from a peer: of one rank, and of all together. Hosts have 8 to 32 cards, and a
cluster has as many rails as one of its hosts, or one for each switch. A rank has at most as many cards as rails."""
MAX_NVLINK_PEERS: Final = 128
"""Maximum number of GPUs that a rank reaches over NVLink: 71 in the largest systems."""
MAX_LABEL_CHARACTERS: Final = 256
"""Maximum length of the name of a host, device, card, rail or switch in a layout from a peer."""
MAX_NUMA_NODES: Final = 1 << 16
MIN_GB_PER_S, MAX_GB_PER_S = 1e-6, 1e6
"""Bandwidths that a card in a layout from a peer may have, besides 0: from a modem to a thousand times the fastest."""
CPU: Final = "cpu"
"""Device of a rank that computes on the processor."""

MAX_OVERLAP: Final = 4
"""Maximum cost of digesting the distinct boxes of a layout from a peer, in multiples of the model's bytes. A replica
splits a tensor in one way, and copies are equal boxes. A policy digests each distinct box of a rollout's layout at each
version, so a million boxes that each hold nearly the whole tensor would take it days."""
MIN_RUN_BYTES: Final = 256
"""Bytes that are digested in the time that a run of contiguous elements takes at least: 11 to 35 ns."""
MAX_COPIES: Final = 16
"""Maximum bytes of all boxes of a layout from a peer, copies included, in multiples of the model's: so much may it read
from a source. The ranks of a replica have copies of some tensors, and at most those of one host have all of them."""
FREE_BYTES: Final = 256 << 20
"""Both maximums are at least this: a small model may be split into short rows, and held by many ranks."""
FEW_SHARDS: Final = 32
"""Shards of a layout that are checked one by one: to make columns of them takes longer."""

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by msgspec for what a peer has sent: the second for a text that is none, and the third for values that are
deeply nested, also those of unknown keys."""

T = TypeVar("T", bound=msgspec.Struct)


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model in canonical form: Hugging Face name, full shape, element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of `ITEM_BYTES`."""
    same_as: str = ""
    """Name of the tensor whose memory this name shares; empty for a tensor with shards of its own."""


class Box(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A hyper-rectangle of a canonical tensor: first element and number of elements, per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements: 1 for a scalar, 0 when any dim is empty."""
        return math.prod(self.size)

    def __str__(self) -> str:
        if len(self.offset) != len(self.size):  # of a peer, and not checked yet
            return f"of offset {self.offset} and size {self.size}"
        dims = (f"{begin}:{begin + n}" for begin, n in zip(self.offset, self.size, strict=True))
        return f"[{', '.join(dims)}]"


class Shard(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One box of a tensor, and its position in the memory of one rank."""

    tensor: int
    """Index into the layout's `tensors`."""
    box: Box
    storage: str
    """Name of the allocation that holds the box; fused parameters are several shards of one storage."""
    offset_bytes: int
    """Offset of the box's first element from the storage's first element."""
    strides: tuple[int, ...]
    """Distance in memory from one index to the next, in elements, per dim of the box."""


class Card(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A network card."""

    name: str
    gb_per_s: float = 0.0
    """Each way, in 1e9 bytes per second; 0 when unknown."""
    rail: str = ""
    """Name of its rail; empty if the host has one card only."""


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Location of a rank, from which the planner derives distances. A false one costs speed and nothing else."""

    host: str = ""
    """Name of the machine, or of the container. Empty if unknown: then far from every other rank."""
    device: str = CPU
    """`cpu`, or the UUID of a GPU: the number of a GPU depends on the process."""
    numa: int = -1
    """NUMA node, -1 when unknown."""
    rails: tuple[str, ...] = ()
    """Names of the network rails that the rank can use."""
    machine: str = ""
    """Identity of the running kernel: equal in all containers of a machine. Empty when unknown: then `host` counts."""
    pci: str = ""
    """PCI address of the GPU, such as ``0000:1b:00.0``."""
    cards: tuple[Card, ...] = ()
    """Network cards that the rank uses, the one that it should use first; none when unknown."""
    nvlink: tuple[str, ...] = ()
    """PCI addresses of the GPUs that it reaches over NVLink. Shown, and no distance: snapshots lie in host memory,
    whichever transport reads them."""
    switch: str = ""
    """Switch of its cards, if it was configured."""

    @property
    def machine_or_host(self) -> str:
        """What is equal for ranks of one machine; empty when unknown."""
        return self.machine or self.host


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of one rank, and its location."""

    place: Place
    shards: tuple[Shard, ...]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All shards of all ranks of a replica."""

    replica: str
    tensors: tuple[TensorSpec, ...]
    ranks: tuple[RankLayout, ...]
    base: str = ""
    """Digest of the weights below adapters, which are not transferred. Adapters are transferred only between replicas
    with the same base; empty without adapters."""


class _LayoutParts(msgspec.Struct):
    """A layout whose parts are counted, and not decoded. The lengths are checked first: each part is an object, of 80
    bytes in place of one."""

    tensors: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_LAYOUT_TENSORS)]
    ranks: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_LAYOUT_RANKS)]


class _RankParts(msgspec.Struct):
    shards: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_LAYOUT_BOXES)]


class ShardPiece(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Content of one shard, wherever it is stored: the unit of snapshots and digests."""

    names: tuple[str, ...]
    """The tensor's name, then the names tied to it."""
    dtype: str
    box: Box

    @property
    def size_bytes(self) -> int:
        """Size of the box, contiguous."""
        return self.box.volume * ITEM_BYTES[self.dtype]

    @property
    def is_well_formed(self) -> bool:
        """Whether a piece from a peer has few names, a known dtype, and few and small enough dims to be multiplied and
        printed."""
        offset, size = self.box.offset, self.box.size
        return (
            0 < len(self.names) <= MAX_NAMES
            and self.dtype in ITEM_BYTES
            and len(offset) == len(size) <= MAX_DIMS
            and all(0 <= number <= MAX_TENSOR_BYTES for number in (*offset, *size))
            and math.prod(max(extent, 1) for extent in size) <= MAX_TENSOR_BYTES
        )


def encode(obj: msgspec.Struct) -> bytes:
    """Write a layout, a plan or an offer as MessagePack."""
    return msgspec.msgpack.encode(obj)


def decode(kind: type[T], data: bytes | bytearray | memoryview, name: str = "") -> T:
    """Read one `kind` from MessagePack. `name`: of what it should be, if not a `kind`.

    Raises:
        WeightsError: `data` is not MessagePack, or not a `kind`.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise WeightsError(f"These {len(data)} bytes are not a {name or kind.__name__}: {error}.") from error


def most_boxes(tensors: Sequence[TensorSpec]) -> int:
    """Return how many boxes a layout of these tensors, which must pass `check_specs`, may have."""
    by_tensors = BOXES_PER_TENSOR * len(tensors)
    return min(MAX_LAYOUT_BOXES, FREE_BOXES + by_tensors + _model_bytes(tensors) // BYTES_PER_BOX)


def _model_bytes(tensors: Iterable[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * item_bytes(spec) for spec in tensors if not spec.same_as)


def decode_layout(data: bytes | bytearray | memoryview, model: Sequence[TensorSpec] | None = None) -> Layout:
    """Read a layout and check it.

    Args:
        data: the layout as MessagePack, perhaps from a peer.
        model: the tensors that it can be of, in a checked layout; None if unknown. By their bytes and number it may
            have so many boxes, copies and overlaps; a peer may name any tensors.

    Raises:
        WeightsError: as `decode` and `check_layout`, or it has too many tensors, ranks, rails or boxes, too large ones,
            or a place that no rank has.
    """
    _check_numbers(data, MAX_LAYOUT_BOXES if model is None else most_boxes(model))
    layout = decode(Layout, data)
    check_layout(layout)
    _check_places(layout)
    _check_overlaps(layout, math.inf if model is None else _model_bytes(model))
    return layout


def _check_places(layout: Layout) -> None:
    """Check that places are no larger than those of a cluster: they are compared rank by rank, kept, and printed."""
    names: set[str] = set()
    for rank, held in enumerate(layout.ranks):
        names.update(held.place.rails)
        if complaint := _wrong_place(held.place):
            raise WeightsError(f"Rank {rank} of {layout.replica} names {complaint}.")
    if len(names) > MAX_LAYOUT_RAILS:
        raise WeightsError(f"{layout.replica} names {len(names)} rails, expected at most {MAX_LAYOUT_RAILS}.")


def _wrong_place(place: Place) -> str:
    """Return what is wrong with a place; empty if nothing is."""
    for what, num, most in (
        ("rails", len(place.rails), MAX_RANK_RAILS),
        ("cards", len(place.cards), MAX_RANK_RAILS),
        ("NVLink peers", len(place.nvlink), MAX_NVLINK_PEERS),
    ):
        if num > most:
            return f"{num} {what}, expected at most {most}"
    if not -1 <= place.numa < MAX_NUMA_NODES:
        return f"NUMA node {place.numa}, expected -1 to {MAX_NUMA_NODES - 1}"
    labels = (place.host, place.device, place.machine, place.pci, place.switch, *place.rails, *place.nvlink)
    for label in (*labels, *(label for card in place.cards for label in (card.name, card.rail))):
        if len(label) > MAX_LABEL_CHARACTERS:
            return f"a place of {len(label)} characters, expected at most {MAX_LABEL_CHARACTERS}"
    for card in place.cards:
        if card.gb_per_s != 0 and not MIN_GB_PER_S <= card.gb_per_s <= MAX_GB_PER_S:  # NaN is neither
            return f"a card of {card.gb_per_s} GB/s, expected 0 if unknown, or {MIN_GB_PER_S} to {MAX_GB_PER_S:.0f}"
    return ""


def _check_overlaps(layout: Layout, most_model_bytes: float) -> None:
    """Check that the boxes, each of which lies inside its tensor, do not hold the model many times.

    The model has `most_model_bytes` at most, and of each tensor that the layout names no more than has boxes.
    """
    shards = _shards(layout)
    if len(shards) <= FEW_SHARDS and MIN_RUN_BYTES * sum(math.prod(one.box.size) for one in shards) <= FREE_BYTES:
        return  # columns of a few shards take longer than their sum
    shapes = [spec.shape for spec in layout.tensors]
    item_sizes = np.array([item_bytes(spec) for spec in layout.tensors], np.int64)
    columns = list(shard_columns(*_shards_with_dims(layout)))
    held_of_each = sum((each.volumes(len(shapes)) for each in columns), np.zeros(len(shapes))) * item_sizes
    held_bytes = float(held_of_each.sum())
    held = ((layout.tensors[tensor], held_of_each[tensor]) for tensor in np.flatnonzero(held_of_each))
    model_bytes = min(most_model_bytes, sum(min(_model_bytes([spec]), size) for spec, size in held))
    if held_bytes > max(FREE_BYTES, MAX_COPIES * model_bytes):
        raise WeightsError(
            f"The shards of {layout.replica} have {held_bytes:.0f} bytes in all, and the model has {model_bytes:.0f}; "
            f"expected at most {MAX_COPIES} times as many."
        )
    most = max(FREE_BYTES, MAX_OVERLAP * model_bytes)
    costs = [each.digest_cost(shapes, item_sizes, MIN_RUN_BYTES) for each in columns]
    if sum(float(cost.sum()) for cost in costs) <= most:
        return
    distinct = sum(float(cost[each.distinct()].sum()) for cost, each in zip(costs, columns, strict=True))
    if distinct > most:
        raise WeightsError(
            f"The distinct boxes of {layout.replica} take as long to digest as {distinct:.0f} bytes, and the model has "
            f"{model_bytes:.0f}; expected at most {MAX_OVERLAP} times as many. Split tensors into longer rows."
        )


def _check_numbers(data: bytes | bytearray | memoryview, limit: int) -> None:
    """Check how many tensors, ranks and boxes a layout has, before each of them becomes an object."""
    parts = decode(_LayoutParts, data, "Layout")
    num_boxes, counted_bytes = 0, sum(map(len, parts.tensors))
    for raw in parts.ranks:
        shards = decode(_RankParts, memoryview(raw), "RankLayout").shards
        num_boxes += len(shards)
        counted_bytes += sum(map(len, shards))
        if num_boxes > limit:
            break
    for num, what in ((len(parts.tensors), "tensors"), (num_boxes, "boxes")):
        if num > limit:
            raise WeightsError(f"A layout has {num} {what} or more, expected at most {limit}.")
    if num_boxes > FREE_BOXES:
        tensors = [decode(TensorSpec, memoryview(raw)) for raw in parts.tensors]
        check_specs("a replica", tensors)
        most = most_boxes(tensors)
        if num_boxes > most:
            raise WeightsError(
                f"A layout has {num_boxes} boxes or more, expected at most {most} of a model of its size."
            )
    # A repeated key of a map would be decoded as often as it is there.
    if len(data) - counted_bytes > MAX_OTHER_BYTES:
        raise WeightsError(
            f"A layout has {len(data) - counted_bytes} bytes besides its tensors and boxes, expected at most "
            f"{MAX_OTHER_BYTES}."
        )


def item_bytes(spec: TensorSpec) -> int:
    """Size in bytes of one element of `spec`.

    Raises:
        WeightsError: an unsupported element type.
    """
    size = ITEM_BYTES.get(spec.dtype)
    if size is None:
        raise WeightsError(
            f"Tensor {spec.name} has element type {spec.dtype}, expected one of {', '.join(ITEM_BYTES)}."
        )
    return size


def aligned(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of `ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def packed_offsets(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the aligned offsets of blocks of `sizes` bytes packed one after another, and their total extent."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += aligned(size)
    return tuple(offsets), end


def pieces_of(layout: Layout, rank: int) -> tuple[ShardPiece, ...]:
    """Return the pieces of `rank`, in the order of its shards."""
    tied: dict[str, tuple[str, ...]] = {}
    for spec in layout.tensors:
        if spec.same_as:
            tied[spec.same_as] = (*tied.get(spec.same_as, ()), spec.name)
    return tuple(
        ShardPiece(names=(spec.name, *tied.get(spec.name, ())), dtype=spec.dtype, box=shard.box)
        for shard in layout.ranks[rank].shards
        for spec in (layout.tensors[shard.tensor],)
    )


def check_layout(layout: Layout) -> None:
    """Check that names are unique, ties name an owner, every shard lies inside its tensor, and no size is absurd.

    Raises:
        WeightsError: naming the replica and, where there is one, the tensor.
    """
    check_specs(layout.replica, layout.tensors)
    is_small = len(_shards(layout)) <= FEW_SHARDS
    total_bytes = _check_few_shards(layout) if is_small else _check_many_shards(layout)
    if total_bytes > MAX_LAYOUT_BYTES:
        raise WeightsError(
            f"The shards of {layout.replica} have {total_bytes:.0f} bytes in all, expected at most {MAX_LAYOUT_BYTES}."
        )


def check_specs(replica: str, tensors: Iterable[TensorSpec]) -> None:
    """Check that names are unique, types and sizes supported, and ties name an owner of the same shape and type.

    Raises:
        WeightsError: naming the replica and the tensor.
    """
    specs: dict[str, TensorSpec] = {}
    for spec in tensors:
        if spec.name in specs:
            raise WeightsError(f"The layout of {replica} lists tensor {spec.name} twice.")
        if min(spec.shape, default=0) < 0:
            raise WeightsError(f"Tensor {spec.name} of {replica} has the negative shape {spec.shape}.")
        if len(spec.shape) > MAX_DIMS:
            raise WeightsError(
                f"Tensor {spec.name} of {replica} has {len(spec.shape)} dims, expected at most {MAX_DIMS}."
            )
        # An empty dim makes the volume 0, but strides are products of the others.
        if math.prod(max(extent, 1) for extent in spec.shape) * item_bytes(spec) > MAX_TENSOR_BYTES:
            raise WeightsError(
                f"Tensor {spec.name} of {replica} has shape {spec.shape}, expected at most {MAX_TENSOR_BYTES} bytes."
            )
        specs[spec.name] = spec
    for spec in specs.values():
        owner = specs.get(spec.same_as) if spec.same_as else spec
        if owner is None or (owner is not spec and owner.same_as):
            raise WeightsError(f"Tensor {spec.name} of {replica} is tied to {spec.same_as}, which owns no memory.")
        if (owner.shape, owner.dtype) != (spec.shape, spec.dtype):
            raise WeightsError(
                f"Tensors {spec.name} and {owner.name} of {replica} are tied but differ in shape or element type."
            )


def _shards(layout: Layout) -> list[Shard]:
    """Return the shards of all ranks."""
    return list(itertools.chain.from_iterable([held.shards for held in layout.ranks]))


def _shards_with_dims(layout: Layout) -> tuple[list[Shard], npt.NDArray[np.int64]]:
    """Return the shards of all ranks, and the number of dims of each, as `dims_of`."""
    shards = _shards(layout)
    return shards, dims_of(shards, [NO_TENSOR if spec.same_as else len(spec.shape) for spec in layout.tensors])


def _check_few_shards(layout: Layout) -> int:
    """Check all shards, one by one. Returns the bytes of all of them."""
    total_bytes = 0
    for rank, held in enumerate(layout.ranks):
        for shard in held.shards:
            _check_shard(layout, rank, shard)
            total_bytes += shard.box.volume * item_bytes(layout.tensors[shard.tensor])
    return total_bytes


def _check_many_shards(layout: Layout) -> float:
    """Check all shards by their columns, and one by one only those that may be wrong. Returns the bytes of all."""
    item_sizes = np.array([item_bytes(spec) for spec in layout.tensors], np.int64)
    total_bytes = 0.0
    shapes = [spec.shape for spec in layout.tensors]
    shards, num_dims = _shards_with_dims(layout)
    suspicious = set(np.flatnonzero(num_dims == NO_TENSOR).tolist())
    try:
        for columns in shard_columns(shards, num_dims):
            suspicious.update(columns.unsound(shapes, item_sizes, MAX_TENSOR_BYTES).tolist())
            total_bytes += float(columns.volumes(len(shapes)) @ item_sizes)
    except OverflowError:
        suspicious = set(range(len(shards)))
    if suspicious:
        _check_shards(layout, suspicious)
    return total_bytes


def _check_shards(layout: Layout, rows: set[int]) -> None:
    """Check the shards with these numbers, one by one."""
    row = 0
    for rank, held in enumerate(layout.ranks):
        for shard in held.shards:
            if row in rows:
                _check_shard(layout, rank, shard)
            row += 1


def _check_shard(layout: Layout, rank: int, shard: Shard) -> None:
    where = f"rank {rank} of {layout.replica}"
    if not 0 <= shard.tensor < len(layout.tensors):
        raise WeightsError(f"A shard of {where} names tensor {shard.tensor} of {len(layout.tensors)}.")
    spec = layout.tensors[shard.tensor]
    box = shard.box
    if spec.same_as:
        raise WeightsError(f"Tensor {spec.name} of {where} is tied to {spec.same_as} and may have no shards.")
    if not len(box.offset) == len(box.size) == len(shard.strides) == len(spec.shape):
        raise WeightsError(f"Tensor {spec.name} of {where}: box {box} does not fit shape {spec.shape}.")
    for begin, n, extent in zip(box.offset, box.size, spec.shape, strict=True):
        if begin < 0 or n < 0 or begin + n > extent:
            raise WeightsError(f"Tensor {spec.name} of {where}: box {box} leaves shape {spec.shape}.")
    if shard.offset_bytes < 0 or shard.offset_bytes % item_bytes(spec) or min(shard.strides, default=0) < 0:
        raise WeightsError(f"Tensor {spec.name} of {where}: box {box} has a negative or broken offset or stride.")
    # The last element's distance from the first; the stride of a dim of one element does not count.
    span = sum((n - 1) * stride for n, stride in zip(box.size, shard.strides, strict=True) if n > 1)
    if (
        shard.offset_bytes + span * item_bytes(spec) > MAX_TENSOR_BYTES
        or max(shard.strides, default=0) > MAX_TENSOR_BYTES
    ):
        raise WeightsError(
            f"Tensor {spec.name} of {where}: box {box} at offset {shard.offset_bytes} with strides {shard.strides} "
            f"ends beyond {MAX_TENSOR_BYTES} bytes."
        )


def join_ranks(replica: str, layouts: Sequence[Layout]) -> Layout:
    """Join the layouts of a replica's ranks, each of which may list only its own tensors.

    A rank that holds no part of a tensor cannot detect that it is tied, so a tie that one rank reports holds for all.

    Args:
        replica: name of the replica.
        layouts: in the order of the ranks; a layout may have several ranks.

    Raises:
        WeightsError: ranks that contradict each other, naming the tensor.
    """
    specs: dict[str, TensorSpec] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.tensors:
            known = specs.setdefault(spec.name, spec)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise WeightsError(
                    f"Tensor {spec.name} of {replica} is {spec.dtype} of shape {spec.shape} on rank {rank}, but "
                    f"{known.dtype} of shape {known.shape} on a rank before it."
                )
            if known.same_as and spec.same_as and known.same_as != spec.same_as:
                raise WeightsError(
                    f"Tensor {spec.name} of {replica} is tied to {spec.same_as} on rank {rank}, but to {known.same_as} "
                    "on a rank before it."
                )
            if spec.same_as:
                specs[spec.name] = spec
    index = {name: i for i, name in enumerate(specs)}
    ranks: list[RankLayout] = []
    for layout in layouts:
        places = [index[spec.name] for spec in layout.tensors]
        for held in layout.ranks:
            shards = (msgspec.structs.replace(shard, tensor=places[shard.tensor]) for shard in held.shards)
            ranks.append(RankLayout(place=held.place, shards=tuple(shards)))
    bases = {layout.base for layout in layouts}
    if len(bases) > 1:
        raise WeightsError(
            f"The ranks of {replica} have adapters on different base weights: give all of them the same files."
        )
    joined = Layout(replica=replica, tensors=tuple(specs.values()), ranks=tuple(ranks), base="".join(bases))
    check_layout(joined)
    return joined
