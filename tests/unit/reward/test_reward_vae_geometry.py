"""Shapes of pixels from the configurations of VAEs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import ConfigError
from starling.reward.core.media import MediaForm
from starling.reward.score.decode.geometry import VaeGeometry, read_geometries, read_geometry

WAN = {"_class_name": "AutoencoderKLWan", "z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}


def written(folder: Path, config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("make", "latents"),
    [
        (
            lambda d: d.AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
            (16, 3, 2, 3),
        ),
        (
            lambda d: d.AutoencoderKLQwenImage(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
            (16, 2, 2, 3),
        ),
        (
            lambda d: d.AutoencoderKLHunyuanVideo(
                block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=4
            ),
            (4, 3, 2, 3),
        ),
    ],
    ids=["wan", "qwen_image", "hunyuan_video"],
)
def test_form_of_pixels_is_that_of_what_diffusers_decodes(tmp_path: Path, make: Any, latents: tuple[int, ...]) -> None:
    import diffusers
    import torch

    vae = make(diffusers)
    vae.save_config(tmp_path)
    with torch.no_grad():
        decoded = vae.decode(torch.zeros(1, *latents)).sample[0]
    geometry = read_geometry(tmp_path)
    colours, frames, height, width = decoded.shape
    assert geometry.pixels_of(MediaForm("latents", "float16", latents, 16.0)) == MediaForm(
        "pixels", "uint8", (frames, height, width, colours), 16.0
    )


@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.tuples(st.integers(1, 100), st.integers(1, 4000), st.integers(1, 4000)),
)
@examples(50)
def test_first_latent_frame_is_one_frame(spatial: int, temporal: int, latents: tuple[int, int, int]) -> None:
    geometry = VaeGeometry(Path(), "", 16, spatial, temporal)
    frames, height, width, colours = geometry.pixels_of(MediaForm("latents", "float32", (16, *latents))).shape
    assert (frames - 1) % temporal == 0
    assert (frames - 1) // temporal + 1 == latents[0]
    assert (height, width, colours) == (latents[1] * spatial, latents[2] * spatial, 3)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("not json", "is no JSON"),
        ([1], "has a None, which is not decoded here: give a folder with one of AutoencoderKLWan"),
        ({"_class_name": "AutoencoderKL"}, "has a 'AutoencoderKL', which is not decoded here"),
        ({"_class_name": "AutoencoderKLWan", "z_dim": 16}, "does not say the shapes of its pixels"),
        ({**WAN, "z_dim": 0}, "has 0 for one of its shapes, not 1 to 1024"),
        ({**WAN, "scale_factor_spatial": 10**9}, "has 1000000000 for one of its shapes, not 1 to 256"),
        ({**WAN, "scale_factor_temporal": True}, "has True for one of its shapes"),
    ],
)
def test_folder_that_cannot_be_decoded_with_is_refused(tmp_path: Path, config: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_geometry(written(tmp_path / "vae", config))


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config.json \(No such file or directory\): give the folder"):
        read_geometry(tmp_path)


def test_vaes_are_told_apart_by_their_channels(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", WAN), written(tmp_path / "b", {**WAN, "z_dim": 48})
    assert {channels: found.folder for channels, found in read_geometries([one, other]).items()} == {16: one, 48: other}
    with pytest.raises(ConfigError, match="both decode latents of 16 channels"):
        read_geometries([one, written(tmp_path / "c", WAN)])
