"""Folder of a diffusion pipeline, in the form that diffusers saves: its parts, its shapes, and its noise levels.

    model_index.json        the class of each part
    transformer/            the model that is trained
    scheduler/              the noise levels of its sampler
    vae/                    pixels to latents and back; its config.json says the shapes
    text_encoder/, ...      embeddings of prompts; absent where they are computed before the run

diffusers is imported only where a model or a scheduler is made. The text encoder of a big model takes more memory than
its transformer, so no part is read that is not asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from starling.algo.diffusion.models import FAMILIES
from starling.algo.diffusion.sampler import Sampler, make_sampler
from starling.algo.diffusion.settings import SamplerSettings
from starling.common.errors import ConfigError

INDEX: Final = "model_index.json"
CONFIG: Final = "config.json"
TEXT_LENGTHS: Final[Mapping[str, int]] = {
    "WanTransformer3DModel": 512,
    "CosmosTransformer3DModel": 512,
    "SD3Transformer2DModel": 333,
    "SanaTransformer2DModel": 300,
    "SanaVideoTransformer3DModel": 300,
}
"""Tokens of a prompt, padding included, that the models of each family were trained with."""
_TIMELESS: Final = {"SD3Transformer2DModel", "SanaTransformer2DModel"}
"""Families of images, whose latents have no axis of time."""
_DOWNSAMPLING: Final = ("temperal_downsample", "temporal_downsample")


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """A pipeline on disk."""

    path: Path
    transformer_class: str
    """Of diffusers."""
    scheduler_class: str
    channels: int
    """Of latents."""
    spatial: int
    """Pixels per latent, in height and in width."""
    temporal: int
    """Frames per latent frame, after the first; 1 for images."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Class of each part, by its name; without those that are left out."""
    other_length: int = 0
    """Tokens that a prompt is padded to, if not those that the family was trained with; 0 for these."""

    @property
    def text_length(self) -> int:
        """Tokens that a prompt is padded to."""
        return self.other_length or TEXT_LENGTHS[self.transformer_class]

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Return the shape of the latents of an image, [C, H, W], or of a video, [C, T, H, W].

        Raises:
            ConfigError: there are no latents of that size.
        """
        if height < 1 or width < 1 or height % self.spatial or width % self.spatial:
            raise ConfigError(
                f"{height} x {width} pixels are no multiple of {self.spatial}, the pixels of a latent: change the size"
            )
        size = (height // self.spatial, width // self.spatial)
        if self.transformer_class in _TIMELESS:
            if num_frames != 1:
                raise ConfigError(f"{self.transformer_class} makes images, not {num_frames} frames: set 1 frame")
            return (self.channels, *size)
        if num_frames < 1 or (num_frames - 1) % self.temporal:
            raise ConfigError(
                f"{num_frames} frames are not 1 and a multiple of {self.temporal}, the frames of a latent frame: "
                f"set {1 + max(0, num_frames - 1) // self.temporal * self.temporal}"
            )
        return (self.channels, 1 + (num_frames - 1) // self.temporal, *size)


def read_pipeline(path: Path, text_length: int = 0) -> PipelineFolder:
    """Read which parts a pipeline has, and its shapes.

    Args:
        path: of the folder.
        text_length: tokens that prompts are padded to; 0 for those that the family was trained with.

    Raises:
        ConfigError: a file is missing or unreadable, or the transformer is of a family whose velocity is not known.
    """
    index = _read(path / INDEX, "give the folder of a pipeline, as diffusers' `save_pretrained` writes it")
    classes = {name: of[1] for name, of in index.items() if isinstance(of, list) and len(of) == 2 and of[1]}
    for part in ("transformer", "scheduler"):
        if part not in classes:
            raise ConfigError(f"{str(path / INDEX)!r} names no {part}: give the folder of a whole pipeline")
    transformer = str(classes["transformer"])
    if transformer not in FAMILIES:
        raise ConfigError(f"{str(path)!r} has a {transformer!r}, and can be trained with {', '.join(FAMILIES)}")
    config = _read(path / "transformer" / CONFIG, "restore the file")
    channels = config.get("out_channels") or config.get("in_channels")
    if type(channels) is not int or channels < 1:
        raise ConfigError(f"{str(path / 'transformer' / CONFIG)!r} has out_channels {channels!r}: restore the file")
    vae = _read(path / "vae" / CONFIG, "the VAE's configuration says the shapes of latents: save the pipeline with it")
    spatial, temporal = _factors(vae, path / "vae" / CONFIG)
    temporal = 1 if transformer in _TIMELESS else temporal
    parts = {name: str(cls) for name, cls in classes.items()}
    return PipelineFolder(path, transformer, parts["scheduler"], channels, spatial, temporal, parts, text_length)


def transformer_width(folder: PipelineFolder, setting: str) -> int:
    """Return a width in the configuration of a pipeline's transformer.

    Raises:
        ConfigError: it has none.
    """
    path = folder.path / "transformer" / CONFIG
    width = _read(path, "restore the file").get(setting)
    if type(width) is not int or width < 1:
        raise ConfigError(f"{str(path)!r} has {setting} {width!r}: restore the file")
    return width


def _factors(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Return the pixels per latent, and the frames per latent frame, of a VAE."""
    spatial, temporal = config.get("scale_factor_spatial"), config.get("scale_factor_temporal")
    downsampling = next((config[name] for name in _DOWNSAMPLING if isinstance(config.get(name), list)), None)
    if spatial is None and downsampling is not None:
        spatial = 2 ** len(downsampling)
    if temporal is None and downsampling is not None:
        temporal = 2 ** sum(map(bool, downsampling))
    if spatial is None and isinstance(config.get("block_out_channels"), list):
        spatial = 2 ** (len(config["block_out_channels"]) - 1)
    if spatial is None and isinstance(config.get("encoder_block_out_channels"), list):  # of Sana
        spatial = 2 ** (len(config["encoder_block_out_channels"]) - 1)
    found = spatial, 1 if temporal is None else temporal
    if any(type(value) is not int or not 1 <= value <= 256 for value in found):
        raise ConfigError(
            f"{str(path)!r} has {found[0]!r} pixels per latent and {found[1]!r} frames, not 1 to 256: save the VAE "
            "again with a newer diffusers"
        )
    return int(found[0]), int(found[1])  # type: ignore[arg-type]


