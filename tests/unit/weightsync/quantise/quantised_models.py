"""Models with some quantised tensors, spread over ranks at random; ranks are threads of one process."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from test_quantise import raw, region, weights

from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, item_bytes
from starling.weightsync.quantise.layouts import quantisation_of
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.tensors.quantise import partial_amax, quantise_with
from starling.weightsync.tensors.views import live_views

T = TypeVar("T")
WAIT_S = 30.0
Storages = dict[str, torch.Tensor]


class Threads:
    """Ranks that are threads and exchange messages through a shared table."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.table: list[Sequence[torch.Tensor]] = [()] * num_ranks
        self.met = threading.Barrier(num_ranks, timeout=WAIT_S)

    def each(self, work: Callable[[int], T]) -> list[T]:
        """Do `work` for each rank at once; raise what the first rank raises, after all have ended."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(work, rank) for rank in range(self.num_ranks)]
        return [future.result(0) for future in futures]


class ThreadExchange:
    """The exchange of one of the threads."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.num_ranks = threads, rank, threads.num_ranks

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        self._threads.table[self.rank] = [message.clone() for message in outgoing]
        self._threads.met.wait()
        incoming = [messages[self.rank] for messages in self._threads.table]
        self._threads.met.wait()
        assert [message.numel() for message in incoming] == list(sizes)
        return incoming


def grid(draw: random.Random, shape: Sequence[int], most: int = 3) -> list[Box]:
    """Cut a tensor unevenly along each dim, the last one at even elements."""
    sides = []
    for dim, n in enumerate(shape):
        step = 2 if dim == len(shape) - 1 else 1
        inner = {cut * step for cut in range(1, n) if cut * step < n}
        cuts = draw.sample(sorted(inner), min(len(inner), draw.randrange(most)))
        sides.append(list(itertools.pairwise(sorted({0, n, *cuts}))))
    return [
        Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))
        for spans in itertools.product(*sides)
    ]


def source_layout(draw: random.Random, specs: Sequence[TensorSpec], num_ranks: int) -> Layout:
    """Deal the boxes of each tensor out at random, some of them to several ranks.

    A rank keeps a box by itself, or where it lies in memory for the whole tensor.
    """
    held: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for index, spec in enumerate(specs):
        for number, box in enumerate(grid(draw, spec.shape)):
            for rank in draw.sample(range(num_ranks), draw.choice((1, 1, min(2, num_ranks)))):
                inside = draw.random() < 0.5
                strides = contiguous(spec.shape if inside else box.size)
                first = sum(a * stride for a, stride in zip(box.offset, strides, strict=True)) if inside else 0
                held[rank].append(
                    Shard(
                        tensor=index,
                        box=box,
                        storage=spec.name if inside else f"{spec.name}/{number}",
                        offset_bytes=first * item_bytes(spec),
                        strides=strides,
                    )
                )
    for shards in held:
        draw.shuffle(shards)
    return layout("policy-0", specs, held)


