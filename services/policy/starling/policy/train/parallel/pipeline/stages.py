"""Stages of a pipeline: which blocks each has, on which rank, and how a rank keeps only its own.

A rank's model keeps its names and its class. Its list of blocks has those of this rank under their numbers; what other
ranks have is replaced: the embedding by a module that returns what another stage sent, the last norm and the output
layer by nothing. Each stage is another view of the same modules, with its own blocks only, and the model's body
computes the stage that is active: whatever calls the model computes the last stage, as it would the whole model.

Which models run in stages is not looked up but observed, on a few tokens before blocks are divided.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from starling.algo.attention.probe import PROBE, is_close, probe_tokens
from starling.common.errors import ConfigError
from starling.policy.plan.stages import balance_blocks, stages_of_rank
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.memory.blocks import block_list, find_blocks, last_norm
from starling.policy.train.model.attention import structured
from starling.policy.train.model.layout import AttentionPlan
from starling.policy.train.model.lm_head import final_layer, has_final_layer
from starling.policy.train.optim.masters import LOW
from starling.policy.train.parallel.media import check_first_stage, vision_tower


def check_stages(model: Any, settings: ParallelSettings) -> None:
    """Check that the ranks of pp can divide the blocks of `model`.

    Raises:
        ConfigError: its parts are not known, it has fewer blocks than there are stages, or its gradients
            would be rounded.
    """
    given = f"policy.parallel.pp = {settings.pp}"
    if not has_final_layer(model):
        raise ConfigError(
            f"{given} is not available for {type(model).__name__}, only for language and reward models: set it to 1, "
            "and use dp_shard"
        )
    names = _BodyNames.of(model)
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
    check_first_stage(model, settings.pp, len(blocks_of_stages(model, settings)[0]))
    trained = [parameter.requires_grad for parameter in model.parameters()]
    if any(trained) and not all(trained):
        _check_trained(model, settings, names)


def _check_trained(model: Any, settings: ParallelSettings, names: _BodyNames) -> None:
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
        modules += [model.get_input_embeddings(), *filter(None, [vision_tower(model)])] if 0 in own else []
        norm = model.get_decoder().get_submodule(names.norm)
        modules += [norm, final_layer(model)] if settings.num_stages - 1 in own else []
        if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
            raise ConfigError(
                f"policy.parallel.pp = {settings.pp} leaves place {rank} without a trained parameter, because "
                "[model.lora] or policy.frozen leaves its blocks out: train a parameter of each part of the blocks, or "
                "use fewer"
            )


def blocks_of_stages(model: Any, settings: ParallelSettings) -> list[range]:
    """Return the numbers of the blocks of each stage of `model`, which is whole."""
    sizes = [float(sum(parameter.numel() for parameter in block.parameters())) for block in find_blocks(model)]
    tower = vision_tower(model)
    first = model.get_input_embeddings().weight.numel()
    first += 0 if tower is None else sum(parameter.numel() for parameter in tower.parameters())
    head: Any = final_layer(model)
    return balance_blocks(sizes, first, head.weight.numel(), settings.num_stages)


def embedding_name(model: Any) -> str:
    """Return the name of the embedding in the body of `model`."""
    return _BodyNames.of(model).embedding


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

    def forward(self, _: Any = None) -> Tensor:
        """Return them, [R, L, H]."""
        assert self.hidden is not None, "the stage before has sent something"
        return self.hidden

    def enter(self, block: torch.nn.Module) -> RemovableHandle:
        """Make `block`, the first of the stage, compute them, whatever its model's body does to embeddings before."""

        def replace(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args if args[0] is self.hidden else (self(), *args[1:])

        return block.register_forward_pre_hook(replace)


@dataclass(frozen=True, slots=True)
class _BodyNames:
    """Names of the parts of a language model's body, and of its output layer in the model."""

    embedding: str
    blocks: str
    norm: str
    head: str

    @classmethod
    def of(cls, model: Any) -> _BodyNames:
        """Find them.

        Raises:
            ConfigError: the embedding or the list of blocks is not a part of the body itself.
        """
        named = {id(module): name for name, module in model.get_decoder().named_children()}
        embedding, blocks = (named.get(id(one), "") for one in (model.get_input_embeddings(), block_list(model)))
        head = {id(module): name for name, module in model.named_children()}.get(id(final_layer(model)), "")
        if not (embedding and blocks and head):
            raise ConfigError(
                f"policy.parallel.pp is not available for {type(model).__name__}, whose embedding, blocks and output "
                "layer are not where models of transformers have them: set it to 1, and use dp_shard"
            )
        return cls(embedding, blocks, last_norm(model), head)


def keep_stages(model: Any, settings: ParallelSettings, rank: int) -> list[Any]:
    """Keep only the stages of one rank of `model`, in place. Returns the body of each of them.

    Tied weights become two parameters, of which the second is the output layer's.
    """
    body, blocks, names = model.get_decoder(), find_blocks(model), _BodyNames.of(model)
    head: Any = final_layer(model)
    embedding = model.get_input_embeddings()
    own = stages_of_rank(settings, rank)
    has_first, has_last = 0 in own, settings.num_stages - 1 in own
    tied = None
    if head.weight is embedding.weight and has_last:
        copied = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        head.weight = copied
        tied = None if has_first else copied
    ranges = blocks_of_stages(model, settings)
    found = [_stage_body(model, settings, ranges, stage, tied if stage == own[-1] else None) for stage in own]
    for part in found:
        _enter(part, names)
    if not has_first:
        setattr(body, names.embedding, getattr(found[-1], names.embedding))
        if vision_tower(model) is not None:
            model.base_model.visual = torch.nn.Identity()
    if not has_last:
        setattr(body, names.norm, torch.nn.Identity())
        setattr(model, names.head, torch.nn.Identity())
    setattr(body, names.blocks, _named(blocks, [number for stage in own for number in ranges[stage]]))
    return found


@torch.no_grad()
def observe_stages(model: Any, settings: ParallelSettings, plan: AttentionPlan) -> None:
    """Check that the stages of `model`, one after another, compute what its whole body does, on a few tokens.

    Raises:
        ConfigError: they do not: the body does something between blocks that stages do not.
    """
    names, ranges = _BodyNames.of(model), blocks_of_stages(model, settings)
    # Before blocks are entered: those of the whole body are the same modules.
    expected = [_run([model.get_decoder()], names, arguments) for arguments in _probes(model, plan)]
    parts = [_stage_body(model, settings, ranges, stage) for stage in range(settings.num_stages)]
    handles = [handle for part in parts for handle in _enter(part, names)]
    try:
        found = [_run(parts, names, arguments) for arguments in _probes(model, plan)]
        differs = all(not is_close(*both, model.dtype) for both in zip(found, expected, strict=True))
        reason = "they compute other hidden states than its whole body" if differs else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a model raises anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        for handle in handles:
            handle.remove()
    if reason is not None:
        raise ConfigError(
            f"policy.parallel.pp = {settings.pp} is not available for {type(model).__name__}, whose code does not run "
            f"in stages: {reason}; set it to 1, and use dp_shard"
        )


def _probes(model: Any, plan: AttentionPlan) -> Iterator[dict[str, Any]]:
    """Yield arguments of a body: draws of a few tokens."""
    for tokens in probe_tokens(model):
        arguments: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        if plan.layout == "forest":
            positions = torch.from_numpy(PROBE.positions)[None].to(model.device)
            arguments |= {"position_ids": positions, **structured(model, PROBE, plan.backend)}
        yield arguments


def _run(bodies: Sequence[Any], names: _BodyNames, arguments: dict[str, Any]) -> Tensor:
    """Return the hidden states that bodies compute one after another."""
    found: Tensor | None = None
    for body in bodies:
        if found is not None:
            getattr(body, names.embedding).hidden = found
        found = body(**arguments).last_hidden_state
    assert found is not None, "there are bodies"
    return found


def _stage_body(
    model: Any, settings: ParallelSettings, ranges: Sequence[range], stage: int, tied: torch.nn.Parameter | None = None
) -> Any:
    """Return the body of `model` with the parts of one stage only, which are the model's own."""
    body, names = model.get_decoder(), _BodyNames.of(model)
    part = copy.copy(body)
    part._modules = dict(body._modules)
    if stage > 0:
        setattr(part, names.embedding, Received(tied))
    setattr(part, names.blocks, _named(find_blocks(model), ranges[stage]))
    if stage < settings.num_stages - 1:
        setattr(part, names.norm, torch.nn.Identity())
    # The code of a body counts its blocks from 0. Not by assignment, by which configurations check themselves.
    part.config = copy.copy(body.config)
    own: dict[str, Any] = {"num_hidden_layers": len(ranges[stage])}
    if types := getattr(body.config, "layer_types", None):
        own["layer_types"] = [types[number] for number in ranges[stage]]
    vars(part.config).update({name: value for name, value in own.items() if name in vars(part.config)})
    return part


def _enter(part: Any, names: _BodyNames) -> list[RemovableHandle]:
    embedding = getattr(part, names.embedding)
    return [embedding.enter(next(iter(getattr(part, names.blocks))))] if isinstance(embedding, Received) else []


def _named(blocks: Sequence[torch.nn.Module], numbers: Sequence[int]) -> torch.nn.ModuleList:
    """Return some blocks, each with its number as its name."""
    named = torch.nn.ModuleList()
    for number in numbers:
        named.add_module(str(number), blocks[number])
    return named
