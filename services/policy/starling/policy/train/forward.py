"""One forward pass: the log-probabilities of the trained tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from starling.policy.train.batch import Inputs


def trained_logits(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits that predict the trained tokens, [N, vocabulary].

    The other positions' logits, often most of the memory of a step, are never computed: their hidden states are taken
    out just before the output layer. That leaves to the model's own code what it does around that layer (scaling,
    soft capping), which is why it is done by a hook.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, torch.nn.Module), "a causal language model has an output layer"

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden: Tensor = args[0]
        return (hidden.flatten(0, 1).index_select(0, inputs.source)[None], *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        logits: Tensor = model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
        ).logits
    finally:
        handle.remove()
    assert logits.shape[:2] == (1, len(inputs.source)), "the model must apply its output layer once, to hidden states"
    return logits[0]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy of its distribution, both float32 [N].

    `temperature` is one for all, or [N].

    The entropy is a metric: it carries no gradient. Both are of ``softmax(logits / temperature)``, the distribution
    from which the tokens were drawn.
    """
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