def load_transformer(
    folder: PipelineFolder, *, dtype: torch.dtype, device: torch.device | str = "cpu", random: bool = False
) -> torch.nn.Module:
    """Load the transformer of a pipeline, in evaluation mode.

    Args:
        folder: of the pipeline.
        dtype: of its weights, but for those that its family keeps in float32.
        device: of its weights.
        random: draw the weights from torch's generator, instead of reading them.

    Raises:
        ConfigError: diffusers is missing or too old, or the files cannot be read.
    """
    cls = _class(folder.transformer_class)
    path = folder.path / "transformer"
    try:
        if random:
            with torch.device(device):
                model = _cast(cls.from_config(cls.load_config(str(path), local_files_only=True)), dtype)
        else:
            model = cls.from_pretrained(str(path), torch_dtype=dtype, local_files_only=True)
    except Exception as error:  # the user's folder: diffusers, safetensors and torch raise many
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the transformer in {str(path)!r} cannot be loaded: {reason:.300}") from error
    loaded: torch.nn.Module = model.to(device=device).eval()
    return loaded


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Change the type of a model's weights as `from_pretrained` does: some modules of a family stay in float32."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model


def noise_levels(folder: PipelineFolder, num_steps: int, *, shift: float | None = None) -> list[float]:
    """Return the ``num_steps + 1`` noise levels of the pipeline's scheduler, from the first to the end.

    Args:
        folder: of the pipeline.
        num_steps: steps of a trajectory.
        shift: of the levels towards noise, in place of the scheduler's own (`flow_shift` or `shift`).

    Raises:
        ConfigError: the scheduler cannot be made, or is none of a flow, whose levels are from 0 to 1.
    """
    if num_steps < 1:
        raise ConfigError(f"a trajectory of {num_steps} steps: set 1 or more")
    cls, path = _class(folder.scheduler_class), folder.path / "scheduler"
    try:
        config = dict(cls.load_config(str(path), local_files_only=True))
        if shift is not None:
            config |= {name: shift for name in ("shift", "flow_shift") if name in config}
        scheduler = cls.from_config(config)
        scheduler.set_timesteps(num_steps)
        levels = [float(level) for level in scheduler.sigmas]
    except Exception as error:  # the user's folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the scheduler in {str(path)!r} gives no {num_steps} steps: {reason:.300}") from error
    if len(levels) != num_steps + 1 or not all(0.0 <= level <= 1.0 for level in levels):
        raise ConfigError(
            f"the scheduler in {str(path)!r} has noise levels from {min(levels):g} to {max(levels):g} for {num_steps} "
            "steps, and a flow has them from 0 to 1: use FlowMatchEulerDiscreteScheduler, or one with use_flow_sigmas"
        )
    return levels


def pipeline_sampler(folder: PipelineFolder, settings: SamplerSettings) -> Sampler:
    """Return the sampler of a pipeline's trajectories: the same for all services with equal settings.

    Raises:
        ConfigError: as of `noise_levels`; or none of the steps that `settings` name can add noise.
    """
    levels = noise_levels(folder, settings.num_steps, shift=settings.shift or None)
    try:
        return make_sampler(
            levels, settings.dynamics, settings.noise_level, window=settings.window, stored=settings.stored
        )
    except ValueError as error:
        raise ConfigError(f"[diffusion] gives no sampler: {error}") from None


def _class(name: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError("diffusers is not installed: install the extra `diffusion` of this service") from error
    found = getattr(diffusers, name, None)
    if found is None:
        raise ConfigError(f"diffusers {diffusers.__version__} has no {name}: install a newer one")
    return found


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error.strerror}): {remedy}") from None
    except ValueError:
        raise ConfigError(f"{str(path)!r} is no JSON: {remedy}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} is no object of JSON: {remedy}")
    return found