def destination_layout(draw: random.Random, specs: Sequence[TensorSpec], num_ranks: int) -> Layout:
    """Give each rank a slab of each tensor, which may be empty; slabs of two tensors may be fused along dim 0."""
    held: list[list[Shard]] = [[] for _ in range(num_ranks)]
    fused: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for index, spec in enumerate(specs):
        fused.setdefault((spec.shape, spec.dtype), []).append(index)
    for (shape, _), members in fused.items():
        dim = draw.randrange(len(shape))
        step = 2 if dim == len(shape) - 1 else 1
        edges = sorted(draw.randint(0, shape[dim] // step) * step for _ in range(num_ranks - 1))
        for rank, (a, b) in enumerate(itertools.pairwise([0, *edges, shape[dim]])):
            box = Box(
                offset=tuple(a if d == dim else 0 for d in range(len(shape))),
                size=tuple(b - a if d == dim else n for d, n in enumerate(shape)),
            )
            for number, index in enumerate(members):
                held[rank].append(
                    Shard(
                        tensor=index,
                        box=box,
                        storage=specs[members[0]].name,
                        offset_bytes=number * box.volume * item_bytes(specs[index]),
                        strides=contiguous(box.size),
                    )
                )
    return layout("rollout-0", specs, held)


def layout(replica: str, specs: Sequence[TensorSpec], held: Sequence[Sequence[Shard]]) -> Layout:
    ranks = tuple(RankLayout(place=Place(), shards=tuple(shards)) for shards in held)
    return Layout(replica=replica, tensors=tuple(specs), ranks=ranks)


def rows(specs: Sequence[TensorSpec], edges: Sequence[int], replica: str = "policy-0") -> Layout:
    """Every tensor cut along dim 0 at `edges`."""
    held: list[list[Shard]] = [[] for _ in edges[1:]]
    for index, spec in enumerate(specs):
        for rank, (a, b) in enumerate(itertools.pairwise(edges)):
            box = Box(offset=(a, *(0 for _ in spec.shape[1:])), size=(b - a, *spec.shape[1:]))
            held[rank].append(
                Shard(tensor=index, box=box, storage=spec.name, offset_bytes=0, strides=contiguous(box.size))
            )
    return layout(replica, specs, held)


def full_tensors(specs: Sequence[TensorSpec], seed: int) -> Storages:
    return {spec.name: weights(spec.shape, getattr(torch, spec.dtype), seed + i) for i, spec in enumerate(specs)}


def storages(layout: Layout, rank: int) -> Storages:
    """Zeros for all that a rank keeps."""
    ends: dict[str, tuple[str, int]] = {}
    for shard in layout.ranks[rank].shards:
        spec = layout.tensors[shard.tensor]
        last = sum((n - 1) * stride for n, stride in zip(shard.box.size, shard.strides, strict=True))
        end = shard.offset_bytes // item_bytes(spec) + last + 1 if shard.box.volume else 0
        assert ends.setdefault(shard.storage, (spec.dtype, 0))[0] == spec.dtype
        ends[shard.storage] = (spec.dtype, max(ends[shard.storage][1], end))
    return {name: torch.zeros(end, dtype=getattr(torch, dtype)) for name, (dtype, end) in ends.items()}


def local(layout: Layout, rank: int, full: Mapping[str, torch.Tensor]) -> Storages:
    """What a rank holds of full tensors."""
    made = storages(layout, rank)
    for shard, view in zip(layout.ranks[rank].shards, live_views(layout, rank, made), strict=True):
        view.copy_(full[layout.tensors[shard.tensor].name][region(shard.box)])
    return made


def quantised(specs: Sequence[TensorSpec], recipe: QuantRecipe, full: Mapping[str, torch.Tensor]) -> Storages:
    """Return all sent tensors, computed from the full tensors."""
    made: Storages = {}
    largest: dict[str, float] = {}
    for spec in specs:
        if recipe.format_of(spec) is None:
            continue
        scale = recipe.scale_of(spec.name)
        largest[scale] = max(largest.get(scale, 0.0), float(full[spec.name].abs().max()))
    for spec, how in zip(specs, quantisation_of(specs, recipe).specs, strict=True):
        if how is None:
            made[spec.name] = full[spec.name]
            continue
        box = Box(offset=(0,) * len(spec.shape), size=spec.shape)
        amax = partial_amax(full[spec.name], box, how)
        if amax.total is not None:
            amax = replace(amax, total=torch.tensor(largest[recipe.scale_of(spec.name)]))
        whole = quantise_with(full[spec.name], box, amax, how)
        parts = [whole.data, whole.scales, *([] if whole.global_scale is None else [whole.global_scale])]
        made.update((part.name, tensor) for part, tensor in zip(how.tensors(), parts, strict=True))
    return made


def differing(layout: Layout, rank: int, live: Mapping[str, torch.Tensor], full: Storages) -> Iterator[str]:
    """Yield the names of the tensors of which a rank does not hold the bits of `full`."""
    for shard, view in zip(layout.ranks[rank].shards, live_views(layout, rank, live), strict=True):
        name = layout.tensors[shard.tensor].name
        expected = full[name][region(shard.box)]
        if view.dtype != expected.dtype or not torch.equal(raw(view), raw(expected)):
            yield name
