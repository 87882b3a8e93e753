"""Stages of a pipeline: which blocks each has, on which rank, and how a rank keeps only its own.

A rank's model keeps its names and its class. Its list of blocks has those of this rank under their numbers; what other
ranks have is replaced: the embedding by a module that returns what another stage sent, the last norm and the output
layer by nothing. Each stage is another view of the same modules, with its own blocks only, and the model's body
computes the stage that is active: whatever calls the model computes the last stage, as it would the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.plan.sizes import TENSOR_MODELS
from starling.policy.plan.stages import balance_blocks, stages_of_rank
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.model.lm_head import SCORE, final_layer, has_final_layer
from starling.policy.train.optim.masters import LOW


def check_stages(model: Any, settings: ParallelSettings) -> None:
    """Check that the ranks of pp can divide the blocks of `model`.

    Raises:
        ConfigError: its code is not known to run in stages, it has fewer blocks than there are stages, or its gradients
            would be rounded.
    """
    given = f"policy.parallel.pp = {settings.pp}"
    if model.config.model_type not in TENSOR_MODELS or not has_final_layer(model):
        raise ConfigError(
            f"{given} is not available for {type(model).__name__}, only for language and reward models of type "
            f"{', '.join(TENSOR_MODELS)}: set it to 1, and use dp_shard"
        )
    if settings.schedule == "zbv" and settings.num_shards == 1 and model.dtype in LOW:
        # The second part of its backward passes adds up gradients in the parameter's type, and calls no hook.
        raise ConfigError(
            f'policy.parallel.schedule = "zbv" would sum gradients of {model.dtype} in that type where nothing shards '
            'them: set dp_shard above 1, model.dtype = "float32", or another schedule'
        )
    num_blocks, each = len(find_blocks(model)), settings.num_stages // settings.pp
    if num_blocks < settings.num_stages:
        most = num_blocks // each
        remedy = f"use at most {most}" if most > 1 else "set it to 1"
        stages = f"{settings.num_stages} stages, {each} on each rank" if each > 1 else f"{settings.num_stages} stages"
        raise ConfigError(f"{given} makes {stages}, and {type(model).__name__} has {num_blocks} blocks: {remedy}")
    trained = [parameter.requires_grad for parameter in model.parameters()]
    if any(trained) and not all(trained):
        _check_trained(model, settings)


def _check_trained(model: Any, settings: ParallelSettings) -> None:
    """Check that ranks can train some parameters of `model`: each has one, and backward passes are not split."""
    if settings.schedule == "zbv":
        raise ConfigError(
            'policy.parallel.schedule = "zbv" splits backward passes by the parameters of a stage, and needs all of '
            'them trained: set it to "1f1b", or remove [model.lora] or policy.frozen'
        )
    blocks, ranges = find_blocks(model), blocks_of_stages(model, settings)
    for rank in range(settings.pp):
        own = stages_of_rank(settings, rank)
        modules = [blocks[number] for stage in own for number in ranges[stage]]
        modules += [model.get_input_embeddings()] if 0 in own else []
        modules += [model.model.norm, final_layer(model)] if settings.num_stages - 1 in own else []
        if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
            raise ConfigError(
                f"policy.parallel.pp = {settings.pp} leaves place {rank} without a trained parameter, because "
                "[model.lora] or policy.frozen leaves its blocks out: train a parameter of each part of the blocks, or "
                "use fewer"
            )


def blocks_of_stages(model: Any, settings: ParallelSettings) -> list[range]:
    """Return the numbers of the blocks of each stage of `model`, which is whole."""
    sizes = [float(sum(parameter.numel() for parameter in block.parameters())) for block in find_blocks(model)]
    head: Any = final_layer(model)
    return balance_blocks(sizes, model.get_input_embeddings().weight.numel(), head.weight.numel(), settings.num_stages)


class Received(torch.nn.Module):
    """In place of an embedding: returns the hidden states that the stage before has sent."""

    def __init__(self, tied: torch.nn.Parameter | None = None) -> None:
        """Wait for the first hidden states.

        Args:
            tied: this rank's output layer, where it is a copy of the embedding: it keeps its name.
        """
        super().__init__()
        self.weight: torch.nn.Parameter | None
        self.register_parameter("weight", tied)
        self.hidden: Tensor | None = None

    def forward(self, _: Tensor) -> Tensor:
        """Return them, [R, L, H]."""
        assert self.hidden is not None, "the stage before has sent something"
        return self.hidden


def keep_stages(model: Any, settings: ParallelSettings, rank: int) -> list[Any]:
    """Keep only the stages of one rank of `model`, in place. Returns the body of each of them.

    Tied weights become two parameters, of which the second is the output layer's.
    """
    body, blocks, ranges = model.model, find_blocks(model), blocks_of_stages(model, settings)
    head: Any = final_layer(model)
    embedding, norm = model.get_input_embeddings(), body.norm
    own = stages_of_rank(settings, rank)
    has_first, has_last = 0 in own, settings.num_stages - 1 in own
    tied = None
    if head.weight is embedding.weight and has_last:
        copied = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        head.weight = copied
        tied = None if has_first else copied
    received = {stage: Received(tied if stage == own[-1] else None) for stage in own if stage > 0}
    if not has_first:
        body.embed_tokens = received[own[-1]]
    if not has_last:
        body.norm = torch.nn.Identity()
        setattr(model, SCORE if hasattr(model, SCORE) else "lm_head", torch.nn.Identity())
    body.layers = _named(blocks, [number for stage in own for number in ranges[stage]])
    found = []
    for stage in own:
        part = copy.copy(body)
        part._modules = dict(body._modules)
        part.embed_tokens = received.get(stage, embedding)
        part.layers = _named(blocks, ranges[stage])
        part.norm = norm if stage == settings.num_stages - 1 else torch.nn.Identity()
        found.append(part)
    return found


def _named(blocks: Sequence[torch.nn.Module], numbers: Sequence[int]) -> torch.nn.ModuleList:
    """Return some blocks, each with its number as its name."""
    named = torch.nn.ModuleList()
    for number in numbers:
        named.add_module(str(number), blocks[number])
    return named
