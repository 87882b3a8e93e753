"""Division of a model over the ranks of tp: matrices by their styles, embedding and output layer by rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from starling.policy.train.memory.blocks import class_forward, find_blocks, last_norm, replace_forward
from starling.policy.train.model.lm_head import (
    VocabularyShard,
    final_layer,
    shard_vocabulary,
)
from starling.policy.train.parallel.collectives import gather, reduce_scatter
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.tensor.styles import Style, block_styles, key_heads
from starling.policy.train.parallel.weights.adapters import base_layer, divided_factors
from starling.policy.train.parallel.weights.shards import local_parameters, seen_as

TOKENS: Final = -2
"""Dimension of the tokens of hidden states, [R, L, H] or [L, H]."""


def divide_tensors(model: Any, mesh: Mesh) -> list[str]:
    """Divide the matrices of `model` over the axis tp, in place; every rank has the same whole ones before.

    Returns:
        The names of whole parameters, of whose gradient each rank computes a part.
    """
    axis, group = mesh.devices["tp"], mesh.group("tp")
    styles = block_styles(model)
    embedding, head = model.get_input_embeddings(), final_layer(model)
    is_tied, scores = embedding.weight is head.weight, model.get_output_embeddings() is None
    _divide_embedding(embedding, axis, group)
    whole = set[torch.nn.Parameter]()
    if scores:
        whole.update(head.parameters())  # each rank computes all scores, and so all of their gradient
    else:
        _divide_output(head, axis, group, embedding.weight if is_tied else None)
    norm = model.get_decoder().get_submodule(last_norm(model))
    norm.register_forward_hook(lambda _, __, output: gather(output, TOKENS, group, divides_next=not scores))
    for block, own in zip(find_blocks(model), styles, strict=True):
        _divide_block(block, own, axis, group)
    divided = {parameter for parameter in model.parameters() if hasattr(parameter, "placements")}
    return [name for name, parameter in model.named_parameters() if parameter not in divided | whole]


def _divide(module: torch.nn.Module, name: str, axis: DeviceMesh, dim: int) -> None:
    """Replace a whole parameter of `module` by this rank's part of it."""
    whole = module.get_parameter(name)
    part = distribute_tensor(whole.detach(), axis, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, torch.nn.Parameter(part, requires_grad=whole.requires_grad))


