"""Expert parallelism: the experts of each mixture are divided over ranks, to which tokens are sent.

    rows          a token's hidden states once for each of its experts, in the order of the experts
    dispatch      all-to-all with as many rows for each rank as its experts were chosen
    experts       the model's own code, on this rank's experts and one expert per row
    return        the same all-to-all backwards
    sum           each token's rows, weighted by its router

The ranks of the axis ep compute different tokens: other microbatches, or with tensor parallelism other parts of a row.
What an expert receives from all of them makes its whole gradient, but for those of the axes efsdp and dp_replicate.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from starling.algo.experts import find_experts, num_experts
from starling.common.errors import ConfigError
from starling.policy.train.memory.blocks import class_forward, replace_forward
from starling.policy.train.parallel.collectives import exchange
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.weights.shards import local_parameters


def check_experts(model: torch.nn.Module, size: int) -> None:
    """Check that `size` ranks can divide the experts of `model`.

    Raises:
        ConfigError: it has none with that interface, or a number that they cannot divide.
    """
    numbers = sorted({num_experts(experts) for experts in find_experts(model).values()})
    if not numbers:
        raise ConfigError(
            f"policy.parallel.ep = {size} needs a mixture of experts in the interface of transformers, and "
            f"{type(model).__name__} is none: set it to 1"
        )
    for number in numbers:
        if number % size:
            fitting = ", ".join(str(one) for one in range(1, number + 1) if not number % one)
            raise ConfigError(f"policy.parallel.ep = {size} does not divide the {number} experts: use one of {fitting}")


def divide_experts(model: torch.nn.Module, mesh: Mesh) -> list[str]:
    """Divide the experts of `model` over the axis ep, in place; every rank has the same whole ones before.

    Returns:
        The names of their parameters.
    """
    assert mesh.experts is not None, "the mesh divides experts"
    axis, divided = mesh.experts["ep"], set[torch.nn.Parameter]()
    for experts in find_experts(model).values():
        for name, whole in list(experts.named_parameters(recurse=False)):
            shard = distribute_tensor(whole, axis, [Shard(0)], src_data_rank=None)
            parameter = torch.nn.Parameter(shard, requires_grad=whole.requires_grad)
            experts.register_parameter(name, parameter)
            divided.add(parameter)
        experts.num_experts = num_experts(experts) // mesh.size("ep")  # type: ignore[assignment]
        replace_forward(experts, partial(_on_ranks, mesh.group("ep")))
    return [name for name, parameter in model.named_parameters() if parameter in divided]


def _on_ranks(
    group: dist.ProcessGroup, experts: torch.nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Return what the experts of all ranks of `group` make of this rank's tokens, [T, H].

    Args:
        group: the ranks, of which this one has `experts`.
        experts: this rank's.
        hidden: [T, H].
        chosen: the experts of each token, numbered over all ranks, int64 [T, K].
        weights: their weights, [T, K].
    """
    num_tokens, num_chosen = chosen.shape
    num_local: int = experts.num_experts  # type: ignore[assignment]
    order = chosen.flatten().argsort(stable=True)
    rows = hidden[:, None].expand(-1, num_chosen, -1).flatten(0, 1)[order]
    counts = torch.bincount(chosen.flatten(), minlength=num_local * group.size())
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sent_sizes, received_sizes = (one.view(-1, num_local).sum(dim=1).tolist() for one in (counts, received))
    rows = exchange(rows, sent_sizes, received_sizes, group)
    local = torch.arange(num_local, device=hidden.device).repeat(group.size()).repeat_interleave(received)
    rows = exchange(_compute(experts, rows, local), received_sizes, sent_sizes, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    by_token = rows[place].view(num_tokens, num_chosen, -1)
    return (by_token * weights[..., None]).sum(dim=1).to(hidden.dtype)


def _compute(experts: torch.nn.Module, rows: Tensor, local: Tensor) -> Tensor:
    """Return the output of one of this rank's experts for each row, [N, H].

    Without rows it computes one of zeros: parameters without a gradient would be left out of FSDP's reduction.
    """
    num_rows = len(rows)
    if not num_rows:
        rows, local = torch.nn.functional.pad(rows, (0, 0, 0, 1)), local.new_zeros(1)
    with local_parameters(experts):
        output: Tensor = class_forward(experts, rows, local[:, None], rows.new_ones(len(rows), 1))
    return output[:num_rows]
