"""Probe of a model's attention: a row of seven tokens that shows whether a model can compute packed rows.

Policy and rollout engine do not list which models can: they compute the row, and its two sequences alone by the model's
own code, and compare. Windows are longer than the probe, so what the layers hand to the attention is compared with the
configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.attention.forest import Forest

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Layer types of transformers."""
PROBE: Final = Forest((3, 1, 1, 2), (-1, 0, 1, 0))
"""Two sequences of five tokens, which have three in common."""
WINDOWS_DIFFER: Final = "its layers do not hand their windows to the attention function of transformers"
_DRAWS: Final = 3
"""Of the tokens: rounding may send a token of one draw to another expert, but not of all."""
_TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02}
"""Of results, relative to the largest: above rounding, far below a token that is seen by mistake. Norms, routers and
rotary embeddings compute in single precision in models of double precision, too."""


def probe_tokens(model: Any) -> Iterator[Tensor]:
    """Yield draws of the probe's tokens, int64 [7], on the device of `model`, a model of transformers."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for _ in range(_DRAWS):
        yield torch.randint(vocabulary, (PROBE.num_tokens,), generator=generator).to(model.device)


def probe_paths(device: torch.device) -> Tensor:
    """Return the tokens of each of the probe's sequences, int64 [2, 5]."""
    return torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]], device=device)


def is_close(found: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float | None = None) -> bool:
    """Return whether two results of a model that computes in `dtype` differ by no more than rounding.

    Args:
        found: one of them.
        expected: the other.
        dtype: of the model.
        tolerance: of the largest difference, relative to the largest number; by default that of `dtype`.
    """
    if tolerance is None:
        tolerance = _TOLERANCE.get(dtype, 0.05)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer, the current token included; None for full attention.

    Args:
        config: of a model of transformers.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or [WINDOWED] * text.num_hidden_layers
    return [window if kind == WINDOWED else None for kind in kinds]
