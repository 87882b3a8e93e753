"""Memory budget of a policy before its weights exist: the sizes in the formula of `PolicyMemory`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from starling.common.counts import counted
from starling.common.ids import TrainerKind
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.loss.logprobs import working_bytes
from starling.policy.train.memory.blocks import block_list
from starling.policy.train.memory.estimate import PolicyMemory
from starling.policy.train.memory.observed import observe_activations, outline_of
from starling.policy.train.memory.offload import DEVICE_TYPES
from starling.policy.train.model.lm_head import is_plain, output_layer
from starling.policy.train.optim.masters import LOW
from starling.policy.train.optim.optimizer import ModelOptimizer
from starling.weightsync.tensors.adapters import is_adapted

_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


def estimate_memory(
    model: PreTrainedModel, settings: PolicySettings, trainer: TrainerKind, device: torch.device, num_tokens: int
) -> PolicyMemory:
    """Return the memory of a policy, by the formula of `PolicyMemory`, for microbatches of `num_tokens` trained tokens.

    Args:
        model: on any device, `meta` included, with its adapters and frozen parameters; it is not changed.
        settings: of the policy.
        trainer: kind of the steps.
        device: of the policy.
        num_tokens: of a microbatch.

    Raises:
        ConfigError: the model's code needs values, so its memory cannot be observed.
    """
    memory = settings.memory
    on_device = device.type in DEVICE_TYPES
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = sum(4 * one.numel() if one.dtype in LOW else one.nbytes for one in trained)
    states = _optimizer_bytes(model, _optimizers(settings)[trainer])
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    activations = observe_activations(model, memory, num_tokens, shares=settings.share_prompts)
    host = 0
    gradients = masters
    if memory.offload_optimizer and on_device:
        in_transit = sum(one.nbytes for one in trained)
        own_masters = sum(one.nbytes for one in trained if one.dtype not in LOW)
        host, states, gradients = states + own_masters + gradients + in_transit, 0, 0
    logprobs, head_gradient = _head_bytes(model, settings, trainer, num_tokens)
    found = PolicyMemory(
        num_tokens=num_tokens,
        weights=weights,
        gradients=gradients,
        optimizer=states,
        reference=_reference_bytes(model, settings, trainer, weights),
        activations=activations,
        logprobs=logprobs,
        head_gradient=head_gradient,
        offloads_activations=memory.offload_activations and on_device,
        host=host,
    )
    return replace(found, host=host + found.moved)


def _optimizers(settings: PolicySettings) -> dict[TrainerKind, OptimizerSettings]:
    return {
        "rl": settings.optimizer,
        "sft": settings.sft.optimizer,
        "dpo": settings.dpo.optimizer,
        "reward_model": settings.reward_model.optimizer,
    }


def _optimizer_bytes(model: PreTrainedModel, settings: OptimizerSettings) -> int:
    """Return the bytes of moments, masters and averages of weights."""
    outline = outline_of(model, range(len(block_list(model))))
    tensors = ModelOptimizer(outline, settings, 0).state_tensors()
    return sum(tensor.nbytes for tensor in tensors.values())


def _head_bytes(
    model: PreTrainedModel, settings: PolicySettings, trainer: TrainerKind, num_tokens: int
) -> tuple[int, int]:
    """Return the bytes of the log-probabilities, and of a gradient that waits for that of the embedding."""
    if trainer == "reward_model":
        return 0, 0
    layer = output_layer(model)
    weight = getattr(layer, "weight", None)
    assert isinstance(weight, Tensor), "an output layer has a matrix"
    is_trained = weight.requires_grad
    chunk_tokens = settings.memory.logprob_chunk_tokens if is_plain(layer) else num_tokens
    found = working_bytes(
        num_tokens,
        weight.shape[1],
        weight.shape[0],
        weight.element_size(),
        chunk_tokens=chunk_tokens,
        trains_head=is_trained,
        with_entropy_gradient=trainer == "rl" and bool(settings.algorithm.entropy_coefficient),
        keeps_probabilities=settings.parallel.pp == 1,
    )
    is_tied = is_trained and weight is getattr(model.get_input_embeddings(), "weight", None)
    return found, weight.nbytes if is_tied else 0


def _reference_bytes(model: PreTrainedModel, settings: PolicySettings, trainer: TrainerKind, weights: int) -> int:
    """Return the bytes of the reference; of adapters two copies, because they are swapped in."""
    if not (settings.algorithm.kl_coefficient if trainer == "rl" else trainer == "dpo" and settings.dpo.use_reference):
        return 0
    if not is_adapted(model):
        return weights
    adapters: int = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return 2 * adapters


def describe_memory(memory: PolicyMemory, settings: MemorySettings, device: torch.device) -> list[str]:
    """Return the peak of a policy on `device` in words, and its parts; with a notice if that has less."""
    num_blocks, computing = len(memory.activations.blocks), max(memory.working, memory.logprobs)
    what = "a block" if memory.working >= memory.logprobs else "log-probabilities"
    reference = f" + {_size(memory.reference)} of the reference" if memory.reference else ""
    host = f", and {_size(memory.host)} of the host" if memory.host else ""
    lines = [
        f"memory of the policy: about {_size(memory.peak)} of {device} at its peak, in microbatches of "
        f"{memory.num_tokens:,} tokens{host}",
        f"always: {_size(memory.lasting)} = {_size(memory.weights)} of weights + {_size(memory.gradients)} of "
        f"gradients + {_size(memory.optimizer)} of the optimizer{reference}",
        f"activations: {_size(memory.saved)} of {counted(num_blocks, 'block')} (checkpointing = "
        f"{settings.checkpointing}), and up to {_size(computing)} to compute {what}",
    ]
    if memory.peak > (has := _device_bytes(device)):
        lines.append(
            f"notice: the policy does not fit, {device} has {_size(has)}: lower policy.tokens_per_microbatch, or see "
            "docs/how-to/long-sequences.md"
        )
    return lines


def _device_bytes(device: torch.device) -> int:
    """Return the memory of a device, of the host for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(size_bytes: int) -> str:
    """Return a size in words."""
    unit, factor = next((one for one in _UNITS if size_bytes >= one[1]), ("bytes", 1))
    value = size_bytes / factor
    return f"{value:,.0f} {unit}" if value >= 100 or factor == 1 else f"{value:.3g} {unit}"
