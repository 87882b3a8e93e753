"""What an engine that repacks quantised weights needs beside them: the layer that it is at, as it travels."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np

from starling.weightsync.boxes import Ints
from starling.weightsync.quantise.formats import FORMATS
from starling.weightsync.splits import CompactLayout

JOINED: Final = (
    (re.compile(r"\.experts\.\d+\.\w+$"), ".experts"),
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)$"), ".fused_qkv_a_proj"),
)
"""Modules of a checkpoint that vLLM makes one layer of."""


def packing_bytes(layout: CompactLayout) -> Ints:
    """Return for each rank of a quantised layout the bytes of its largest layer with codes; shape (ranks,).

    Layers are those of vLLM: projections that it fuses are one, and so are all routed experts of a block.
    """
    ends = tuple({form.scale_suffix for form in FORMATS.values()})
    layers = [_layer(spec.name.rpartition(".")[0]) for spec in layout.tensors]
    held = {
        layer: np.zeros(len(layout.places), np.int64)
        for layer, spec in zip(layers, layout.tensors, strict=True)
        if spec.name.endswith(ends)
    }
    for layer, index, size in zip(layers, layout.split_of.tolist(), layout.item_bytes.tolist(), strict=True):
        if layer in held:
            split = layout.splits[index]
            np.add.at(held[layer], split.rank, split.volume * size)
    return np.max([*held.values()], axis=0) if held else np.zeros(len(layout.places), np.int64)


@lru_cache(maxsize=4096)
def _layer(module: str) -> str:
    for pattern, instead in JOINED:
        module = pattern.sub(instead, module)
    return module
