"""One forward pass: what the model says at the cells that predict trained tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from starling.policy.train.batch import Inputs
from starling.policy.train.head import output_layer


def trained_hidden(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """Return the hidden states before the output layer that predict the trained tokens, [N, hidden].

    The output layer itself gets none of them: whoever calls this applies it in chunks.
    """
    found: list[Tensor] = []

    def take(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found.append(_trained(args[0], inputs))
        return (found[0][None, :0], *args[1:])

    _run(model, inputs, take)
    assert len(found) == 1, "the model must apply its output layer once"
    return found[0]


def trained_logits(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits that predict the trained tokens, [N, vocabulary].

    The other positions' logits, often most of the memory of a step, are never computed: their hidden states are taken
    out just before the output layer. That leaves to the model's own code what it does around that layer (scaling,
    soft capping), which is why it is done by a hook.
    """

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_trained(args[0], inputs)[None], *args[1:])

    logits = _run(model, inputs, select)
    assert logits.shape[:2] == (1, len(inputs.source)), "the model must apply its output layer once, to hidden states"
    return logits[0]


def _trained(hidden: Tensor, inputs: Inputs) -> Tensor:
    return hidden.flatten(0, 1).index_select(0, inputs.source)


def _run(model: torch.nn.Module, inputs: Inputs, before_output_layer: Any) -> Tensor:
    """Return the logits of one forward pass in which the output layer's arguments are changed."""
    handle = output_layer(model).register_forward_pre_hook(before_output_layer)
    try:
        logits: Tensor = model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **inputs.extra,
        ).logits
    finally:
        handle.remove()
    return logits
