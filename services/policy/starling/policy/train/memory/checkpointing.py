"""Activation checkpointing: a block keeps its input, and recomputes the rest in the backward pass.

The checkpointing of transformers is not used: it is off in evaluation mode, in which our models always are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from starling.algo.experts import find_experts
from starling.policy.train.memory.blocks import class_forward, find_blocks, replace_forward
from starling.policy.train.model.routing import in_present_replay


def checkpoint_blocks(model: torch.nn.Module, kind: Literal["full", "selective"], every: int = 1) -> None:
    """Checkpoint every `every`-th block of `model`, the first one included."""
    for block in find_blocks(model)[::every]:
        checkpoint_block(block, kind)


def checkpoint_block(block: torch.nn.Module, kind: Literal["full", "selective"]) -> None:
    """Checkpoint one block."""
    if kind == "full":
        replace_forward(block, _full)
    else:
        replace_forward(block, partial(_selective, saved=_SAVED - _changed_in_place(block)))


def _full(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(in_present_replay(partial(class_forward, block)), *args, use_reentrant=False, **kwargs)


def _selective(block: torch.nn.Module, *args: Any, saved: frozenset[str], **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, saved))
    forward = in_present_replay(partial(class_forward, block))
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _changed_in_place(block: torch.nn.Module) -> frozenset[str]:
    """Return the operators whose results `block` changes, so that they cannot be kept.

    Experts with biases add them to the grouped products in place.
    """
    names = (name for experts in find_experts(block).values() for name, _ in experts.named_parameters())
    return frozenset({"aten._grouped_mm"} if any(name.endswith("bias") for name in names) else ())


def _policy(saved: frozenset[str], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _name(operator) in saved else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    return str(getattr(operator, "overloadpacket", operator))


_SAVED = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten._grouped_mm",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "flash_attn._flash_attn_forward",
        "flash_attn._flash_attn_varlen_forward",
        "flex_attention",
    }
)
"""Operators whose recomputation costs more than keeping their results. Batched products are not among them: where
attention is not fused they are its scores, a number for each pair of tokens."""
