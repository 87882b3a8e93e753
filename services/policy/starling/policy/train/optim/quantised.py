"""Which tensors have moments of 8 bits, and in blocks of how many elements: as torchao's `AdamW8bit` has them."""

from __future__ import annotations

from typing import Final

BLOCK_NUMEL: Final = 256
"""Neighbouring elements that share the scale of moments of 8 bits."""
_LEAST_NUMEL: Final = 4096


def is_quantised(numel: int) -> bool:
    """Return whether a tensor of so many elements has moments of 8 bits; others have them in float32."""
    return numel >= _LEAST_NUMEL and not numel % BLOCK_NUMEL
