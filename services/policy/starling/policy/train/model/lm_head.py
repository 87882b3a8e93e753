"""Output layer of a language model: how its logits are transformed, and forward passes of trained positions only.

Some architectures cap their logits (Gemma 2) or scale them (Granite, Cohere). The transform is not looked up in a list
but observed: the output layer is made to return known numbers, and the model's logits are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.model.attention import model_arguments
from starling.policy.train.model.routing import replaying

log = structlog.get_logger(__name__)

SCORE: Final = "score"
"""Name of a reward model's layer of scores."""
_PROBE_LOGIT: Final = 100.0
"""Largest absolute logit of the probe: large enough to reveal a cap, whatever the weights are."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transform of each logit after the output layer."""

    kind: Literal["nothing", "multiply", "divide", "cap"] = "nothing"
    value: float = 1.0
    """The factor, the divisor, or the bound of ``bound * tanh(logit / bound)``."""

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform `logits` in place, in the arithmetic of the model's own code. Returns `logits`."""
        if self.kind == "multiply":
            logits.mul_(self.value)
        elif self.kind == "divide":
            logits.div_(self.value)
        elif self.kind == "cap":
            logits.div_(self.value).tanh_().mul_(self.value)
        return logits

    def differentiate_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of transformed `logits` into that of raw ones, in place. Returns `gradient`.

        For the kind ``"cap"`` this takes one temporary of the size of `gradient`.
        """
        if self.kind == "multiply":
            gradient.mul_(self.value)
        elif self.kind == "divide":
            gradient.div_(self.value)
        elif self.kind == "cap":
            slope = logits.to(gradient.dtype, copy=True)
            gradient.mul_(slope.div_(self.value).square_().neg_().add_(1.0))
        return gradient


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyShard:
    """The rows of an output layer that are on this rank."""

    first: int
    """Of them, in the whole layer."""
    group: Any
    """Process group of the ranks that have the others."""


@dataclass(frozen=True, slots=True, eq=False)
class LmHead:
    """An output layer whose logits can be computed separately from the rest of the model."""

    weight: Tensor
    """[vocabulary, hidden]; of a model on a mesh only between its forward and its backward pass."""
    bias: Tensor | None
    """[vocabulary]"""
    transform: LogitTransform
    shard: VocabularyShard | None = None
    """Where weight and bias are those of a part of the vocabulary."""


def find_lm_head(model: torch.nn.Module) -> LmHead | None:
    """Return the output layer of `model`, or None where only the model's own code can compute its logits.

    The first call for a model runs it on one token; the result is cached for the lifetime of the model.

    Raises:
        ConfigError: the model cannot compute this token.
    """
    if model not in _TRANSFORMS:
        _TRANSFORMS[model] = _probe(model)
        if _TRANSFORMS[model] is None:
            log.warning(
                "the logits of a microbatch are computed all at once, which takes more memory: the output layer is not "
                "a plain matrix, or the model transforms its logits in an unknown way",
                model=type(model).__name__,
            )
    transform = _TRANSFORMS[model]
    layer = output_layer(model)
    # Not cached: an adapter may have wrapped the layer since.
    if transform is None or not is_plain(layer):
        return None
    assert isinstance(layer, torch.nn.Linear)
    weight: Any = layer.weight
    bias: Any = layer.bias
    shard = _SHARDS.get(layer)
    if shard is None:
        return LmHead(weight, bias, transform)
    return LmHead(weight.to_local(), None if bias is None else bias.to_local(), transform, shard)


def copy_lm_head(sample: torch.nn.Module, model: torch.nn.Module) -> None:
    """Let `find_lm_head` return for `model` what it has found for a sample of it."""
    _TRANSFORMS[model] = _TRANSFORMS[sample]


def shard_vocabulary(layer: torch.nn.Module, shard: VocabularyShard) -> None:
    """Record which rows of an output layer, which is a distributed tensor, are on this rank."""
    _SHARDS[layer] = shard


def output_layer(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that computes logits from hidden states."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(layer, torch.nn.Module), "a causal language model has an output layer"
    return layer


_TRANSFORMS: Final[WeakKeyDictionary[torch.nn.Module, LogitTransform | None]] = WeakKeyDictionary()

_SHARDS: Final[WeakKeyDictionary[torch.nn.Module, VocabularyShard]] = WeakKeyDictionary()


def final_layer(model: torch.nn.Module) -> torch.nn.Module:
    """Return the layer after the last norm: the output layer, or a reward model's layer of scores."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    found: Any = getattr(model, SCORE) if layer is None else layer
    assert isinstance(found, torch.nn.Module)
    return found


