"""What a model is made to do to need less memory, once, when it is loaded, and where its optimizer works."""

from __future__ import annotations

import structlog
import torch

from starling.policy.settings.memory import MemorySettings
from starling.policy.train.memory.blocks import compile_blocks
from starling.policy.train.memory.checkpointing import checkpoint_blocks
from starling.policy.train.memory.offload import offload_activations
from starling.policy.train.model.lm_head import find_lm_head

log = structlog.get_logger(__name__)


def apply_memory_settings(model: torch.nn.Module, settings: MemorySettings) -> None:
    """Change how `model` computes, in place; its tensors and their names stay as they are.

    Call it once, on the device where the model will be, and after adapters have been added.

    Raises:
        ConfigError: the model has no blocks that could be checkpointed or compiled.
    """
    # Before blocks are compiled: this runs the model on one token, a shape that never comes again.
    find_lm_head(model)
    on_cpu = next(model.parameters()).device.type == "cpu"
    if settings.offload_activations and on_cpu:
        log.warning("policy.memory.offload_activations has no effect: the model is on the CPU")
    elif settings.offload_activations:
        offload_activations(model)
    if settings.offload_optimizer and on_cpu:
        log.warning("policy.memory.offload_optimizer has no effect: the model is on the CPU")
    if settings.checkpointing != "none":
        checkpoint_blocks(model, settings.checkpointing, settings.checkpoint_every)
    if settings.compile:
        compile_blocks(model)


def optimizer_device(model: torch.nn.Module, settings: MemorySettings) -> torch.device | None:
    """Return the device on which the updates of `model` are made, or None where each parameter is."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return torch.device("cpu") if settings.offload_optimizer and not on_cpu else None
