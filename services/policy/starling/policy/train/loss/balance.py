"""Balance of experts by a bias of each, which only decides to which experts a token is sent, without a loss.

After a step, the bias of an expert that received more tokens than the mean of its layer falls by a fixed amount, and
that of one that received fewer rises by it (arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The bias
has no gradient and weights no expert's output. It is a part of the version: rollouts choose by the same one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from starling.algo.experts import find_experts
from starling.common.errors import ConfigError

_BIAS: Final = "e_score_correction_bias"
"""Its name in the models of transformers."""


class ExpertBias:
    """The biases of a model's routers, which change by a fixed amount in each step."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        """Find the biases, of this rank's blocks where the model is on a mesh; `rate`: the amount."""
        self._biases, self._rate = find_biases(model), rate

    @torch.no_grad()
    def update(self, counts: dict[str, Tensor]) -> None:
        """Change the biases, by the tokens of each expert [E] of each layer, by name of its experts."""
        for name, bias in self._biases.items():
            load = counts[name].double()
            bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=self._rate)


def find_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the bias [E] of each router that has one, by name of its experts."""
    found = {}
    for name in find_experts(model):
        block = name.rpartition(".")[0]
        biases = [one for key, one in model.get_submodule(block).named_buffers() if key.rpartition(".")[2] == _BIAS]
        if biases:
            found[name] = biases[0]
    return found


def check_biases(model: torch.nn.Module) -> None:
    """Raise ConfigError if `model`, which is whole, has no biases."""
    if not find_biases(model):
        raise ConfigError(
            f"policy.router_bias_rate needs routers with a bias of each expert, such as DeepSeek-V3's, and "
            f"{type(model).__name__} has none: use policy.router_aux_coefficient, or remove the setting"
        )
