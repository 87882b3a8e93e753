"""Decoder of latents in a worker process: a VAE of diffusers, called like a scorer of batches.

    pixels = round(255 * clamp(vae.decode(latents * std + mean) / 2 + 1/2, 0, 1))

`mean` and `std` are those of the VAE's configuration, for each channel. Latents on the wire are *normalised*, as
diffusion models make them and as the clients of Cosmos-RL send them; `latents = "raw"` says that they are what the
encoder returns. torch and diffusers are imported in `setup`, so that a service without a decoder needs neither.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.raised import describe_raised
from starling.reward.core.media import NUM_COLOURS, Input
from starling.reward.score.scorers.batch import Batch
from starling.reward.score.scorers.pixel_output import PixelOutput

SECONDS: Final = "seconds"
"""The decoder's score of a sample: its share of the time that its batch took."""


class VaeDecoder:
    """Decodes batches of latents into the memory that the service has prepared.

    Args:
        folder: of the VAE, as diffusers' `save_pretrained` writes it.
        class_name: of the VAE in diffusers.
        dtype: of its weights and of the computation: `float32`, `bfloat16` or `float16`.
        device: as torch names it.
        latents: `normalised`, or `raw` if they are as the encoder returns them.
        tiling: decode in tiles, which takes less memory and leaves faint seams.
        num_threads: on a CPU.
    """

    keys = (SECONDS,)
    media: Input = "latents"

    def __init__(
        self,
        folder: str,
        class_name: str,
        dtype: str = "float32",
        device: str = "cpu",
        latents: str = "normalised",
        tiling: bool = False,
        num_threads: int = 1,
    ) -> None:
        self._folder, self._class_name, self._dtype, self._device = folder, class_name, dtype, device
        self._are_normalised, self._tiling, self._num_threads = latents == "normalised", tiling, num_threads

    def setup(self) -> None:
        """Load the VAE. Raises ConfigError when diffusers is not installed, or has no such class."""
        torch = _imported("torch")
        self._torch = torch
        torch.set_num_threads(self._num_threads)
        diffusers = _imported("diffusers")
        vae_class = getattr(diffusers, self._class_name, None)
        if vae_class is None:
            raise ConfigError(
                f"reward.decoder: diffusers {diffusers.__version__} has no {self._class_name}: install a newer one."
            )
        dtype = getattr(torch, self._dtype)
        try:
            vae = vae_class.from_pretrained(self._folder, torch_dtype=dtype, local_files_only=True)
            self._vae = vae.to(self._device).eval().requires_grad_(False)
        except Exception as error:  # diffusers, safetensors and torch have many
            raise ConfigError(
                f"reward.decoder: the VAE in {self._folder!r} cannot be loaded: {describe_raised(error)}."
            ) from error
        if self._tiling:
            self._vae.enable_tiling()
        self._mean, self._std = _statistics(torch, self._vae.config, self._device)

    def score(self, batch: Batch) -> dict[str, list[float]]:
        """Decode a batch; returns the seconds of each sample. Raises ValueError when numbers are not finite."""
        seconds = list[float]()
        for latents, outputs in _of_one_shape(batch):
            began = time.monotonic()
            for pixels, output in zip(self._decode(latents), outputs, strict=True):
                output.write(pixels)
            seconds += [(time.monotonic() - began) / len(outputs)] * len(outputs)
        return {SECONDS: seconds}

    def _decode(self, latents: Sequence[Any]) -> Any:
        """Return uint8 pixels [B, T, H, W, 3] of latents of one shape [C, T, H, W]."""
        torch = self._torch
        with torch.inference_mode():
            # A copy: the latents lie in memory that is read-only, of which torch makes no tensor without a warning.
            z = torch.stack([torch.from_numpy(one.copy()) for one in latents]).to(self._device)
            if self._are_normalised:
                z = z * self._std + self._mean
            decoded = self._vae.decode(z.to(self._vae.dtype), return_dict=False)[0].float()
            if decoded.ndim != 5 or decoded.shape[1] != NUM_COLOURS:
                raise ValueError(f"the VAE decodes to shape {list(decoded.shape)}, not to [B, 3, T, H, W]")
            if not bool(torch.isfinite(decoded).all()):
                raise ValueError("the latents decode to numbers that are not finite")
            pixels = (decoded / 2 + 0.5).clamp_(0, 1).mul_(255).round_().to(torch.uint8)
            return pixels.permute(0, 2, 3, 4, 1).contiguous().cpu().numpy()


def _of_one_shape(batch: Batch) -> Iterator[tuple[list[Any], list[PixelOutput]]]:
    """Yield the latents of neighbours of one shape, which are decoded together, with where their pixels go."""
    pairs = zip(batch.latents, batch.outputs, strict=True)
    for _, alike in groupby(pairs, key=lambda pair: pair[0].shape):
        latents, outputs = zip(*alike, strict=True)
        yield list(latents), list(outputs)


def _statistics(torch: Any, config: Any, device: str) -> tuple[Any, Any]:
    """Return mean and std of latents, as a VAE's configuration has them, in a form that fits [B, C, T, H, W]."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        columns = (torch.tensor(one, dtype=torch.float32, device=device).view(-1, 1, 1, 1) for one in (mean, std))
        return next(columns), next(columns)
    factor, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
    return torch.tensor(float(shift), device=device), torch.tensor(1.0 / float(factor), device=device)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"reward.decoder needs {name}, which cannot be imported here ({error}): "
            "pip install 'starling-reward[media]'."
        ) from None
