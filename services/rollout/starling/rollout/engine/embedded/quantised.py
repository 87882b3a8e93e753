"""Weight-only quantised linear layers for the embedded engine.

A layer stores codes and scales; each forward pass dequantises the whole weight, multiplies and frees it. That costs
time and the memory of one layer, and it is exact: the logits are those of a model with the dequantised weights.
"""

from __future__ import annotations

from collections import Counter

import torch

from starling.common.errors import ConfigError
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.quantise import Quantised, dequantise, quantise


class QuantisedLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose weight is stored as codes and scales.

    The buffers are what weight sync transfers, under the same names: `weight` (codes), its scales and, if the format
    has one, the scale of the tensor. An adoption only writes these buffers.
    """

    def __init__(self, linear: torch.nn.Linear, spec: QuantSpec) -> None:
        """Quantise `linear`.

        Args:
            linear: the layer to replace; its bias is kept.
            spec: the quantisation of its weight.

        Raises:
            WeightsError: its weight has an infinite or NaN element.
        """
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._spec = spec
        made = quantise(linear.weight.detach(), spec)
        names = (part.name.removeprefix(spec.tensor.name) for part in spec.tensors())
        self._parts = tuple(f"weight{suffix}" for suffix in names)
        for name, tensor in zip(self._parts, (made.data, made.scales, made.global_scale), strict=False):
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., in_features] times the transposed weight, plus the bias: [..., out_features]."""
        return torch.nn.functional.linear(x, self.weight_as(x.dtype), self.bias)

    def weight_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, [out_features, in_features]."""
        data, scales, *rest = (self.get_buffer(name) for name in self._parts)
        return dequantise(Quantised(data, scales, rest[0] if rest else None), self._spec, dtype=dtype)

    def extra_repr(self) -> str:
        """Return the layer's parameters for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, {self._spec.format.name}, bias={self.bias is not None}"


def quantise_linears(model: torch.nn.Module, recipe: QuantRecipe) -> None:
    """Replace the linear layers that `recipe` quantises, in place, one layer after the other.

    Raises:
        ConfigError: the recipe quantises a tensor that is not the weight of a linear layer, or a tied one.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    num_names = Counter(id(model.get_parameter(name)) for name in names)
    for name in names:
        parameter = model.get_parameter(name)  # not from a list, so that a replaced weight is freed at once
        dtype = str(parameter.dtype).removeprefix("torch.")
        tensor = TensorSpec(name=name, shape=tuple(parameter.shape), dtype=dtype)
        form = recipe.format_of(tensor)
        if form is None:
            continue
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        if type(layer) is not torch.nn.Linear or own != "weight" or num_names[id(parameter)] > 1:
            kind = "tied to another tensor" if num_names[id(parameter)] > 1 else f"that of a {type(layer).__name__}"
            raise ConfigError(
                f"weights.quantise = {form.name!r} does not fit the engine `transformers`: {name} is {kind}, and it "
                "holds codes in linear layers only; leave weights.quantise empty, or take another engine"
            )
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantisedLinear(layer, QuantSpec(tensor=tensor, format=form)))
