"""Muon: updates a matrix by the momentum of its gradient, with all singular values set to about 1.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); scaled as in "Muon is scalable for LLM
training" (arXiv:2502.16982), so that an entry changes about as much as with AdamW. `torch.optim.Muon` does the same for
matrices, but not for stacks of them such as the experts of a mixture, and computes in bfloat16 on a CPU too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz polynomial: steepest at 0, at the price of singular values between about 0.7 and 1.2."""
NUM_ITERATIONS: Final = 5
_LEAST_NORM = 1e-7
_UPDATE_RMS = 0.2
"""Root mean square of an update over the learning rate, which is about that of AdamW."""
_HEADS = re.compile(r"embed|(^|\.)(lm_head|score|classifier|v_head|value_head)\.")
_STACKS = re.compile(r"(^|\.)experts\.")


def hidden_matrices(model: torch.nn.Module, names: Mapping[str, Tensor]) -> set[str]:
    """Return which of `names` are matrices of hidden layers, or the stacked matrices `[E, a, b]` of experts.

    Excluded: embeddings and heads, whose rows belong to single tokens; vectors and biases, stacked or not;
    convolutions.
    """
    excluded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    output_embeddings: Callable[[], Any] = getattr(model, "get_output_embeddings", lambda: None)
    excluded.add(id(getattr(output_embeddings(), "weight", None)))
    parameters = dict(model.named_parameters())
    return {
        name
        for name, tensor in names.items()
        if (tensor.dim() == 2 or (tensor.dim() == 3 and _STACKS.search(name)))
        and id(parameters[name]) not in excluded
        and not name.endswith("bias")
        and not _HEADS.search(name)
    }


def orthogonalised(matrices: Tensor, num_iterations: int = NUM_ITERATIONS) -> Tensor:
    """Return `matrices` with singular values about 1, by the quintic iteration of Newton and Schulz.

    Args:
        matrices: [..., a, b], each separately; a matrix of zeros stays 0.
        num_iterations: applications of the polynomial.

    Returns:
        [..., a, b], float32 on a CPU and bfloat16 elsewhere, which is exact enough and much faster.
    """
    a, b, c = COEFFICIENTS
    element = torch.float32 if matrices.device.type == "cpu" else torch.bfloat16
    x = matrices.to(element).reshape(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


class Matrices(Protocol):
    """Matrices of which an optimizer has a part each: the singular values of a part are not those of the matrix."""

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole matrix, or stack of them."""

    def batches(self, parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the `parts` that are orthogonalised at a time."""

    def orthogonalised(self, parts: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Return for each of a batch of `parts` that of its orthogonalised matrix, given those of its `updates`."""


class WholeMatrices:
    """Matrices that are whole, see `Matrices`."""

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(part.shape)

    def batches(self, parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield one at a time."""
        yield from ([part] for part in parts)

    def orthogonalised(self, parts: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthogonalised `updates`."""
        return [orthogonalised(update) for update in updates]


class Muon(torch.optim.Optimizer):
    """Muon of matrices [a, b] and stacks of them [E, a, b], with decoupled weight decay."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, matrices: Matrices | None = None) -> None:
        """Start with momenta of 0.

        Args:
            groups: ``params``, ``lr`` and ``weight_decay`` each.
            momentum: decay rate of the momentum.
            matrices: of which the parameters are parts; by default they are whole.
        """
        super().__init__(groups, {"momentum": momentum})
        self._matrices: Matrices = WholeMatrices() if matrices is None else matrices
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for batch in self._matrices.batches([one for one in groups if one.grad is not None]):
            updates = [self._smoothed(parameter, groups[parameter]["momentum"]) for parameter in batch]
            for parameter, update in zip(batch, self._matrices.orthogonalised(batch, updates), strict=True):
                rate, decay = groups[parameter]["lr"], groups[parameter]["weight_decay"]
                scale = _UPDATE_RMS * math.sqrt(max(self._matrices.shape(parameter)[-2:]))
                parameter.mul_(1.0 - rate * decay)
                parameter.add_(update, alpha=-rate * scale)

    def _smoothed(self, parameter: Tensor, momentum: float) -> Tensor:
        """Add the gradient to the momentum. Returns the gradient with Nesterov's look ahead."""
        gradient = parameter.grad
        assert gradient is not None
        smoothed: Tensor = self.state[parameter]["momentum"].lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(smoothed, momentum)
