"""A small model of the same code as a large one without memory, on which the code is tried.

It has the first blocks of the large one, as many as have every kind of block, and the first rows of its vocabulary. Its
widths are the same, and its weights are random numbers: norms near 1 and biases that matter, so that nothing vanishes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from starling.policy.train.memory.blocks import block_list
from starling.policy.train.model.layout import attention_plan, copy_plan
from starling.policy.train.model.lm_head import copy_lm_head, find_lm_head
from starling.policy.train.model.routing import copy_routing, find_routing
from starling.policy.train.model.tensors import all_named, replace_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.algo.attention.interface import BackendChoice
else:
    PreTrainedModel = torch.nn.Module

_VOCABULARY: Final = 509
"""Rows of the embedding and the output layer: more than ranks could divide them over, and divisible by none."""
_SPREAD: Final = 0.3
"""Standard deviation of norms and biases."""


def observe(model: PreTrainedModel, device: torch.device, choice: BackendChoice) -> None:
    """Find out on a sample of `model`, an outline, what `find_lm_head`, `attention_plan` and `find_routing` say of it.

    Raises:
        ConfigError: as these.
    """
    sample = small_copy(model, device)
    if sample.get_output_embeddings() is not None:  # a reward model has none
        find_lm_head(sample)
        copy_lm_head(sample, model)
    attention_plan(sample, choice)
    copy_plan(sample, model)
    find_routing(sample)
    copy_routing(sample, model)


def small_copy(model: PreTrainedModel, device: torch.device, *, num_blocks: int = 1) -> PreTrainedModel:
    """Return a sample of `model`, with memory on `device`; the same one on each rank.

    Args:
        model: an outline, whose buffers have values if they are computed.
        device: of the sample.
        num_blocks: at least.
    """
    sample = copy.deepcopy(model)
    blocks = block_list(sample)
    config: Any = sample.config.get_text_config()
    kept = min(max(_num_blocks(blocks, config), num_blocks), len(blocks))
    del blocks[kept:]
    _shorten(config, kept)
    _cut_vocabulary(sample)
    found: dict[Tensor, Tensor] = {}
    for number, (name, tensor) in enumerate(all_named(sample)):
        if tensor.is_meta:
            values = _random(name, tensor, number, device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            found[tensor] = torch.nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    replace_tensors(sample, found)
    return sample.to(device)


def _num_blocks(blocks: torch.nn.ModuleList, config: Any) -> int:
    """Return the number of first blocks among which each kind occurs."""
    layers = getattr(config, "layer_types", None) or [""] * len(blocks)
    first = dict[Any, int]()
    for number, (block, layer) in enumerate(zip(blocks, layers, strict=False)):
        parameters = tuple((name, tuple(one.shape), one.dtype) for name, one in block.named_parameters())
        modules = tuple(type(module) for module in block.modules())
        first.setdefault((layer, parameters, modules), number)
    return max(first.values()) + 1


def _shorten(config: Any, num_blocks: int) -> None:
    """Let a configuration have only its first blocks. Not by assignment, by which configurations check themselves."""
    own = vars(config)
    number = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    if number in own:
        own[number] = num_blocks
    if own.get("layer_types"):
        own["layer_types"] = own["layer_types"][:num_blocks]


def _cut_vocabulary(sample: Any) -> None:
    """Let a plain embedding and a plain output layer have fewer rows."""
    embedding, head = sample.get_input_embeddings(), sample.get_output_embeddings()
    rows = min(_VOCABULARY, len(embedding.weight)) if isinstance(embedding, torch.nn.Embedding) else 0
    is_plain = head is None or (type(head) is torch.nn.Linear and len(head.weight) == len(embedding.weight))
    if not rows or not is_plain:
        return
    embedding.num_embeddings = rows
    if embedding.padding_idx is not None and embedding.padding_idx >= rows:
        embedding.padding_idx = rows - 1
    found = dict[Tensor, Tensor]()
    for tensor in (embedding.weight, *(() if head is None else head.parameters())):
        found.setdefault(tensor, torch.nn.Parameter(tensor.detach()[:rows], requires_grad=tensor.requires_grad))
    replace_tensors(sample, found)
    if head is not None:
        head.out_features = rows


def _random(name: str, tensor: Tensor, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not tensor.is_floating_point():
        return values.zero_()
    if tensor.dim() < 2:
        return values.normal_(1.0 if name.endswith("weight") else 0.0, _SPREAD, generator=generator)
    return values.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
