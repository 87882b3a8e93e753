"""Decoders of latents as scorers: the settings of the pool that decodes."""

from __future__ import annotations

from typing import Any, Final

from starling.reward.score.decode.geometry import Geometries, VaeGeometry
from starling.reward.settings import RewardSettings, ScorerSettings

_DECODER: Final = "starling.reward.score.decode.vae:VaeDecoder"


def decoder_scorers(settings: RewardSettings, geometries: Geometries) -> RewardSettings:
    """Return the settings of a pool of which each scorer is the decoder of a VAE, in the order of `geometries`."""
    decoder = settings.decoder
    return RewardSettings(
        scorers=tuple(_scorer(settings, geometry) for geometry in geometries.values()),
        num_workers=decoder.num_workers,
        timeout_s=decoder.timeout_s,
        start_timeout_s=decoder.start_timeout_s,
        sandbox=settings.sandbox,
    )


def _scorer(settings: RewardSettings, geometry: VaeGeometry) -> ScorerSettings:
    decoder, folders = settings.decoder, settings.decoder.folders
    options: dict[str, Any] = {
        "folder": str(geometry.folder),
        "class_name": geometry.class_name,
        "dtype": decoder.dtype,
        "device": "cpu" if decoder.device == "cpu" else "cuda",  # the only one that the worker sees
        "latents": decoder.latents,
        "tiling": decoder.tiling,
        "num_threads": decoder.num_threads,
    }
    return ScorerSettings(
        name=_DECODER,
        label=f"vae-{geometry.channels}",
        batch_size=decoder.batch_size,
        retries=decoder.retries,
        options=options,
        device=decoder.device,
        python=decoder.python,
        memory_mb=decoder.memory_mb,
        needs=decoder.needs.model_copy(update={"paths": (*decoder.needs.paths, *folders)}),
    )
