"""Random models, layouts and topologies for the planner's tests, and an executor of plans on arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from starling.weightsync.plan.layout import ITEM_BYTES, Box, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.plan.moves import Bucket
from starling.weightsync.plan.topology import HostSpec, Nic, Topology

DTYPES = ("uint8", "float8_e4m3fn", "bfloat16", "float32", "int64")
HOSTS = ("a", "b", "c")


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile `shape`: uneven cuts along every dim, some boxes cut once more."""
    sides = []
    for n in shape:
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
        sides.append(list(itertools.pairwise([0, *cuts, n])))
    boxes = [
        Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))
        for spans in itertools.product(*sides)
    ]
    splittable = [index for index, box in enumerate(boxes) if any(n > 1 for n in box.size)]
    if splittable and draw(st.booleans()):
        box = boxes.pop(draw(st.sampled_from(splittable)))
        dim = next(d for d, n in enumerate(box.size) if n > 1)
        at = draw(st.integers(1, box.size[dim] - 1))
        for begin, n in ((0, at), (at, box.size[dim] - at)):
            offset, size = list(box.offset), list(box.size)
            offset[dim], size[dim] = offset[dim] + begin, n
            boxes.append(Box(offset=tuple(offset), size=tuple(size)))
    return boxes


@st.composite
def places(draw: st.DrawFn) -> Place:
    """Somewhere on one of three hosts, or nowhere known."""
    return Place(
        host=draw(st.sampled_from((*HOSTS, ""))),
        device=f"cuda:{draw(st.integers(0, 2))}",
        numa=draw(st.integers(-1, 1)),
        rails=tuple(sorted(draw(st.sets(st.sampled_from(("r0", "r1")), max_size=2)))),
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology | None:
    """Three hosts, some on one switch, some with few cards; or none."""
    if draw(st.booleans()):
        return None
    hosts = tuple(
        HostSpec(
            name=name,
            gpus=3,
            switch=draw(st.sampled_from(("", "s0", "s1"))),
            nics=(Nic(name="nic{}", rail="r{}", gb_per_s=50.0, count=2),) if draw(st.booleans()) else (),
        )
        for name in HOSTS
    )
    return Topology(hosts=hosts)


@st.composite
def replicas(draw: st.DrawFn, name: str, specs: Sequence[TensorSpec], max_copies: int, *, partial: bool) -> Layout:
    """Ranks that hold the model in some tiling, boxes up to `max_copies` times; fused into one padded storage each.

    Shards are in any order, some are empty, and with `partial` some boxes of a tensor are held by no rank.
    """
    num_ranks = draw(st.integers(1, 5))
    held: list[list[tuple[int, Box]]] = [[] for _ in range(num_ranks)]
    shared: dict[tuple[int, ...], list[tuple[Box, set[int]]]] = {}
    for index, spec in enumerate(specs):
        if spec.shape not in shared or draw(st.booleans()):
            shared[spec.shape] = [
                (box, draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=max_copies)))
                for box in draw(tilings(spec.shape))
            ]
        for box, ranks in shared[spec.shape]:
            if partial and draw(st.integers(0, 5)) == 0:
                continue
            for rank in ranks:
                held[rank].append((index, box))
        if spec.shape and draw(st.integers(0, 3)) == 0:
            held[draw(st.integers(0, num_ranks - 1))].append(
                (index, Box(offset=(0,) * len(spec.shape), size=(0, *spec.shape[1:])))
            )
    ranks = []
    for entries in held:
        order = draw(st.permutations(entries)) if draw(st.booleans()) else entries
        ranks.append(RankLayout(place=draw(places()), shards=tuple(_fused(order, specs, draw(st.integers(0, 3))))))
    return Layout(replica=name, tensors=tuple(specs), ranks=tuple(ranks))


