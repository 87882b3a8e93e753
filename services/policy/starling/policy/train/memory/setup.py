"""Application of the memory settings to a loaded model, and the device of its optimizer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import structlog
import torch

from starling.algo.attention.interface import BackendChoice
from starling.policy.settings.memory import MemorySettings
from starling.policy.train.memory.checkpointing import checkpoint_blocks
from starling.policy.train.memory.compiled import check_compiler, compile_blocks
from starling.policy.train.memory.offload import offload_activations
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.model.lm_head import find_lm_head
from starling.policy.train.model.routing import find_routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

log = structlog.get_logger(__name__)


def apply_memory_settings(
    model: PreTrainedModel,
    settings: MemorySettings,
    attention: BackendChoice = "auto",
    device: torch.device | None = None,
) -> None:
    """Change how `model` computes, in place; its tensors and their names stay the same.

    Call it once, on the model's final device and after adapters have been added. A model without memory has been
    observed by then, see `starling.policy.train.parallel.weights.sample`.

    Args:
        model: to be trained.
        settings: to apply.
        attention: backend of the attention, which is tried before blocks are changed.
        device: of a model without memory, once it has some.

    Raises:
        ConfigError: the model has no blocks to checkpoint or compile, there is no compiler, or the device lacks the
            attention backend.
    """
    device = device or model.device
    if settings.compile:
        check_compiler(device)
        # The attention that `attention_plan` registers is then excluded from compilation.
        import_module("torch._dynamo")
    # Before blocks are compiled: these run the model on a few tokens, shapes that never come again. Before they are
    # checkpointed, because a block that computes twice would look like two to an observer of its attention.
    if model.get_output_embeddings() is not None:  # a reward model has none
        find_lm_head(model)
    attention_plan(model, attention)
    find_routing(model)
    on_cpu = device.type == "cpu"
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
    """Return the device of the optimizer updates of `model`, or None for the device of each parameter."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return torch.device("cpu") if settings.offload_optimizer and not on_cpu else None
