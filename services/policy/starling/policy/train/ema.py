"""An average of the weights, kept beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Average:
    """The exponential moving average of weights, which begins as they are."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Copy `weights`, in float32, unless `decay` is 0: then there is no average."""
        self._weights, self._decay = dict(weights), decay
        self.tensors: dict[str, Tensor] = {}
        """By the name of the parameter, float32; empty without an average."""
        if decay:
            copies = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights.items()}
            self.tensors = copies

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are: average = decay * average + (1 - decay) * weights."""
        for name, tensor in self.tensors.items():
            tensor.lerp_(self._weights[name].to(tensor.dtype), 1.0 - self._decay)
