"""Diffusers transformers: their layouts have the tensor names that diffusers itself writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors import safe_open

from starling.weightsync.layouts.checkpoint import create_folder, open_folder
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import folder_tensors, layout_of

torch.set_num_threads(1)
DEADLINE_S = 20.0
STEM = "diffusion_pytorch_model"


def wan() -> ModelMixin:
    """Video: convolutions over three dims, tables beside modules, buffers that are not saved, two element types."""
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=8,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    for name, tensor in model.named_parameters():
        if not any(part in name for part in model._keep_in_fp32_modules):
            tensor.data = tensor.data.bfloat16()
    return model


def flux() -> ModelMixin:
    """Images: double and single blocks."""
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ).to(torch.bfloat16)


def sd3() -> ModelMixin:
    """Images: a table of positions that is a buffer and is saved."""
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )


def filled(make: Callable[[], ModelMixin], seed: int) -> ModelMixin:
    """A model whose saved tensors are all random, the buffers among them too."""
    model = make().eval()
    draw = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    return model


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two mappings hold the same bits under the same names."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].view(torch.uint8).equal(b[name].view(torch.uint8)) for name in a
    )


def pull(source: Mapping[str, torch.Tensor], live: dict[str, torch.Tensor], *, in_place: bool = False) -> None:
    """Publish `source` and bring it into `live`."""
    source_layout, destination_layout = layout_of(source, "policy-0"), layout_of(live, "rollout-0")
    plan = make_plan(source_layout, destination_layout, bucket_bytes=4096)
    with Publisher(source_layout, transport="local") as publisher:
        puller = Puller(destination_layout)
        offer = publisher.publish(1, source)
        puller.pull(offer, plan, deadline_s=DEADLINE_S, into=live if in_place else None)
        if not in_place:
            puller.switch(live)
        assert puller.attest(live, offer) == offer.root
        puller.close()


@pytest.fixture(params=[wan, flux, sd3], ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], ModelMixin]:
    return request.param


def test_names_agree_with_diffusers(make: Callable[[], ModelMixin], tmp_path: Path) -> None:
    model = filled(make, 0)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / f"{STEM}.safetensors", "pt") as written:
        shapes = {name: tuple(written.get_slice(name).get_shape()) for name in written.keys()}  # noqa: SIM118
    layout = layout_of(model.state_dict(), "policy-0")
    assert {spec.name: spec.shape for spec in layout.tensors} == shapes
    assert set(dict(model.named_parameters())) <= shapes.keys()
    with open_folder(tmp_path) as folder:
        found = {spec.name: spec for spec in folder.tensors}
    assert found == {spec.name: spec for spec in layout.tensors}


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in_place"])
def test_version_reaches_another_instance_bit_for_bit(make: Callable[[], ModelMixin], in_place: bool) -> None:
    source, destination = filled(make, 1), filled(make, 2)
    assert not same(source.state_dict(), destination.state_dict())
    pull(source.state_dict(), destination.state_dict(), in_place=in_place)
    assert same(source.state_dict(), destination.state_dict())


def test_non_persistent_buffers_are_not_transferred() -> None:
    source, destination = filled(wan, 1), filled(wan, 2)
    kept = {name for name, _ in destination.named_buffers()} - destination.state_dict().keys()
    assert kept == {"rope.freqs_cos", "rope.freqs_sin"}
    buffers = {name: buffer.clone() for name, buffer in destination.named_buffers()}
    addresses = {name: buffer.data_ptr() for name, buffer in destination.named_buffers()}
    pull(source.state_dict(), destination.state_dict())
    assert same(dict(destination.named_buffers()), buffers)
    assert {name: buffer.data_ptr() for name, buffer in destination.named_buffers()} == addresses


def test_pulled_model_computes_the_same_output() -> None:
    source, destination = filled(flux, 1), filled(flux, 2)
    draw = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    inputs = {
        "hidden_states": noise(1, 6, 4),
        "encoder_hidden_states": noise(1, 5, 16),
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    with torch.no_grad():
        before, expected = destination(**inputs).sample, source(**inputs).sample
        pull(source.state_dict(), destination.state_dict())
        assert not before.equal(expected)
        assert destination(**inputs).sample.equal(expected)


def test_diffusers_folder_is_a_source(make: Callable[[], ModelMixin], tmp_path: Path) -> None:
    """In several files with an index, as large models are."""
    model, live = filled(make, 1), filled(make, 2)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / f"{STEM}.safetensors.index.json").exists()
    with open_folder(tmp_path) as folder:
        pull(folder_tensors(folder), live.state_dict())
    assert same(live.state_dict(), model.state_dict())


@pytest.mark.parametrize("make", [flux, sd3], ids=["flux", "sd3"])  # what keeps float32 loads with `accelerate` only
def test_diffusers_loads_an_export(make: Callable[[], ModelMixin], tmp_path: Path) -> None:
    model = filled(make, 1)
    model.save_config(tmp_path / "config")
    tensors = model.state_dict()
    specs = layout_of(tensors, "policy-0").tensors
    with create_folder(tmp_path / "out", specs, stem=STEM, max_file_bytes=20_000) as folder:
        source_layout, destination_layout = layout_of(tensors, "policy-0"), folder.layout("export")
        files = {name: torch.from_numpy(memory) for name, memory in folder.memories.items()}
        with Publisher(source_layout, transport="local") as publisher:
            puller = Puller(destination_layout)
            puller.pull(
                publisher.publish(1, tensors),
                make_plan(source_layout, destination_layout),
                deadline_s=DEADLINE_S,
                into=files,
            )
            puller.close()
        del files
        folder.add_file("config.json", (tmp_path / "config" / "config.json").read_bytes())
        folder.finish()
    assert len(list((tmp_path / "out").glob(f"{STEM}-*.safetensors"))) > 1
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    loaded = type(model).from_pretrained(tmp_path / "out", torch_dtype=dtype, local_files_only=True)
    assert same(loaded.state_dict(), tensors)
