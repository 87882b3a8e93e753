"""Building the diffusion engine from settings: its model, its sampler, and what guidance leads away from."""

from __future__ import annotations

from pathlib import Path

import torch

from starling.algo.diffusion.conditions import Conditions, conditions_of
from starling.algo.diffusion.folder import PipelineFolder, load_transformer, pipeline_sampler, read_pipeline
from starling.algo.diffusion.settings import SamplerSettings
from starling.algo.diffusion.text.cache import CachedEmbedder
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.diffusion.engine import DiffusionEngine
from starling.weightsync.tensors.adapters import add_adapters, base_digest


def diffusion_engine(spec: EngineSpec) -> DiffusionEngine:
    """Build the diffusion engine from `spec`.

    Raises:
        ConfigError: the pipeline cannot be loaded, has no latents of the size that is asked for, or no text encoders
            although guidance needs them.
    """
    settings, rollout, lora = spec.diffusion, spec.rollout, spec.model.lora
    if settings is None:
        raise ConfigError("rollout.engine = 'diffusion' draws the samples of [diffusion], and there is none: add it")
    folder, device = read_pipeline(spec.path, settings.text_length), device_of(spec.model.device)
    sampler = pipeline_sampler(folder, settings)
    shape = folder.latent_shape(settings.height, settings.width, settings.num_frames)
    model = build_transformer(
        folder, dtype=getattr(torch, spec.model.dtype), device=device, weights=rollout.load_weights, lora=lora
    )
    return DiffusionEngine(
        model,
        sampler,
        shape,
        text_length=folder.text_length,
        max_rows=rollout.max_rows,
        exclusive=rollout.exclusive,
        guidance=settings.guidance,
        unconditional=_unconditional(folder, settings, device) if settings.guidance else None,
        same_start=settings.same_start,
        version=0 if rollout.load_weights else -1,
        name=spec.name,
        base=base_digest(model, lora),
        digests=spec.weights.digests,
        serving=spec.serving,
    )


def build_transformer(
    folder: PipelineFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: bool,
    lora: LoraSettings | None = None,
) -> torch.nn.Module:
    """Return the transformer of a pipeline, ready to generate.

    Args:
        folder: of the pipeline.
        dtype: of its weights; adapters are float32.
        device: of its weights.
        weights: load the weights; otherwise they are initialised at random, until the policy's are adopted.
        lora: adapters to add; the base weights are then loaded in any case.

    Raises:
        ConfigError: the files cannot be read, or do not fit `lora`.
    """
    if lora is None:
        model = load_transformer(folder, dtype=dtype, device=device, random=not weights)
    else:
        model = load_transformer(folder, dtype=dtype)
        add_adapters(model, lora, seed=0)  # replaced by the policy's at the first adoption
    return model.to(device).eval().requires_grad_(False)


def pipeline_embedder(
    folder: PipelineFolder, settings: SamplerSettings, device: torch.device
) -> PipelineEmbedder | CachedEmbedder:
    """Return what computes the embeddings of prompts; its text encoders are loaded when a prompt needs them.

    Raises:
        ConfigError: the pipeline has no text encoders, or the cache cannot be used.
    """
    embedder = PipelineEmbedder(folder, dtype=getattr(torch, settings.text_dtype), device=device)
    return CachedEmbedder(embedder, Path(settings.text_cache)) if settings.text_cache else embedder


def device_of(name: str) -> torch.device:
    """Return the device that `model.device` names; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _unconditional(folder: PipelineFolder, settings: SamplerSettings, device: torch.device) -> Conditions:
    """Return the conditions of the negative prompt. Its text encoders leave the memory again. Raises ConfigError."""
    embedder = pipeline_embedder(folder, settings, device)
    (tensors,) = embedder.embed([settings.negative_prompt], unconditional=True)
    return conditions_of(tensors, folder.text_length, device)
