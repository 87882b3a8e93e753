"""Compiled transformer blocks."""

from __future__ import annotations

import torch

from starling.policy.train.blocks import find_blocks


def compile_blocks(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each block of `model`, in place: its tensors keep their names.

    Blocks and not the whole model: they share one code, which is compiled once for all, and the sizes of microbatches
    vary from step to step. A copy of the model runs uncompiled.
    """
    for block in find_blocks(model):
        block.compile(backend=backend)
