"""Pipelines of random weights: their parts load, embed, decode and train, and wrong settings are one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from pydantic import ValidationError

from starling.algo.diffusion.conditions import conditions_of, joined
from starling.algo.diffusion.folder import load_transformer, noise_levels, read_pipeline
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.scratch import SCRATCH_FAMILIES
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.cli.recipe.schema import load_recipe, resolved, to_toml
from starling.common.errors import ConfigError
from starling.common.wire.tensors import TEXT

torch.set_num_threads(1)

PROMPTS = ("a red cat", "a tan dog")
CPU = torch.device("cpu")
RECIPE = """
[data]
source = "prompts.jsonl"
[model.scratch]
pipeline = "wan"
[diffusion]
height = 16
width = 16
[rollout]
engine = "diffusion"
[[reward.scorers]]
name = "exact_match"
"""


@pytest.fixture(scope="module", params=sorted(SCRATCH_FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / name
    make_model_folder(ScratchSettings(pipeline=name), folder)
    return folder


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_is_a_pipeline_of_videos(folder: Path) -> None:
    pipeline = read_pipeline(folder)
    assert (pipeline.channels, pipeline.spatial, pipeline.temporal) == (4, 8, 4)
    assert pipeline.latent_shape(16, 32, 9) == (4, 3, 2, 4)
    levels = noise_levels(pipeline, 2)
    assert levels[-1] == 0.0
    assert levels[1] != pytest.approx(noise_levels(pipeline, 2, shift=1.0)[1], rel=1e-2)
    assert noise_levels(pipeline, 2, shift=3.0) == levels


def test_transformer_is_small_and_reads_the_prompt(folder: Path) -> None:
    """It predicts other velocities for another prompt, so that it can learn what prompts ask for."""
    pipeline = read_pipeline(folder)
    torch.manual_seed(0)
    model = load_transformer(pipeline, dtype=torch.float32, random=True)
    assert sum(parameter.numel() for parameter in model.parameters()) < 50_000
    found = PipelineEmbedder(pipeline, dtype=torch.float32).embed(PROMPTS)
    conditions = joined([conditions_of(one, pipeline.text_length, CPU) for one in found])
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(pipeline.latent_shape(16, 16, 5), generator=generator).expand(2, -1, -1, -1, -1)
    predicted = velocity(model, state, torch.full((2,), 0.5), conditions)
    assert not torch.allclose(predicted[0], predicted[1], atol=1e-6)
    predicted.square().mean().backward()
    assert all(one.grad is not None and torch.isfinite(one.grad).all() for one in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_tell_prompts_of_equal_length_apart(folder: Path, dtype: torch.dtype) -> None:
    one, other, empty, foreign = PipelineEmbedder(read_pipeline(folder), dtype=dtype).embed([*PROMPTS, "", "日本 é"])
    for tensors in (one, other, empty, foreign):
        assert np.isfinite(tensors[TEXT]).all()
    assert one[TEXT].shape == other[TEXT].shape
    assert np.abs(one[TEXT] - other[TEXT]).max() > 0.5


def test_vae_decodes_latents_to_pixels_that_differ(folder: Path) -> None:
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    latents = torch.randn((2, 4, 2, 2, 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = vae.decode(latents).sample
        assert vae.encode(pixels).latent_dist.mean.shape == latents.shape
    assert pixels.shape == (2, 3, 5, 16, 16)
    assert (pixels[0] - pixels[1]).abs().mean() > 0.05


def test_same_settings_write_the_same_bytes(name: str, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    make_model_folder(ScratchSettings(pipeline=name), tmp_path / "deep" / "other")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert read_all(tmp_path / "deep" / "other") == read_all(folder)
    assert not list((folder / "transformer").glob("*.safetensors"))
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}


def test_existing_pipeline_is_kept_and_one_of_other_settings_refused(name: str, tmp_path: Path) -> None:
    settings = ScratchSettings(pipeline=name, config={"num_layers": 2, "out_channels": 6})
    make_model_folder(settings, tmp_path / "model")
    pipeline = read_pipeline(tmp_path / "model")
    assert pipeline.channels == 6
    assert AutoencoderKLWan.from_pretrained(tmp_path / "model" / "vae").config.z_dim == 6
    before = read_all(tmp_path / "model")
    make_model_folder(settings, tmp_path / "model")
    with pytest.raises(ConfigError, match="was not made with these settings: remove it"):
        make_model_folder(ScratchSettings(pipeline=name), tmp_path / "model")
    assert read_all(tmp_path / "model") == before


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"nun_layers": 1}, r"Transformer3DModel has no config.nun_layers; nearest: num_layers"),
        ({"zzz": 1}, r"Transformer3DModel has no config.zzz; it has .*num_layers"),
        ({"in_channels": 4}, r"config.in_channels follows from out_channels: remove it"),
        ({"out_channels": 0}, r"config.out_channels = 0 is no number of channels: set 1 to 256"),
        ({"out_channels": "4"}, r"config.out_channels = '4' is no number of channels"),
        ({"num_layers": "two"}, r"config = {'num_layers': 'two'} makes no \w+Transformer3DModel \(.*\): correct it"),
        ({"attention_head_dim": 5}, r"config = {'attention_head_dim': 5} makes no"),
        ({"patch_size": [1, 2]}, r"config = {'patch_size': \[1, 2\]} makes no"),
    ],
)
def test_invalid_config_is_refused_and_writes_nothing(
    name: str, tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_model_folder(ScratchSettings(pipeline=name, config=config), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "field"), [("wan", "text_dim"), ("wan", "image_dim"), ("cosmos", "text_embed_dim")], scope="function"
)
def test_fields_that_the_text_encoder_decides_are_refused(name: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config.{field} follows from the text encoder, .*: remove it"):
        make_model_folder(ScratchSettings(pipeline=name, config={field: 8}), tmp_path / "model")


def test_missing_diffusers_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "starling.algo.diffusion.scratch", raising=False)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"pipeline = 'wan' cannot be made \(.*diffusers.*\): install the extra"):
        make_model_folder(ScratchSettings(pipeline="wan"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [("model_type", "llama"), ("alphabet", "ab"), ("chat_template", "{{ messages }}"), ("max_length", 9)],
)
def test_settings_of_language_models_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=rf"{setting} is of a language model, and pipeline = 'cosmos' makes"):
        ScratchSettings(pipeline="cosmos", **{setting: value})


def test_unknown_pipeline_is_refused() -> None:
    with pytest.raises(ValidationError, match="'', 'wan' or 'cosmos'"):
        ScratchSettings(pipeline="sd3")


def test_recipe_is_resolved_to_the_folder_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a cat"}\n')
    recipe = load_recipe([tmp_path / "recipe.toml"], ["--data.source", str(tmp_path / "prompts.jsonl")])
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    again = load_recipe([tmp_path / "again.toml"], [])
    assert again.model.scratch == recipe.model.scratch == ScratchSettings(pipeline="wan")
    config = resolved(again, tmp_path)
    assert (config.model.path, config.model.scratch) == (str(tmp_path / "model"), None)
    assert config.policy.init == "random"


def test_command_makes_the_folder_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "starling.cli.main", "scratch", "recipe.toml", "model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert read_pipeline(tmp_path / "model").transformer_class == "WanTransformer3DModel"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[diffusion]\nheight = 16\nwidth = 16\n", "", r"model.scratch.pipeline = 'wan' makes .* has no \[diffusion\]"),
        (
            'pipeline = "wan"\n',
            "",
            r"\[diffusion\] needs a pipeline .* set model.scratch.pipeline to 'wan' or",
        ),
    ],
)
def test_diffusion_and_pipeline_need_each_other(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in RECIPE
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(ConfigError, match=complaint):
        load_recipe([tmp_path / "recipe.toml"], [])
