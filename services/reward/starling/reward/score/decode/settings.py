"""Settings of the decoder of latents."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator

from starling.common.ranges import MAX_MIB, MAX_PROCESSES
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.settings import Seconds, SettingsSection
from starling.reward.score.workers.devices import check_device

MAX_FOLDERS: Final = 8
MAX_DECODED: Final = 256
MAX_THREADS: Final = 1024
MAX_RETRIES: Final = 100


class DecoderSettings(SettingsSection):
    """How latents become the pixels that scorers read: once, whatever the number of these scorers."""

    folders: tuple[Path, ...] = Field(default=(), max_length=MAX_FOLDERS)
    """Folders of VAEs of diffusers, told apart by the channels of their latents: 16 (Wan 2.1, Cosmos-Predict 2.5), 48
    (Wan 2.2). Without one, scorers that read pixels are not for latents."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the VAE's weights, and in which it computes."""
    device: str = "cpu"
    """`cpu`, or a GPU as `cuda:1`."""
    python: Path | None = None
    """Interpreter of a Python environment with diffusers, where the service's own has none; as a scorer's."""
    memory_mb: int | None = Field(default=None, ge=1, le=MAX_MIB)
    """Limit on the memory of each worker, the pixels that it writes included, in MiB."""
    latents: Literal["normalised", "raw"] = "normalised"
    """What clients send. `normalised`: latents as diffusion models make them; they are multiplied with the standard
    deviation of the VAE's configuration, and its mean is added. `raw`: latents as the VAE's encoder returns them."""
    batch_size: int = Field(default=1, ge=1, le=MAX_DECODED)
    """Samples that are decoded at once."""
    tiling: bool = False
    """Decode in tiles, which takes less memory and leaves faint seams."""
    num_threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    """Threads of each worker on a CPU."""
    num_workers: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Worker processes, each with all of the VAEs."""
    timeout_s: Seconds = 120.0
    """Time limit of one batch, in seconds; then its worker is killed and replaced."""
    start_timeout_s: Seconds = 600.0
    """Time limit of a worker's start and the loading of its VAEs, in seconds."""
    retries: int = Field(default=1, ge=0, le=MAX_RETRIES)
    """How often a sample whose worker ended, or exceeded the time limit, is decoded again, alone."""
    needs: SandboxNeeds = SandboxNeeds()
    """What the workers may reach besides the folders and the device."""

    @field_validator("folders")
    @classmethod
    def _expanded(cls, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(folder.expanduser().absolute() for folder in folders)

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        return check_device("reward.decoder.device", device)