def _divide_embedding(embedding: Any, axis: DeviceMesh, group: dist.ProcessGroup) -> None:
    first = -(-len(embedding.weight) // group.size()) * group.rank()  # as `torch.chunk` divides them
    _divide(embedding, "weight", axis, 0)
    if embedding.padding_idx is not None:  # the row without a gradient
        own = embedding.padding_idx - first
        embedding.padding_idx = own if 0 <= own < len(embedding.weight.to_local()) else None
    replace_forward(embedding, partial(_embed, group, first))


def _embed(group: dist.ProcessGroup, first: int, embedding: Any, token_ids: Tensor) -> Tensor:
    """Return the embeddings of this rank's part of the tokens, [R, l, H], from the ids of all, [R, L]."""
    with local_parameters(embedding):
        own = token_ids - first
        missing = (own < 0) | (own >= len(embedding.weight))
        found = class_forward(embedding, own.masked_fill(missing, 0)).masked_fill(missing[..., None], 0.0)
    return reduce_scatter(found, TOKENS, group)


def _divide_output(head: Any, axis: DeviceMesh, group: dist.ProcessGroup, tied: torch.nn.Parameter | None) -> None:
    rows = -(-len(head.weight) // group.size())
    shard_vocabulary(head, VocabularyShard(rows * group.rank(), group))
    if head.bias is not None:
        _divide(head, "bias", axis, 0)
    if tied is None:
        _divide(head, "weight", axis, 0)
    else:
        head.weight = tied
    replace_forward(head, _with_local)


def _divide_block(
    block: torch.nn.Module, styles: Mapping[str, Style], axis: DeviceMesh, group: dist.ProcessGroup
) -> None:
    modules = dict(block.named_modules())
    parents = {name.rpartition(".")[0] for name in styles}
    with_parameters = {name.rpartition(".")[0] for name in styles if name not in modules}
    for region in parents:
        if not any(region.startswith(f"{other}.") for other in parents):
            modules[region].register_forward_pre_hook(partial(_enter, group), with_kwargs=True)
    for region in with_parameters:
        replace_forward(modules[region], _with_local)
    for name, style in styles.items():
        parent, _, own = name.rpartition(".")
        module = modules.get(name)
        heads = key_heads(block, name) if own in ("k_proj", "v_proj") else None
        if module is None:
            _divide(modules[parent], own, axis, 0)
        elif style == "kept":
            of_keys = key_heads(block, f"{parent}.k_proj") if own == "k_norm" else None
            module.register_forward_hook(partial(_keep, *_columns(module, of_keys, group)))
        elif heads is not None and heads % group.size():
            # Whole; where a norm over all heads follows, that keeps them.
            if style == "columns":
                module.register_forward_hook(partial(_keep, *_columns(module, heads, group)))
        else:
            for matrix in divided_factors(module, by_rows=style in ("rows", "split")):
                _divide_matrix(matrix, style, axis)


def _columns(module: torch.nn.Module, heads: int | None, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the columns of a whole output that a rank goes on with, [start, stop), in units of heads if known."""
    width, rank, size = len(base_layer(module).get_parameter("weight")), group.rank(), group.size()
    if heads is None or not heads % size:
        return rank * width // size, (rank + 1) * width // size
    own = rank * heads // size
    return own * width // heads, (own + 1) * width // heads


def _keep(start: int, stop: int, _: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
    return output[..., start:stop]


def _divide_matrix(module: torch.nn.Module, style: Style, axis: DeviceMesh) -> None:
    by_rows = style in ("rows", "split")
    _divide(module, "weight", axis, 1 if by_rows else 0)
    if module.bias is not None and not by_rows:
        _divide(module, "bias", axis, 0)
    replace_forward(module, partial(_multiply_rows if by_rows else _multiply_columns, axis, style))


def _multiply_columns(axis: DeviceMesh, style: Style, matrix: torch.nn.Module, hidden: Tensor) -> Tensor:
    output = _product(matrix, hidden, axis, Replicate())
    if style == "columns":
        return output
    group = axis.get_group()
    output = gather(output, -1, group)
    if style == "gathered":
        return output
    return torch.cat([half.chunk(group.size(), dim=-1)[group.rank()] for half in output.chunk(2, dim=-1)], dim=-1)


def _multiply_rows(axis: DeviceMesh, style: Style, matrix: Any, hidden: Tensor) -> Tensor:
    group, bias = axis.get_group(), matrix.bias
    if style == "split":
        hidden = hidden.chunk(group.size(), dim=-1)[group.rank()]
    with seen_as(matrix, {"bias": None}):
        output = _product(matrix, hidden, axis, Shard(hidden.dim() - 1))
    output = reduce_scatter(output, TOKENS, group)
    return output if bias is None else output + bias


def _product(matrix: torch.nn.Module, hidden: Tensor, axis: DeviceMesh, placement: Placement) -> Tensor:
    """Return this rank's columns of a product, or its summand, from inputs that are whole or this rank's columns."""
    if type(matrix) is torch.nn.Linear:
        return cast(Tensor, _with_local(matrix, hidden))
    # A layer that computes in low precision has one scale for what all ranks have.
    is_whole = placement.is_replicate()
    whole = DTensor.from_local(
        hidden, axis, [placement], run_check=False, grad_placements=[Partial() if is_whole else placement]
    )
    output: Any = class_forward(matrix, whole)
    return cast(Tensor, output.to_local(grad_placements=[output.placements[0] if is_whole else Replicate()]))


def _with_local(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute `module` with this rank's parts of its parameters."""
    with local_parameters(module):
        return class_forward(module, *args, **kwargs)


def _enter(group: dist.ProcessGroup, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Gather the tokens that a region computes."""
    if args:
        return (gather(args[0], TOKENS, group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": gather(kwargs["hidden_states"], TOKENS, group)}
