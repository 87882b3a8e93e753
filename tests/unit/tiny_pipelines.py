"""Tiny pipelines on disk, as a run reads them: transformer with weights, scheduler, VAE's shapes, text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tiny_diffusion import CHANNELS, tiny
from tiny_text import save_pipeline

from starling.algo.diffusion.folder import PipelineFolder, read_pipeline

SIZE: Final = {"height": 64, "width": 64}
"""Settings of [diffusion] whose latents are 8 x 8."""
TEXT_PARTS: Final = ("tokenizer", "text_encoder")


def save_whole(folder: Path, name: str = "wan", *, texts: bool = True) -> PipelineFolder:
    """Save the whole pipeline of a family, whose transformer is `tiny`. `texts`: with text encoders."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder.mkdir(parents=True, exist_ok=True)
    save_pipeline(folder, name, None if texts else {})
    tiny(name).save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    return read_pipeline(folder)


def without_texts(folder: Path) -> PipelineFolder:
    """Remove the text encoders from the index of a pipeline."""
    index = json.loads((folder / "model_index.json").read_bytes())
    kept = {name: part for name, part in index.items() if not name.startswith(TEXT_PARTS)}
    (folder / "model_index.json").write_text(json.dumps(kept))
    return read_pipeline(folder)


def vae_of(name: str) -> Any:
    from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLWan

    if name == "sd3":
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            norm_num_groups=2,
            latent_channels=CHANNELS,
        )
    if name == "sana":
        return AutoencoderDC(
            latent_channels=CHANNELS,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
        )
    return AutoencoderKLWan(base_dim=3, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def saved(folder: Path, name: str, scheduler: Any = None) -> PipelineFolder:
    """Save a tiny pipeline without a text encoder, and read it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model, scheduler = tiny(name), scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0)
    model.save_pretrained(folder / "transformer")
    scheduler.save_pretrained(folder / "scheduler")
    vae_of(name).save_pretrained(folder / "vae")
    classes = {"transformer": type(model).__name__, "scheduler": type(scheduler).__name__}
    index = {"_class_name": "APipeline"} | {part: ["diffusers", cls] for part, cls in classes.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    return read_pipeline(folder)
