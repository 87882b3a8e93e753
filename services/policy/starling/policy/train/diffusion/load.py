"""Version 0 of a diffusion transformer, ready to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from starling.algo.diffusion.folder import PipelineFolder, load_transformer
from starling.common.settings import ModelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.memory.checkpointing import checkpoint_blocks
from starling.policy.train.model.load import find_device, freeze
from starling.policy.train.model.lora import load_adapters
from starling.weightsync.tensors.adapters import add_adapters


def load_version_0(folder: PipelineFolder, settings: ModelSettings, policy: PolicySettings, seed: int) -> Any:
    """Load the transformer of a pipeline, with adapters if `settings` have some.

    Args:
        folder: of the pipeline.
        settings: type, device and adapters.
        policy: whether weights are drawn at random, which are frozen, and what is computed again.
        seed: of the adapters.

    Raises:
        ConfigError: the files cannot be read, or do not fit the settings.
    """
    device = find_device(settings.device)
    # First in host memory, so that random weights and adapters are the same on every device.
    model = load_transformer(folder, dtype=getattr(torch, settings.dtype), random=policy.init == "random")
    if settings.lora is not None:
        add_adapters(model, settings.lora, seed=seed)
        if settings.lora.adapter:
            load_adapters(model, Path(settings.lora.adapter))
    model.to(device)
    freeze(model, policy.frozen)
    if policy.memory.checkpointing != "none":
        checkpoint_blocks(model, policy.memory.checkpointing, policy.memory.checkpoint_every)
    return model


def outline(folder: PipelineFolder, dtype: str) -> torch.nn.Module:
    """Return the transformer of a pipeline without memory for its weights, of the type `dtype`. Raises ConfigError."""
    return load_transformer(folder, dtype=getattr(torch, dtype), device="meta", random=True)
