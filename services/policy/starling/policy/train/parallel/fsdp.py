"""Fully sharded data parallelism (FSDP2), with replication (HSDP) where the mesh has both axes.

Each block is gathered before it computes and its gradient is reduced after it; embeddings, the last norm and the output
layer are one more group, which stays whole from the forward pass to the end of the backward pass: log-probabilities are
computed from the output layer's weight after the model's own forward pass.

Gradients are summed, not averaged: the weights of the tokens are those of the whole step. FSDP's own division would be
an operation that gloo does not have (PREMUL_SUM).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Final, Literal

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from starling.algo.experts import find_experts
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.optim.masters import LOW
from starling.policy.train.parallel.media import tower_blocks
from starling.policy.train.parallel.mesh import SHARDS, Mesh
from starling.weightsync.tensors.adapters import is_adapted

_COMPUTE: Final = "_compute_whole"
"""Method of a sharded model around which FSDP gathers parameters and reduces gradients, as around its forward pass."""


def shard_parameters(
    model: torch.nn.Module,
    mesh: Mesh,
    reshard: Literal["default", "always", "never"] = "default",
    roots: Sequence[torch.nn.Module] = (),
    *,
    codes: bool = False,
) -> None:
    """Shard the parameters of `model` over the axes dp_shard and cp, in place.

    Every rank has the same whole ones before. A model of fewer than 32 bits computes in its type; its parameters become
    their own float32 masters, and gradients are reduced in float32. Adapters are float32 beside base weights of any
    type, and stay so.

    Args:
        model: to be trained, or a frozen one.
        mesh: of the ranks.
        reshard: see `ParallelSettings`.
        roots: modules that compute separately and together have all of the model; by default the model itself.
        codes: see `PrecisionSettings.fsdp_all_gather`.
    """
    dtype = next(model.parameters()).dtype
    low = dtype in LOW and not is_adapted(model)
    if low:
        model.to(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype if low else None, reduce_dtype=torch.float32 if low else None)
    # The logits of no tokens, which the forward pass returns: nothing changes them in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    roots = tuple(roots) or (model,)
    if codes:
        from starling.policy.train.precision.float8 import gather_codes  # torchao

        gather_codes(model, roots, mesh.size(SHARDS))
    blocks = find_blocks(model)
    for number, block in enumerate(blocks, start=1):
        frees = reshard == "always" or (reshard == "default" and number < len(blocks))
        for experts in find_experts(block).values() if mesh.size("ep") > 1 else ():
            fully_shard(
                experts,
                mesh=mesh.expert_sharding,
                mp_policy=policy,
                reshard_after_forward=frees,
                shard_placement_fn=partial(_beside_experts, mesh.size("efsdp")),
            )
        fully_shard(block, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=frees)
    for block in tower_blocks(model):
        fully_shard(block, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=reshard != "never")
    for root in roots:
        fully_shard(root, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=False)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        setattr(root, _COMPUTE, MethodType(_call, root))
        register_fsdp_forward_method(root, _COMPUTE)


def compute_whole(model: torch.nn.Module, function: Callable[[], Any]) -> Any:
    """Return the result of `function`, which calls parts of `model` instead of its forward pass."""
    return getattr(model, _COMPUTE)(function) if isinstance(model, FSDPModule) else function()


def _beside_experts(num_ranks: int, parameter: torch.nn.Parameter) -> Shard | None:
    """Return the dimension of a parameter of experts to shard: dimension 0 is divided by ep already."""
    return Shard(1) if parameter.dim() > 1 and not parameter.shape[1] % num_ranks else None


def _call(_: torch.nn.Module, function: Callable[[], Any]) -> Any:
    return function()


def begin_pass(model: torch.nn.Module, *, is_last: bool) -> None:
    """Prepare a forward and backward pass: copies of a shard add up their gradients after the last one of an update."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def end_pass(model: torch.nn.Module) -> None:
    """Free what a pass without gradients leaves gathered, which an update would make outdated."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
