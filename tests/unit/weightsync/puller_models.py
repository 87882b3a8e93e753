"""Random models spread over ranks, and publishers of them in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from starling.weightsync.offers.offer import Offer, Transport, make_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.publisher.publisher import Publisher

DTYPES = ("bfloat16", "float8_e4m3fn", "int8", "bool", "float32", "int64")
Storages = dict[str, torch.Tensor]


def cuts(draw: random.Random, length: int, num: int) -> list[int]:
    """Cut a length unevenly; parts may be empty."""
    return [0, *sorted(draw.randint(0, length) for _ in range(num - 1)), length]


class Model:
    """Full tensors, and layouts of them over ranks."""

    def __init__(self, draw: random.Random, num_tensors: int, longest: int = 40) -> None:
        self.draw = draw
        self.specs = tuple(
            TensorSpec(
                name=f"t{index}",
                shape=tuple(draw.randint(1, longest) for _ in range(draw.choice((0, 1, 1, 2, 2, 3)))),
                dtype=draw.choice(DTYPES),
            )
            for index in range(num_tensors)
        )

    def full(self, version: int) -> Storages:
        """The tensors of a version: random bits."""
        made: Storages = {}
        for index, spec in enumerate(self.specs):
            generator = torch.Generator().manual_seed(1000 * version + index)
            dtype = getattr(torch, spec.dtype)
            num = 1
            for n in spec.shape:
                num *= n
            top = 2 if spec.dtype == "bool" else 256
            raw = torch.randint(0, top, (num * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            made[spec.name] = raw.view(dtype).reshape(spec.shape)
        return made

    def layout(self, replica: str, num_ranks: int, *, copies: bool = False) -> Layout:
        """Split every tensor along a dim of its own over the ranks; scalars are everywhere."""
        held: list[list[Shard]] = [[] for _ in range(num_ranks)]
        for index, spec in enumerate(self.specs):
            whole = copies or not spec.shape
            dim = 0 if whole else self.draw.randrange(len(spec.shape))
            edges = [] if whole else cuts(self.draw, spec.shape[dim], num_ranks)
            for rank in range(num_ranks):
                offset, size = [0] * len(spec.shape), list(spec.shape)
                if not whole:
                    offset[dim], size[dim] = edges[rank], edges[rank + 1] - edges[rank]
                strides = [1] * len(size)
                for d in range(len(size) - 2, -1, -1):
                    strides[d] = strides[d + 1] * max(size[d + 1], 1)
                held[rank].append(
                    Shard(
                        tensor=index,
                        box=Box(offset=tuple(offset), size=tuple(size)),
                        storage=spec.name,
                        offset_bytes=0,
                        strides=tuple(strides),
                    )
                )
        return Layout(
            replica=replica,
            tensors=self.specs,
            ranks=tuple(RankLayout(place=Place(host="h", device=str(r)), shards=tuple(s)) for r, s in enumerate(held)),
        )


def local(layout: Layout, rank: int, full: Mapping[str, torch.Tensor]) -> Storages:
    """Return the part of full tensors that a rank holds."""
    made: Storages = {}
    for shard in layout.ranks[rank].shards:
        spec = layout.tensors[shard.tensor]
        index = tuple(slice(a, a + n) for a, n in zip(shard.box.offset, shard.box.size, strict=True))
        made[shard.storage] = full[spec.name][index].clone(memory_format=torch.contiguous_format)
    return made


def zeros(layout: Layout, rank: int) -> Storages:
    """Return zero storages for a rank."""
    return {
        shard.storage: torch.zeros(shard.box.size, dtype=getattr(torch, layout.tensors[shard.tensor].dtype))
        for shard in layout.ranks[rank].shards
    }


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all tensors hold the same bits."""
    return a.keys() == b.keys() and all(
        x.shape == b[name].shape and x.contiguous().view(-1).view(torch.uint8).equal(b[name].view(-1).view(torch.uint8))
        for name, x in a.items()
        if x.numel()
    )


def evolved(full: Mapping[str, torch.Tensor], seed: int, share: float) -> Storages:
    """Return the next version, with a flipped bit in about this share of the elements."""
    generator = torch.Generator().manual_seed(seed)
    made: Storages = {}
    for name, tensor in full.items():
        made[name] = tensor.clone()
        raw = made[name].view(-1).view(torch.uint8)
        flips = torch.rand(raw.shape, generator=generator) < share / tensor.element_size()
        raw ^= flips.to(torch.uint8)
    return made


@contextmanager
def publishers(
    layout: Layout, transports: Sequence[Transport], *, delta_versions: int = 0
) -> Iterator[list[Publisher]]:
    """Run a publisher for each rank, in this process."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Publisher(layout, transport=transport, rank=rank, read_timeout_s=0.05, delta_versions=delta_versions)
            )
            for rank, transport in enumerate(transports)
        ]


def publish(made: Sequence[Publisher], layout: Layout, version: int, full: Mapping[str, torch.Tensor]) -> Offer:
    """Publish a version from every rank."""
    snapshots = [each.snapshot(version, local(layout, rank, full)) for rank, each in enumerate(made)]
    return make_offer(version, [rank for each in snapshots for rank in each.offer().ranks])
