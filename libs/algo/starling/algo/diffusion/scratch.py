"""Tiny pipelines of diffusers from nothing: all of a folder but the weights of the transformer.

The policy initialises the transformer at random. VAE and text encoders have fixed random weights: the policy trains
none of them, and every replica must decode and embed alike. Equal fields give equal bytes, with the same versions of
torch, transformers and diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.folder import INDEX
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.text.scratch import WIDTH, text_modules
from starling.common.errors import ConfigError

MAX_CHANNELS: Final = 256
"""Largest number of latent channels."""
_SEED: Final = 5
_SHIFT: Final = 3.0
"""Of the scheduler's noise levels towards noise."""
_CONTRAST: Final = 8.0
"""Factor of the last layer of the VAE, without which all pixels are nearly grey."""


@dataclass(frozen=True, slots=True)
class ScratchFamily:
    """How a pipeline of a family is made."""

    pipeline: str
    """Class of the pipeline in diffusers."""
    transformer: str
    """Class of the transformer in diffusers."""
    sizes: Mapping[str, Any]
    """Fields of the transformer's configuration, where they are not given."""
    text_width: str
    """Field with the width of an embedding."""
    extra_channels: int
    """Channels that the transformer reads besides those of latents."""
    derived: frozenset[str]
    """Further fields that the text encoder decides, or that make a model which reads images as well."""


SCRATCH_FAMILIES: Final[Mapping[str, ScratchFamily]] = {
    "wan": ScratchFamily(
        "WanPipeline",
        "WanTransformer3DModel",
        {
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 1,
        },
        "text_dim",
        extra_channels=0,
        derived=frozenset({"image_dim", "added_kv_proj_dim", "pos_embed_seq_len"}),
    ),
    "cosmos": ScratchFamily(
        "Cosmos2_5_PredictBasePipeline",
        "CosmosTransformer3DModel",
        {
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "mlp_ratio": 2.0,
            "adaln_lora_dim": 4,
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
        },
        "text_embed_dim",
        extra_channels=1,  # which frames are given
        derived=frozenset(
            {
                *("use_crossattn_projection", "crossattn_proj_in_channels", "encoder_hidden_states_channels"),
                *("img_context_dim_in", "img_context_num_tokens", "img_context_dim_out"),
            }
        ),
    ),
}
"""By the name in settings."""


def write_pipeline(name: str, fields: Mapping[str, Any], folder: Path) -> None:
    """Write a pipeline into an existing folder.

    Args:
        name: of the family, one of `SCRATCH_FAMILIES`.
        fields: of the transformer's configuration.
        folder: where its files go, readable for all.

    Raises:
        ConfigError: the transformer does not take these fields.
        OSError: the files cannot be written.
    """
    family = SCRATCH_FAMILIES[name]
    transformer = _transformer(name, fields)
    parts = {"vae": _vae(transformer.config.out_channels), "scheduler": _scheduler(), **text_modules(name)}
    transformer.save_config(folder / "transformer")
    for part, made in parts.items():
        made.save_pretrained(folder / part)
    index: dict[str, Any] = {"_class_name": family.pipeline, "_diffusers_version": diffusers.__version__}
    for part, made in {**parts, "transformer": transformer}.items():
        index[part] = [type(made).__module__.partition(".")[0], type(made).__name__]
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.rglob("*"):  # diffusers writes weights for their owner only
        path.chmod(0o755 if path.is_dir() else 0o644)


def _transformer(name: str, fields: Mapping[str, Any]) -> Any:
    """Return a transformer without weights that computes velocities. Raises ConfigError."""
    family = SCRATCH_FAMILIES[name]
    cls = getattr(diffusers, family.transformer)
    _check_names(name, fields, [one for one in signature(cls.__init__).parameters if one != "self"])
    channels = fields.get("out_channels", family.sizes["out_channels"])
    if type(channels) is not int or not 1 <= channels <= MAX_CHANNELS:
        raise ConfigError(f"config.out_channels = {channels!r} is no number of channels: set 1 to {MAX_CHANNELS}")
    sizes = {**family.sizes, **fields, "in_channels": channels + family.extra_channels, family.text_width: WIDTH}
    try:
        with torch.device("meta"), torch.no_grad():
            model = cls(**sizes).eval()
            velocity(model, *_inputs(channels, model.config.patch_size))
    except Exception as error:  # the user's fields: torch and diffusers raise many
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"config = {dict(fields)!r:.200} makes no {family.transformer} ({reason:.200}): correct it"
        ) from error
    return model


def _check_names(name: str, fields: Mapping[str, Any], known: list[str]) -> None:
    family = SCRATCH_FAMILIES[name]
    for field in fields:
        if field not in known:
            matches = get_close_matches(field, known, n=3, cutoff=0.5)
            remedy = f"nearest: {', '.join(matches)}" if matches else f"it has {', '.join(known)}"
            raise ConfigError(f"a {family.transformer} has no config.{field}; {remedy}")
        if field == "in_channels":
            raise ConfigError("config.in_channels follows from out_channels: remove it, and set that instead")
        if field == family.text_width or field in family.derived:
            raise ConfigError(f"config.{field} follows from the text encoder, all that a {name} reads: remove it")


def _inputs(channels: int, patch: tuple[int, int, int]) -> tuple[Tensor, Tensor, Conditions]:
    """Return a state [1, C, T, H, W] of two patches each way, a noise level [1], and an embedding."""
    state = torch.zeros((1, channels, *(2 * size for size in patch)))
    return state, torch.zeros(1), Conditions(torch.zeros(1, 3, WIDTH))


def _scheduler() -> Any:
    cls: Any = diffusers.FlowMatchEulerDiscreteScheduler  # untyped
    return cls(shift=_SHIFT)


def _vae(channels: int) -> Any:
    """Return a VAE of 8 pixels per latent, and 4 frames per latent frame, with fixed random weights."""
    cls: Any = diffusers.AutoencoderKLWan  # untyped
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        vae = cls(
            base_dim=4,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels,
        )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(_CONTRAST)
    return vae.eval()
