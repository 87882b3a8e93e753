"""Placements: exact tables, and DTensor as the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from starling.common.errors import WeightsError
from starling.weightsync.layouts.placements import (
    REPLICATE,
    Only,
    Placement,
    Sharded,
    coordinate_of,
    held_boxes,
    local_shape,
    split_of_mesh,
)
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.layout import Layout, Place, RankLayout, join_ranks
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.tensors.modules import layout_of, local_tensors, placements_of


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranges(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> list[str]:
    """What each rank of the mesh holds, as text."""
    size = 1
    for n in mesh:
        size *= n
    return [
        " ".join(str(held.box) for held in held_boxes(shape, mesh, coordinate_of(rank, mesh), placements))
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "expected"),
    [
        # FSDP: the first shares are the larger ones, the last may be empty
        ((10, 3), (4,), (Sharded(dim=0),), ["[0:3, 0:3]", "[3:6, 0:3]", "[6:9, 0:3]", "[9:10, 0:3]"]),
        ((5,), (4,), (Sharded(dim=0),), ["[0:2]", "[2:4]", "[4:5]", ""]),
        ((2, 6), (2,), (Sharded(dim=1),), ["[0:2, 0:3]", "[0:2, 3:6]"]),
        # HSDP: copies outside, shares inside
        ((4,), (2, 2), (REPLICATE, Sharded(dim=0)), ["[0:2]", "[2:4]", "[0:2]", "[2:4]"]),
        # tensor parallelism inside FSDP: each rank holds a share of its tensor-parallel share
        ((8,), (2, 2), (Sharded(dim=0, factor=2), Sharded(dim=0)), ["[0:2]", "[4:6]", "[2:4]", "[6:8]"]),
        ((4, 4), (2, 2), (Sharded(dim=0), Sharded(dim=1)), ["[0:2, 0:2]", "[0:2, 2:4]", "[2:4, 0:2]", "[2:4, 2:4]"]),
        # a fused tensor: each rank holds its share of each of the three projections
        ((12,), (2,), (Sharded(dim=0, factor=3),), ["[0:2] [4:6] [8:10]", "[2:4] [6:8] [10:12]"]),
        # fewer key-value heads than ranks, a padded vocabulary, experts and stages
        ((4,), (4,), (Sharded(dim=0, copies=2),), ["[0:2]", "[0:2]", "[2:4]", "[2:4]"]),
        ((100,), (4,), (Sharded(dim=0, chunk=48),), ["[0:48]", "[48:96]", "[96:100]", ""]),
        ((3,), (2, 2), (Only(indices=(1,)), Sharded(dim=0)), ["", "", "[0:2]", "[2:3]"]),
        # scalars, and tensors without elements
        ((), (2,), (REPLICATE,), ["[]", "[]"]),
        ((0, 3), (2,), (Sharded(dim=0),), ["", ""]),
    ],
)
def test_boxes_of_ranks(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], expected: list[str]
) -> None:
    assert ranges(shape, mesh, placements) == expected


@pytest.mark.parametrize(
    ("shape", "mesh", "coordinate", "placements", "message"),
    [
        ((4,), (2,), (0,), (), "0 placements"),
        ((4,), (2,), (2,), (REPLICATE,), "outside a mesh"),
        ((4,), (2,), (0,), (Sharded(dim=1),), "split along dim 1"),
        ((4,), (2,), (0,), (Sharded(dim=0, factor=0),), "cannot be spread"),
        ((4,), (3,), (0,), (Sharded(dim=0, copies=2),), "cannot be spread"),
        ((4,), (2,), (0,), (Sharded(dim=0, chunk=2, factor=2),), "both a chunk and a factor"),
    ],
)
def test_unfit_placements_are_refused(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    message: str,
) -> None:
    with pytest.raises(WeightsError, match=message):
        held_boxes(shape, mesh, coordinate, placements)


def sharded(dims: int) -> st.SearchStrategy[Placement]:
    dim = st.integers(0, dims - 1)
    return st.one_of(
        st.just(REPLICATE),
        st.builds(Sharded, dim=dim, factor=st.integers(1, 3)),
        st.builds(Sharded, dim=dim, copies=st.sampled_from((1, 2))),
    )


@given(data=st.data())
@examples(100)
def test_placements_agree_with_dtensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = st.integers(0, len(shape) - 1)
    mine = tuple(data.draw(st.builds(Sharded, dim=dim, factor=st.integers(1, 3))) for _ in mesh)
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in mesh)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    local = full
    for size, index, placement in zip(mesh, coordinate, mine, strict=True):
        strided = _StridedShard(placement.dim, split_factor=placement.factor)
        theirs = strided if placement.factor > 1 else Shard(placement.dim)
        local = theirs._split_tensor(local, size, with_padding=False)[0][index]
    assert local_shape(shape, mesh, coordinate, mine) == tuple(local.shape)
    rebuilt = torch.full_like(local, -1)
    for held in held_boxes(shape, mesh, coordinate, mine):
        here = tuple(slice(o, o + n) for o, n in zip(held.origin, held.box.size, strict=True))
        rebuilt[here] = full[tuple(slice(o, o + n) for o, n in zip(held.box.offset, held.box.size, strict=True))]
    assert torch.equal(rebuilt, local)


@given(data=st.data())
@examples(100)
def test_mesh_holds_each_element_equally_often(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.sampled_from((2, 4)), min_size=1, max_size=2)))
    placements = tuple(data.draw(sharded(len(shape))) for _ in mesh)
    split = split_of_mesh(shape, mesh, placements)
    held = torch.zeros(shape, dtype=torch.int64)
    for row in range(len(split.rank)):
        box = split.box(row)
        held[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] += 1
    copies = 1
    for size, placement in zip(mesh, placements, strict=True):
        copies *= placement.copies if isinstance(placement, Sharded) else size
    assert held.unique().tolist() == [copies]


class Block(nn.Module):
    """Two projections, of sizes that divide by little, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.norm = nn.LayerNorm(6)


