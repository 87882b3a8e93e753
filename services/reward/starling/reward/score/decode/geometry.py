"""Shapes of a VAE's pixels and latents, from the `config.json` in its folder; needs neither torch nor diffusers.

The service checks with it what a request would take before it accepts it, and prepares the memory into which a worker
decodes. All of these VAEs are causal in time: the first latent frame is one frame of pixels, every further one is
`temporal` frames.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from starling.common.errors import ConfigError
from starling.reward.core.media import NUM_COLOURS, Input, MediaForm
from starling.reward.core.requests import RewardRequest, scorers_of
from starling.reward.core.rewards import WeightedScorer

MAX_FACTOR: Final = 256
MAX_CHANNELS: Final = 1024
_CONFIG: Final = "config.json"


class VaeGeometry(NamedTuple):
    """What a VAE makes of latents."""

    folder: Path
    class_name: str
    """Its class in diffusers."""
    channels: int
    """Of the latents, by which VAEs are told apart."""
    spatial: int
    """Pixels per latent, in height and in width."""
    temporal: int
    """Frames per latent frame, after the first."""

    def pixels_of(self, latents: MediaForm) -> MediaForm:
        """Return the form of the pixels of a sample with this number of channels."""
        channels, num_frames, height, width = latents.shape
        assert channels == self.channels
        frames = self.temporal * (num_frames - 1) + 1
        shape = (frames, height * self.spatial, width * self.spatial, NUM_COLOURS)
        return MediaForm("pixels", "uint8", shape, latents.fps)


Geometries = Mapping[int, VaeGeometry]
"""The VAEs of a service, by the channels of their latents."""
NO_VAES: Final[Geometries] = MappingProxyType({})


class _Family(NamedTuple):
    """Where the configuration of a class has its shapes."""

    channels: str
    spatial: Callable[[Mapping[str, Any]], Any]
    temporal: Callable[[Mapping[str, Any]], Any]


_FAMILIES: Final[Mapping[str, _Family]] = {
    "AutoencoderKLWan": _Family(
        "z_dim", lambda config: config["scale_factor_spatial"], lambda config: config["scale_factor_temporal"]
    ),
    "AutoencoderKLQwenImage": _Family(
        "z_dim",
        lambda config: 2 ** len(config["temperal_downsample"]),
        lambda config: 2 ** sum(config["temperal_downsample"]),
    ),
    "AutoencoderKLHunyuanVideo": _Family(
        "latent_channels",
        lambda config: config["spatial_compression_ratio"],
        lambda config: config["temporal_compression_ratio"],
    ),
}


def read_geometry(folder: Path) -> VaeGeometry:
    """Return the geometry of the VAE in a folder. Raises ConfigError when it has none that can decode here."""
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"reward.decoder: the VAE's folder {str(folder)!r} has no readable {_CONFIG} ({error.strerror}): give the "
            "folder that diffusers' `save_pretrained` has written, as `vae` in that of a pipeline."
        ) from None
    except ValueError:
        raise ConfigError(f"reward.decoder: {str(path)!r} is no JSON: give the folder of a VAE of diffusers.") from None
    name = config.get("_class_name") if isinstance(config, dict) else None
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"reward.decoder: {str(folder)!r} has a {name!r}, which is not decoded here: give a folder with one of "
            f"{', '.join(_FAMILIES)}."
        )
    try:
        found = config[family.channels], family.spatial(config), family.temporal(config)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"reward.decoder: {str(path)!r} does not say the shapes of its pixels ({error!r}): save the VAE again with "
            "a newer diffusers."
        ) from None
    for value, most in zip(found, (MAX_CHANNELS, MAX_FACTOR, MAX_FACTOR), strict=True):
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"reward.decoder: {str(path)!r} has {value!r} for one of its shapes, not 1 to {most}.")
    return VaeGeometry(folder, str(name), *found)


def read_geometries(folders: Sequence[Path]) -> Geometries:
    """Return the geometries of VAEs. Raises ConfigError when one cannot be used, or two have equal channels."""
    found = dict[int, VaeGeometry]()
    for folder in folders:
        geometry = read_geometry(folder)
        other = found.setdefault(geometry.channels, geometry)
        if other is not geometry:
            raise ConfigError(
                f"reward.decoder: the VAEs in {str(other.folder)!r} and {str(folder)!r} both decode latents of "
                f"{geometry.channels} channels, by which they are told apart: keep one of them."
            )
    return found


def pixel_bytes(
    request: RewardRequest,
    scorers: Sequence[WeightedScorer],
    inputs: Sequence[Input | None],
    geometries: Geometries,
) -> int:
    """Return how much memory the pixels take that are made of the latents of a request.

    Args:
        request: with its samples.
        scorers: all of them.
        inputs: what each of them reads; None, or nothing at all, if that is not known yet: it may be pixels.
        geometries: of the VAEs.
    """
    if not geometries or not any(tensor.form.kind == "latents" for tensor in request.media):
        return 0
    known = inputs or (None,) * len(scorers)
    decoded = [any(known[scorer] in ("pixels", None) for scorer in wanted) for wanted in scorers_of(request, scorers)]
    total = 0
    for sample in request.samples:
        form = None if sample.media is None else request.media[sample.media.tensor].form
        if form is not None and form.kind == "latents" and decoded[sample.prompt] and form.shape[0] in geometries:
            total += geometries[form.shape[0]].pixels_of(form).size_bytes
    return total


def decoded_bytes(latents: MediaForm, num: int, geometries: Geometries) -> int:
    """Return how much memory the pixels take of `num` samples of one form of latents; 0 if none decodes them."""
    geometry = geometries.get(latents.shape[0])
    return 0 if geometry is None else num * geometry.pixels_of(latents).size_bytes


def no_decoder(latents: MediaForm, geometries: Geometries) -> str:
    """Return why latents are not decoded, as a sentence."""
    known = f", which has one for {' and '.join(map(str, sorted(geometries)))}" if geometries else ""
    return (
        f"latents of {latents.shape[0]} channels are not decoded here: add the folder of their VAE to "
        f"reward.decoder.folders{known}, or send pixels."
    )
