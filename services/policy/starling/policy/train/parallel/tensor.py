"""Tensor parallelism with sequence parallelism: explicit plans for the blocks of some architectures.

    embedding            rows of the vocabulary on each rank; its output is a part of the row's tokens
    norms                compute that part
    q, k, v, gate, up    columns on each rank; their input is gathered
    o, down              rows on each rank; their output is summed, and each rank keeps its part of the tokens
    last norm            its output is gathered
    output layer         rows of the vocabulary on each rank; log-probabilities are normalised over all of them, see
                         `starling.policy.train.loss.logprobs`: logits are never gathered
    layer of scores      whole on each rank, which computes all scores

Where there are fewer key heads than ranks, key and value projections are whole on each rank, which keeps the head of
its query heads. The gradient of what is kept is then a part of the whole one: exactly the last module of each chain
says so, because two of them would count it twice.

A mixture of experts is whole on each rank and computes the rank's part of the tokens; gradients are summed per update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from starling.common.errors import ConfigError
from starling.policy.plan.sizes import TENSOR_MODELS
from starling.policy.train.memory.blocks import find_blocks
from starling.policy.train.model.lm_head import VocabularyShard, final_layer, has_final_layer, shard_vocabulary
from starling.policy.train.parallel.adapters import adapted_plan
from starling.policy.train.parallel.mesh import Mesh

_HEADS_DIM: Final = 2
"""Of queries and keys before the attention, [R, L, heads, D]."""


def check_tensors(model: Any, size: int) -> None:
    """Check that `size` ranks can divide `model`.

    Raises:
        ConfigError: it has no plan, or a size that they cannot divide.
    """
    config = model.config
    given = f"policy.parallel.tp = {size}"
    if config.model_type not in TENSOR_MODELS or not has_final_layer(model):
        raise ConfigError(
            f"{given} has no plan for {type(model).__name__}, only for language and reward models of type "
            f"{', '.join(TENSOR_MODELS)}: set it to 1, and use dp_shard"
        )
    divided = {"attention heads": config.num_attention_heads, "hidden units": config.intermediate_size}
    heads = config.num_key_value_heads
    fitting = [
        str(one)
        for one in range(1, config.num_attention_heads + 1)
        if not any(number % one for number in divided.values()) and not (heads % one and one % heads)
    ]
    remedy = f"set tp = {' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))}"
    for name, number in divided.items():
        if number % size:
            raise ConfigError(f"{given} does not divide the {number} {name}: {remedy}")
    if heads % size and size % heads:
        raise ConfigError(f"{given} neither divides the {heads} key heads nor is a multiple of them: {remedy}")


def divide_tensors(model: Any, mesh: Mesh) -> list[str]:
    """Divide the matrices of `model` over the axis tp, in place; every rank has the same whole ones before.

    Returns:
        The names of whole parameters of whose gradient each rank computes a part.
    """
    axis, size, config = mesh.devices["tp"], mesh.size("tp"), model.config
    embedding, head = model.get_input_embeddings(), final_layer(model)
    scores, is_tied = model.get_output_embeddings() is None, embedding.weight is head.weight
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    apply = partial(parallelize_module, device_mesh=axis, src_data_rank=None)
    apply(embedding, parallelize_plan=RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    apply(model.model.norm, parallelize_plan=_GatheredNorm(divides_next=not scores))
    for block in find_blocks(model):
        attention = _attention_plan(block.self_attn, config.num_key_value_heads, mesh.place("tp"), size)
        apply(block, parallelize_plan=adapted_plan(block, {**attention, **_feed_forward_plan(block)}))
    whole = set[torch.nn.Parameter]()
    if scores:
        whole.update(head.parameters())  # each rank computes all scores, and so all of their gradient
    else:
        apply(head, parallelize_plan=ColwiseParallel())
        if is_tied:
            head.weight = embedding.weight
        rows = -(-int(config.vocab_size) // size)  # as `torch.chunk` divides them
        shard_vocabulary(head, VocabularyShard(rows * mesh.place("tp"), mesh.group("tp")))
    for name, parameter in model.named_parameters():
        if name in frozen:  # `SequenceParallel` makes new parameters, which would be trained
            parameter.requires_grad_(False)
    return [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and parameter not in whole
    ]


def _attention_plan(attention: Any, num_key_heads: int, rank: int, size: int) -> dict[str, ParallelStyle]:
    """Return the styles of a block's attention, and of the norm before it."""
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    normed = hasattr(attention, "k_norm")
    if normed:
        plan |= {"self_attn.q_norm": _HeadNorm(), "self_attn.k_norm": _HeadNorm()}
    if num_key_heads % size:
        own = rank * num_key_heads // size
        of_heads = _Kept(_HEADS_DIM, own, own + 1)
        of_columns = _Kept(-1, own * attention.head_dim, (own + 1) * attention.head_dim)
        plan["self_attn.v_proj"] = _WholeLinear(of_columns)
        plan["self_attn.k_proj"] = _WholeLinear(None if normed else of_columns)
        if normed:
            plan["self_attn.k_norm"] = _HeadNorm(of_heads)
    return plan