def block() -> Block:
    torch.manual_seed(7)
    return Block()


def check_rank(tensors: dict[str, torch.Tensor], full: dict[str, torch.Tensor]) -> Layout:
    """Slicing the full tensors by the layout's boxes gives what the rank holds, wholly."""
    layout = layout_of(tensors, "policy")
    memory = local_tensors(tensors)
    rebuilt = {name: torch.full_like(local, float("nan")) for name, local in memory.items()}
    for shard in layout.ranks[0].shards:
        spec = layout.tensors[shard.tensor]
        box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.size, strict=True))
        view = rebuilt[shard.storage].as_strided(shard.box.size, shard.strides, shard.offset_bytes // 4)
        view.copy_(full[spec.name][box])
    for name, local in memory.items():
        assert torch.equal(rebuilt[name], local), name
        assert layout.tensors[[spec.name for spec in layout.tensors].index(name)].shape == tuple(full[name].shape)
    return layout


def covered(layout: Layout) -> bool:
    """Whether the ranks together hold every element: a destination that needs all can be planned."""
    whole = layout_of({spec.name: torch.empty(spec.shape) for spec in layout.tensors}, "rollout")
    make_plan(layout, whole)
    return True


TP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.parametrize("kind", ["fsdp", "fsdp dim 1", "hsdp", "tp", "fsdp tp", "hsdp tp"])
def test_layouts_of_sharded_torch_modules(kind: str) -> None:
    full = {name: tensor.detach().clone() for name, tensor in block().state_dict().items()}
    layouts = []
    sizes = {"fsdp": (4,), "fsdp dim 1": (2,), "hsdp": (2, 4), "tp": (2,), "fsdp tp": (2, 2), "hsdp tp": (2, 3, 2)}[
        kind
    ]
    names = {"fsdp": ("f",), "fsdp dim 1": ("f",), "hsdp": ("r", "f"), "tp": ("t",), "fsdp tp": ("f", "t")}
    world_size = torch.Size(sizes).numel()
    for rank in range(world_size):
        with rank_of(rank, world_size):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names.get(kind, ("r", "f", "t")))
            module = block()
            if "tp" in kind:
                parallelize_module(module, mesh["t"], TP, src_data_rank=None)
            if kind == "fsdp dim 1":
                fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
            elif "fsdp" in kind:
                fully_shard(module, mesh=mesh["f"])
            elif "hsdp" in kind:
                fully_shard(module, mesh=mesh["r", "f"])
            tensors = dict(module.named_parameters())
            if "tp" in kind and "fsdp" in kind:
                assert any(isinstance(p, _StridedShard) for p in tensors["up.weight"].placements)
            layouts.append(check_rank(tensors, full))
    joined = join_ranks("policy", layouts)
    assert len(joined.ranks) == world_size
    assert covered(joined)


def test_experts_and_stages() -> None:
    """Stacked experts over an axis of their own, and ranks that hold some layers under other names."""
    full = {f"layers.{i}.experts": torch.randn(5, 4, 3) for i in range(2)}
    layouts = []
    for rank in range(4):
        stage = rank // 2
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))["ep"]
            local = distribute_tensor(full[f"layers.{stage}.experts"].clone(), mesh, [Shard(0)], src_data_rank=None)
            layouts.append(layout_of({"0.experts": local}, "policy", names={"0.experts": f"layers.{stage}.experts"}))
    joined = join_ranks("policy", layouts)
    assert [spec.name for spec in joined.tensors] == list(full)
    held = [[(joined.tensors[s.tensor].name, str(s.box)) for s in rank.shards] for rank in joined.ranks]
    assert held == [
        [("layers.0.experts", "[0:3, 0:4, 0:3]")],
        [("layers.0.experts", "[3:5, 0:4, 0:3]")],
        [("layers.1.experts", "[0:3, 0:4, 0:3]")],
        [("layers.1.experts", "[3:5, 0:4, 0:3]")],
    ]
    assert {shard.storage for rank in joined.ranks for shard in rank.shards} == {"0.experts"}
    assert len(to_compact(joined).splits) == 2


def test_partial_sums_and_ranks_outside_the_mesh() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with pytest.raises(WeightsError, match=r"w is placed as .*: no rank holds its values"):
            layout_of({"w": partial}, "policy")
        whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        assert placements_of(whole, "w") == (REPLICATE,)
        uneven = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
        with pytest.raises(WeightsError, match=r"local part of shape \(3,\) at \(1,\) of mesh \(2,\), expected \(2,\)"):
            layout_of({"w": uneven}, "policy")


def test_contradicting_ranks_are_refused() -> None:
    mine, other = torch.zeros(2), torch.zeros(3)
    with pytest.raises(WeightsError, match=r"Tensor a of p is float32 of shape \(3,\) on rank 1"):
        join_ranks("p", [layout_of({"a": mine}, "p"), layout_of({"a": other}, "p")])
    tied = layout_of({"a": mine, "b": mine}, "p")
    with pytest.raises(WeightsError, match="b of rank 1 of p is tied to a and may have no shards"):
        join_ranks("p", [tied, layout_of({"a": mine, "b": torch.zeros(2)}, "p")])
    untied = layout_of({"a": torch.zeros(2), "b": torch.zeros(2)}, "p")
    bare = Layout(replica="p", tensors=untied.tensors, ranks=(RankLayout(place=Place(), shards=()),))
    assert [spec.same_as for spec in join_ranks("p", [bare, tied]).tensors] == ["", "a"]