def _fused(entries: Sequence[tuple[int, Box]], specs: Sequence[TensorSpec], padding: int) -> list[Shard]:
    """Lay boxes one after another in storages by element size, with rows `padding` elements longer than needed."""
    ends: dict[int, int] = {}
    shards = []
    for index, box in entries:
        size = ITEM_BYTES[specs[index].dtype]
        strides, step = [], 1
        for n in reversed(box.size):
            strides.append(step)
            step *= n + padding
        shards.append(
            Shard(
                tensor=index,
                box=box,
                storage=f"fused{size}",
                offset_bytes=ends.get(size, 0),
                strides=tuple(reversed(strides)),
            )
        )
        ends[size] = ends.get(size, 0) + step * size
    return shards


@st.composite
def models(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    """A few tensors of few distinct shapes: scalars, empty ones and up to three dims."""
    shapes = draw(
        st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 11]), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))
    count = draw(st.integers(1, 6))
    return tuple(
        TensorSpec(name=f"t{i}", shape=draw(st.sampled_from(shapes)), dtype=draw(st.sampled_from(dtypes)))
        for i in range(count)
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A source that holds all of a model, and a destination that wants some of it, its tensors in another order."""
    specs = draw(models())
    source = draw(replicas("policy-0", specs, 4, partial=False))
    return source, draw(replicas("rollout-0", draw(st.permutations(specs)), 2, partial=True))


class Memory:
    """The storages of one rank as bytes, and its shards as views of them."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.shards = layout, layout.ranks[rank].shards
        sizes: dict[str, int] = {}
        for shard in self.shards:
            item = ITEM_BYTES[layout.tensors[shard.tensor].dtype]
            last = sum((n - 1) * step for n, step in zip(shard.box.size, shard.strides, strict=True))
            end = shard.offset_bytes + (last + 1) * item if shard.box.volume else 0
            sizes[shard.storage] = max(sizes.get(shard.storage, 0), end)
        self.storages = {name: np.full(size, 0xEE, np.uint8) for name, size in sizes.items()}

    def view(self, index: int) -> np.ndarray:
        shard = self.shards[index]
        item = ITEM_BYTES[self.layout.tensors[shard.tensor].dtype]
        return np.ndarray(
            shard.box.size,
            f"V{item}",
            self.storages[shard.storage] if shard.box.volume else bytearray(item),
            shard.offset_bytes if shard.box.volume else 0,
            tuple(step * item for step in shard.strides),
        )


def part(array: np.ndarray, outer: Box, inner: Box) -> np.ndarray:
    """Return `inner` of an array that holds `outer`."""
    spans = zip(outer.offset, inner.offset, inner.size, strict=True)
    return array[(..., *(slice(b - o, b - o + n) for o, b, n in spans))]


def full_tensors(layout: Layout) -> dict[str, np.ndarray]:
    """Return a model of random bytes, the same for every layout of it."""
    tensors = {}
    for spec in sorted(layout.tensors, key=lambda spec: spec.name):
        item, count = ITEM_BYTES[spec.dtype], int(np.prod(spec.shape, dtype=int))
        data = np.random.default_rng(int(spec.name[1:])).integers(0, 256, count * item, np.uint8)
        tensors[spec.name] = data.view(f"V{item}").reshape(spec.shape)
    return tensors


def filled(layout: Layout) -> list[Memory]:
    """Return the memory of each rank, holding its part of the model."""
    model = full_tensors(layout)
    ranks = [Memory(layout, rank) for rank in range(len(layout.ranks))]
    for memory in ranks:
        for index, shard in enumerate(memory.shards):
            spec = layout.tensors[shard.tensor]
            origin = Box(offset=(0,) * len(spec.shape), size=spec.shape)
            memory.view(index)[...] = part(model[spec.name], origin, shard.box)
    return ranks


def carry_out(buckets: Sequence[Bucket], sources: Sequence[Memory], into: Memory) -> None:
    """Copy what the buckets say; nothing is written twice."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for bucket in buckets:
        memory = sources[bucket.source_rank]
        for move in bucket.transfers:
            key = (move.destination_shard, move.box.offset, move.box.size)
            assert key not in seen
            seen.add(key)
            target = part(into.view(move.destination_shard), into.shards[move.destination_shard].box, move.box)
            held = memory.shards[move.source_shard]
            target[...] = part(memory.view(move.source_shard), held.box, move.box)