def _feed_forward_plan(block: Any) -> dict[str, ParallelStyle]:
    if not hasattr(block.mlp, "gate_proj"):  # a mixture of experts
        return {"post_attention_layernorm": SequenceParallel(use_local_output=True)}
    return {
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


@dataclass(frozen=True, slots=True)
class _Kept:
    """The part of a whole output that a rank goes on with."""

    dim: int
    start: int
    stop: int

    def of(self, output: DTensor) -> Tensor:
        """Return the part; its gradient is a part of that of `output`, to be summed over the ranks."""
        local: Tensor = output.to_local(grad_placements=[Partial()])
        return local.narrow(self.dim, self.start, self.stop - self.start)


class _WholeLinear(ParallelStyle):
    """A linear layer that is whole on each rank."""

    def __init__(self, kept: _Kept | None) -> None:
        super().__init__()
        self._kept = kept

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: Any, inputs: Any, mesh: DeviceMesh) -> DTensor:
            return _placed(inputs[0], mesh, Replicate())

        def leave(_: Any, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local() if self._kept is None else self._kept.of(output)

        return distribute_module(module, device_mesh, _replicate, cast(Any, enter), cast(Any, leave))


class _HeadNorm(ParallelStyle):
    """The norm of queries or keys: its weight is whole, and sees this rank's heads, or all and passes some on."""

    def __init__(self, kept: _Kept | None = None) -> None:
        super().__init__()
        self._kept = kept

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: Any, inputs: Any, mesh: DeviceMesh) -> DTensor:
            return _placed(inputs[0], mesh, Shard(_HEADS_DIM) if self._kept is None else Replicate())

        def leave(_: Any, output: DTensor, __: DeviceMesh) -> Tensor:
            return output.to_local() if self._kept is None else self._kept.of(output)

        return distribute_module(module, device_mesh, _replicate, cast(Any, enter), cast(Any, leave))


class _GatheredNorm(ParallelStyle):
    """The last norm: it computes a part of the tokens, and its output is gathered.

    Where each rank goes on with its part of the vocabulary, it returns a part of the gradient.
    """

    def __init__(self, *, divides_next: bool) -> None:
        super().__init__()
        self._gradient: list[Placement] = [Partial() if divides_next else Replicate()]

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: Any, inputs: Any, mesh: DeviceMesh) -> DTensor:
            return _placed(inputs[0], mesh, Shard(1))

        def leave(_: Any, output: DTensor, __: DeviceMesh) -> Tensor:
            local: Tensor = output.redistribute(placements=[Replicate()]).to_local(grad_placements=self._gradient)
            return local

        return distribute_module(module, device_mesh, _replicate, cast(Any, enter), cast(Any, leave))


def _placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    found: DTensor = DTensor.from_local(tensor, mesh, [placement], run_check=False)
    return found


def _replicate(_: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in _own(module):
        whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from list(module.named_parameters(recurse=False))