def has_final_layer(model: torch.nn.Module) -> bool:
    """Whether `model` has an output layer, or a layer of scores."""
    return model.get_output_embeddings() is not None or hasattr(model, SCORE)  # type: ignore[operator]


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether an output layer is a matrix and nothing else, or this rank's part of one."""
    return type(layer) is torch.nn.Linear and ("forward" not in vars(layer) or layer in _SHARDS)


@torch.no_grad()
def _probe(model: torch.nn.Module) -> LogitTransform | None:
    """Compare the model's logits with those that its output layer is made to return; None if no transform fits."""
    layer = output_layer(model)
    if not is_plain(layer):
        return None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    ramp = torch.linspace(-_PROBE_LOGIT, _PROBE_LOGIT, len(weight)).to(weight.device, weight.dtype)[None, None]

    def return_ramp(_: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return ramp.clone()

    handle = layer.register_forward_hook(return_ramp)
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        logits: Tensor = model(input_ids=token, use_cache=False).logits
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"the model, a {type(model).__name__}, cannot compute the logits of one token "
            f"({str(error).partition(chr(10))[0]}): its config.json is not consistent, correct its sizes"
        ) from error
    finally:
        handle.remove()
    return next((one for one in _candidates(model) if torch.equal(one.apply_(ramp.clone()), logits)), None)


def _candidates(model: torch.nn.Module) -> Iterator[LogitTransform]:
    """Yield possible transforms: none, or one with a number from the model's configuration."""
    yield LogitTransform()
    config: Any = model.config
    values = {
        float(value)
        for value in vars(config.get_text_config()).values()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
    for value in sorted(values - {1.0}):
        yield LogitTransform("multiply", value)
        yield LogitTransform("divide", value)
        yield LogitTransform("cap", value)


def trained_hidden(model: torch.nn.Module, inputs: MicrobatchInputs) -> Tensor:
    """Return the hidden states before the output layer that predict the trained tokens, [N, hidden].

    Where several ranks compute the microbatch these are the ones of this rank's tokens.

    The output layer receives none of them: the caller applies it in chunks.
    """
    found: list[Tensor] = []

    def take(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found.append(_trained(args[0], inputs))
        return (found[0][None, :0], *args[1:])

    _run(model, inputs, take)
    assert len(found) == 1, "the model must apply its output layer once"
    return found[0]


def trained_logits(model: torch.nn.Module, inputs: MicrobatchInputs) -> Tensor:
    """Return the logits that predict the trained tokens, [N, vocabulary]; see `trained_hidden`.

    The logits of other positions, often most of a step's memory, are never computed: a hook removes their hidden states
    just before the output layer. A hook, because the model's own code around that layer (scaling, soft capping) still
    runs.
    """

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_trained(args[0], inputs)[None], *args[1:])

    logits = _run(model, inputs, select)
    assert logits.shape[:2] == (1, len(inputs.own_source)), (
        "the model must apply its output layer once, to hidden states"
    )
    return logits[0]


def _trained(hidden: Tensor, inputs: MicrobatchInputs) -> Tensor:
    return hidden.flatten(0, 1).index_select(0, inputs.own_source)


def _run(model: torch.nn.Module, inputs: MicrobatchInputs, before_output_layer: Any) -> Tensor:
    """Return the logits of one forward pass in which a hook changes the output layer's arguments."""
    # First: the hooks of a layer on a mesh expect what the layer computes.
    handle = output_layer(model).register_forward_pre_hook(before_output_layer, prepend=True)
    try:
        with replaying(inputs.replay):
            logits: Tensor = model(**model_arguments(model, inputs)).logits
    finally:
        handle.remove()
    return logits
