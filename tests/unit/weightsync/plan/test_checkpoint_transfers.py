"""Checkpoints as sources and destinations: first load and export use ordinary plans."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from starling.common.errors import WeightsError
from starling.weightsync.layouts.checkpoint import Folder, create_folder, open_folder
from starling.weightsync.offers.offer import make_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import folder_tensors, layout_of
from starling.weightsync.tensors.views import live_views

DEADLINE_S = 20.0
ROWS = (0, 3, 7)


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(7, 12, generator=generator).bfloat16(),
        "tall": torch.randn(7, 2, 3, generator=generator),
    }


def specs() -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in model().items()
    )


def rows_layout(replica: str) -> Layout:
    """Two ranks that cut the first dim unevenly."""
    ranks = []
    for begin, end in itertools.pairwise(ROWS):
        shards = []
        for index, spec in enumerate(specs()):
            size = (end - begin, *spec.shape[1:])
            strides = tuple(torch.empty(size).stride())
            box = Box(offset=(begin, *(0 for _ in size[1:])), size=size)
            shards.append(Shard(tensor=index, box=box, storage=spec.name, offset_bytes=0, strides=strides))
        ranks.append(RankLayout(place=Place(host="h"), shards=tuple(shards)))
    return Layout(replica=replica, tensors=specs(), ranks=tuple(ranks))


def memories(folder: Folder) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(memory) for name, memory in folder.memories.items()}


def test_export_pulls_into_checkpoint_files(tmp_path: Path) -> None:
    full, source = model(), rows_layout("trainer")
    with create_folder(tmp_path / "out", specs(), max_file_bytes=100) as folder:
        layout = folder.layout("export")
        plan = make_plan(source, layout)
        publishers = [Publisher(source, transport="local", rank=rank) for rank in range(2)]
        puller = Puller(layout)
        offers = []
        for rank, publisher in enumerate(publishers):
            part = {name: tensor[ROWS[rank] : ROWS[rank + 1]].clone() for name, tensor in full.items()}
            offers += publisher.publish(1, part).ranks
        offer = make_offer(1, offers)
        files = memories(folder)
        puller.pull(offer, plan, deadline_s=DEADLINE_S, into=files)
        assert puller.attest(files, offer) == offer.root
        puller.close()
        for publisher in publishers:
            publisher.close()
        del files
        folder.finish()
    loaded: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        loaded |= load_file(path)
    assert loaded.keys() == full.keys()
    assert all(torch.equal(loaded[name], full[name]) for name in full)


def test_first_load_pulls_from_checkpoint_files(tmp_path: Path) -> None:
    full, destination = model(), rows_layout("engine")
    save_file(full, tmp_path / "model.safetensors")
    with open_folder(tmp_path) as folder:
        tensors = folder_tensors(folder)
        layout = layout_of(tensors, "checkpoint")
        plan = make_plan(layout, destination)
        with Publisher(layout, transport="local") as publisher:
            offer = publisher.publish(0, tensors)
            for rank in range(2):
                puller = Puller(destination, rank=rank)
                puller.pull(offer, plan, deadline_s=DEADLINE_S)
                held = {n: torch.zeros_like(t[ROWS[rank] : ROWS[rank + 1]]) for n, t in full.items()}
                puller.switch(held)
                assert puller.attest(held, offer) == offer.root
                assert all(torch.equal(held[n], full[n][ROWS[rank] : ROWS[rank + 1]]) for n in full)
                puller.close()


def test_transposed_square_tensor_keeps_its_strides() -> None:
    spec = TensorSpec(name="w", shape=(3, 3), dtype="float32")
    box = Box(offset=(0, 0), size=(3, 3))
    shard = Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1, 3))
    layout = Layout(replica="r", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))
    tensor = torch.arange(9.0).view(3, 3)
    (view,) = live_views(layout, 0, {"w": tensor})
    assert torch.equal(view, tensor.T)


def test_misaligned_tensor_is_refused_with_one_sentence() -> None:
    spec = TensorSpec(name="w", shape=(2,), dtype="float32")
    shard = Shard(tensor=0, box=Box(offset=(0,), size=(2,)), storage="file", offset_bytes=4, strides=(1,))
    layout = Layout(replica="r", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))
    with pytest.raises(WeightsError, match="w lies at byte 4 of file, where float32 cannot be"):
        live_views(layout, 0, {"file": torch.zeros(13, dtype=torch.uint8)[1:]})
