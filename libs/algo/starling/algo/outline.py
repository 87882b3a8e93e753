"""Outlines of models, on the device `meta`, without torch's compiler.

transformers makes a model without memory before it reads the weights. On that device torch computes some functions in
Python, and imports its compiler for them, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ARITHMETIC: Final = frozenset(
    {"div", "true_divide", "pow", "reciprocal", "__truediv__", "__rtruediv__", "__rdiv__", "__pow__", "__rpow__"}
)
"""Functions of the rotary embeddings of positions, by name."""
_MAX_NUMEL: Final = 1 << 16


@contextmanager
def cheap_outlines() -> Iterator[None]:
    """Compute the most frequent of these functions elsewhere, in this thread.

    The results are the same, since tensors on `meta` have no values: what initialises a parameter returns it,
    `torch.arange` and arithmetic of small tensors are computed on the CPU, and `torch.empty_like` is `torch.empty`.
    """
    with _CheapOutlines():
        yield


class _CheapOutlines(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor = args[0] if args else named.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        if func is torch.arange and torch.device(named.get("device") or "cpu").type == "meta":
            return func(*args, **{**named, "device": "cpu"}).to("meta")
        if func is torch.empty_like and args[0].is_contiguous() and named.keys() <= {"dtype", "device"}:
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": args[0].device, **named})
        if getattr(func, "__name__", "") in _ARITHMETIC and not named and any(map(_is_small_outline, args)):
            return func(*(_with_values(one) if _is_small_outline(one) else one for one in args)).to("meta")
        return func(*args, **named)


def _with_values(outline: Tensor) -> Tensor:
    return torch.ones(outline.shape, dtype=outline.dtype, device="cpu")


def _is_small_outline(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.numel() <= _MAX_NUMEL
