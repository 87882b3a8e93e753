"""Check of a mesh against a model, by the names and shapes of its parameters alone.

Ranks check the whole model before they divide it, and `starling run --dry-run` one without memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.parallel.expert import check_experts
from starling.policy.train.parallel.pipeline.stages import check_stages
from starling.policy.train.parallel.tensor.styles import check_tensors
from starling.policy.train.parallel.weights.adapters import check_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


def check_available(model: PreTrainedModel, settings: PolicySettings) -> None:
    """Check that the ranks of `settings.parallel` can divide `model`, and that its other settings work on a mesh.

    Args:
        model: whole, with or without memory.
        settings: of the policy.

    Raises:
        ConfigError: the model or a setting is not available on the mesh; the text names it and the remedy.
    """
    parallel = settings.parallel
    if parallel.tp > 1:
        check_tensors(model, parallel.tp)
    if parallel.cp > 1:
        check_heads(model, parallel)
    if parallel.ep > 1:
        check_experts(model, parallel.ep)
    if parallel.pp > 1:
        check_stages(model, parallel)
        if parallel.schedule == "zbv" and settings.memory.checkpointing != "none":
            raise ConfigError(
                f'policy.memory.checkpointing = "{settings.memory.checkpointing}" with policy.parallel.schedule = '
                '"zbv" would compute each block three times: set the schedule to "1f1b", or checkpointing to "none"'
            )
    check_adapters(model, parallel)
    for name in ("compile", "offload_activations"):
        if getattr(settings.memory, name):
            raise ConfigError(f"policy.memory.{name} = true is not available on a mesh yet: set it to false")
    if settings.memory.offload_optimizer and uses_muon(settings):
        raise ConfigError(
            'policy.memory.offload_optimizer = true with an optimizer of kind = "muon" is not available on a mesh: it '
            'computes from whole matrices, which ranks join on their devices; set it to false, or the kind to "adamw"'
        )


def uses_muon(settings: PolicySettings) -> bool:
    """Whether some steps of a policy with `settings` have Muon as their optimizer."""
    optimizers = settings.optimizer, settings.sft.optimizer, settings.dpo.optimizer, settings.reward_model.optimizer
    return any(optimizer.kind == "muon" for optimizer in optimizers)


def check_heads(model: PreTrainedModel, settings: ParallelSettings) -> None:
    """Check that the ranks of cp can divide the attention heads of `model`, where they do.

    Raises:
        ConfigError: they cannot.
    """
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 0) // settings.tp
    if settings.context == "ulysses" and heads % settings.cp:
        of_rank = " of each rank of tp" if settings.tp > 1 else ""
        fitting = [str(number) for number in range(1, heads + 1) if not heads % number]
        raise ConfigError(
            f"policy.parallel.cp = {settings.cp} does not divide the {heads} attention heads{of_rank}: set it to one "
            f'of {", ".join(fitting)}, or policy.parallel.context to "ring" or "all_gather"'
        )
