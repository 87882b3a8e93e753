"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor


def sft_loss(logprobs: Tensor) -> Tensor:
    """Return the negative log-likelihood of each response token: ``-log p(token | all before it)``.

    The caller excludes tokens that are not learnt (the prompt). The mean over the trained tokens is the
    metric `loss`, in nats per token; its exponential is the perplexity.

    Args:
        logprobs: of the response tokens under the trained weights, any shape.
    """
    return -logprobs
