"""Tiny transformers of diffusers with random weights, one of each family."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.text.scratch import WIDTH
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.policy import PolicySettings

TEXT_WIDTH: Final = WIDTH
NUM_TEXT_TOKENS: Final = 5
CHANNELS: Final = 4


def wan(num_layers: int = 2, channels: int = CHANNELS) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=num_layers,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


def cosmos(num_layers: int = 2, channels: int = CHANNELS) -> Any:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        in_channels=channels + 1,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=num_layers,
        mlp_ratio=2,
        text_embed_dim=TEXT_WIDTH,
        adaln_lora_dim=4,
        max_size=(8, 16, 16),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )


def sd3(num_layers: int = 2, channels: int = CHANNELS) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=channels,
        num_layers=num_layers,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=6,
        out_channels=channels,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def sana(num_layers: int = 2, channels: int = CHANNELS) -> Any:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=num_layers,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=TEXT_WIDTH,
        sample_size=16,
        timestep_scale=0.5,
    )


def sana_video(num_layers: int = 2, channels: int = CHANNELS) -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return SanaVideoTransformer3DModel(
        in_channels=channels,
        out_channels=channels,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=num_layers,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=TEXT_WIDTH,
        sample_size=8,
        patch_size=(1, 2, 2),
        rope_max_seq_len=32,
    )


FAMILIES: Final = {"wan": wan, "cosmos": cosmos, "sd3": sd3, "sana": sana, "sana_video": sana_video}
IMAGES: Final = ("sd3", "sana")


def tiny(name: str, seed: int = 0, num_layers: int = 2) -> Any:
    """Return a model whose weights are all random, also those that diffusers starts at 0 or 1."""
    torch.manual_seed(seed)
    model = FAMILIES[name](num_layers=num_layers).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def latents(name: str, batch: int = 2, seed: int = 0, frames: int = 3) -> Tensor:
    """Return a state of a family."""
    shape = (batch, CHANNELS, 8, 8) if name in IMAGES else (batch, CHANNELS, frames, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditions(name: str, batch: int = 2, seed: int = 7) -> Conditions:
    """Return embeddings that a family reads, those of the last trajectory padded."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn((batch, NUM_TEXT_TOKENS, TEXT_WIDTH), generator=generator)
    mask = torch.ones(batch, NUM_TEXT_TOKENS, dtype=torch.bool)
    mask[-1, -2:] = False
    pooled = torch.randn((batch, 6), generator=generator) if name == "sd3" else None
    return Conditions(text * mask.unsqueeze(-1), mask, pooled)


def with_diffusion(settings: PolicySettings, diffusion: DiffusionSettings) -> PolicySettings:
    """Return `settings` with this section."""
    return settings.model_copy(update={"diffusion": diffusion})
