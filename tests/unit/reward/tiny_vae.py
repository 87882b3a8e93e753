"""Tiny VAEs with random weights, saved as diffusers saves them, and what diffusers itself makes of latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def save_wan(folder: Path, *, channels: int = 16, seed: int = 0) -> Any:
    """Save a VAE of the class of Wan 2.1 (16 channels), or Wan 2.2 (48), and return it."""
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    wan22 = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "is_residual": True}
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=np.linspace(-1.0, 1.0, channels).tolist(),
        latents_std=np.linspace(1.0, 3.0, channels).tolist(),
        **(wan22 if channels == 48 else {}),
    )
    with torch.no_grad():  # else all pixels are nearly grey
        vae.decoder.conv_out.weight.mul_(8.0)
    vae.save_pretrained(folder)
    for file in folder.iterdir():  # diffusers writes weights for their owner only, and workers may be another user
        file.chmod(0o644)
    return vae.eval()


def decode(vae: Any, latents: np.ndarray, *, mean_std: bool = True) -> np.ndarray:
    """Return what diffusers makes of normalised latents [B, C, T, H, W], as uint8 pixels [B, T, H, W, 3]."""
    import torch
    from diffusers.video_processor import VideoProcessor

    z = torch.from_numpy(latents)
    if mean_std:
        shape = (1, -1, 1, 1, 1)
        z = z * torch.tensor(vae.config.latents_std).view(shape) + torch.tensor(vae.config.latents_mean).view(shape)
    with torch.no_grad():
        decoded = vae.decode(z).sample
    video = VideoProcessor(vae_scale_factor=8).postprocess_video(decoded, output_type="np")
    return np.ascontiguousarray((video * 255).round().astype(np.uint8))
