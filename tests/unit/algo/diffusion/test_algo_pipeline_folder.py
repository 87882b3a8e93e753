"""Folders of pipelines: those that diffusers saves, and those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_diffusion import FAMILIES, IMAGES, tiny
from tiny_pipelines import saved, vae_of

from starling.algo.diffusion.folder import (
    TEXT_LENGTHS,
    PipelineFolder,
    load_transformer,
    noise_levels,
    read_pipeline,
)
from starling.algo.diffusion.models import FAMILIES as KNOWN
from starling.algo.diffusion.sampler import make_sampler
from starling.common.errors import ConfigError


def test_each_family_has_a_length_of_texts() -> None:
    assert TEXT_LENGTHS.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_transformer_is_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    model, found = tiny(name), load_transformer(folder, dtype=torch.float32)
    assert not found.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key
    torch.manual_seed(1)
    first = load_transformer(folder, dtype=torch.bfloat16, random=True)
    torch.manual_seed(1)
    second = load_transformer(folder, dtype=torch.bfloat16, random=True)
    first.save_pretrained(tmp_path / "transformer")  # type: ignore[operator]
    read = load_transformer(folder, dtype=torch.bfloat16)
    types = {key: tensor.dtype for key, tensor in read.named_parameters()}
    assert {key: tensor.dtype for key, tensor in first.named_parameters()} == types
    assert torch.bfloat16 in types.values()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shape_of_latents_is_the_vaes(name: str, tmp_path: Path) -> None:
    folder, vae = saved(tmp_path, name), vae_of(name)
    num_frames = 1 if name in IMAGES else 9
    pixels = torch.zeros(1, 3, 64, 32) if name in IMAGES else torch.zeros(1, 3, num_frames, 64, 32)
    with torch.no_grad():
        found = vae.encode(pixels)
    latents = found.latent if hasattr(found, "latent") else found.latent_dist.mode()
    assert folder.latent_shape(64, 32, num_frames) == tuple(latents.shape[1:])


def test_sizes_without_latents_are_refused(tmp_path: Path) -> None:
    wan = saved(tmp_path / "wan", "wan")
    for size, message in (
        ((60, 64, 9), "60 x 64 pixels are no multiple of 8"),
        ((0, 64, 9), "0 x 64 pixels"),
        ((64, 64, 8), "8 frames are not 1 and a multiple of 4, .*: set 5"),
        ((64, 64, 0), "0 frames .*: set 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            wan.latent_shape(*size)
    with pytest.raises(ConfigError, match="makes images, not 9 frames"):
        saved(tmp_path / "sd3", "sd3").latent_shape(64, 64, 9)


def schedulers() -> dict[str, Any]:
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    return {
        "euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "unipc": UniPCMultistepScheduler(**flow, flow_shift=3.0),
        "karras": UniPCMultistepScheduler(**flow, use_karras_sigmas=True, sigma_max=200.0, sigma_min=0.01),
        "dpm": DPMSolverMultistepScheduler(**flow, flow_shift=3.0),
    }


@pytest.mark.parametrize("name", ["euler", "unipc", "karras", "dpm"])
def test_noise_levels_are_the_schedulers_and_can_be_sampled(name: str, tmp_path: Path) -> None:
    scheduler = schedulers()[name]
    folder = saved(tmp_path, "wan", scheduler)
    levels = noise_levels(folder, 10)
    scheduler.set_timesteps(10)
    assert levels == [float(level) for level in scheduler.sigmas]
    sampler = make_sampler(levels, "sde", 0.7)
    assert sampler.actions.start == 0
    assert len(sampler.actions) >= 9
    if name != "karras":
        shifted = noise_levels(folder, 10, shift=8.0)
        assert all(one >= other for one, other in zip(shifted, levels, strict=True))
        assert shifted[5] > levels[5] + 0.05


def test_folders_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    from diffusers import DDIMScheduler

    folder = saved(tmp_path, "wan")
    with pytest.raises(ConfigError, match="a trajectory of 0 steps"):
        noise_levels(folder, 0)
    with pytest.raises(ConfigError, match=r"model_index.json' cannot be read \(No such file or directory\)"):
        read_pipeline(tmp_path / "other")
    index = tmp_path / "model_index.json"
    right = index.read_text()
    for text, message in (
        ("[]", "is no object of JSON"),
        ("{", "is no JSON"),
        ("{}", "names no transformer"),
        (right.replace("WanTransformer3DModel", "UNet"), "has a 'UNet', and can be trained with Wan"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_pipeline(tmp_path)
    index.write_text(right)
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"the transformer in .* cannot be loaded"):
        load_transformer(folder, dtype=torch.float32)
    DDIMScheduler().save_pretrained(tmp_path / "scheduler")
    ddim = PipelineFolder(tmp_path, folder.transformer_class, "DDIMScheduler", 4, 8, 4)
    with pytest.raises(ConfigError, match="gives no 10 steps"):
        noise_levels(ddim, 10)
    config = tmp_path / "vae" / "config.json"
    config.write_text(json.dumps({"scale_factor_spatial": 1000}))
    with pytest.raises(ConfigError, match="1000 pixels per latent"):
        read_pipeline(tmp_path)
    config.unlink()
    with pytest.raises(ConfigError, match="save the pipeline with it"):
        read_pipeline(tmp_path)
