"""The experts that a model of transformers chooses in a plain forward pass: the oracle of recorded routing."""

from __future__ import annotations

from typing import Any

import torch

from starling.algo.experts import find_experts


def chosen_experts(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the experts of each token in each layer, [tokens, layers, chosen]."""
    found: list[torch.Tensor] = []
    handles = [
        one.register_forward_pre_hook(lambda _, args: found.append(args[1])) for one in find_experts(model).values()
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found, dim=1)
