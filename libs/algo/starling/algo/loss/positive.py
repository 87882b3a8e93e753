"""Imitation of the completions that went well, beside a policy loss."""

from __future__ import annotations

import torch

from starling.algo.loss.terms import Terms, Tokens


def positive_nll(tokens: Tokens) -> Terms:
    """Return ``-logprobs`` of the tokens whose advantage is above 0, and 0 for the others.

    The positive-example loss of VAPO (arXiv:2504.05118, section 4.3), which is added to the policy loss with a
    coefficient (0.1 there). VAPO divides by the tokens of the positive completions alone; here it shares the weights
    of the policy loss, so the coefficient means the same whatever part of a step went well.

    Metrics: `positive_nll`, the loss itself; `positive_fraction`, the tokens with an advantage above 0.
    """
    positive = tokens.advantages > 0.0
    loss = torch.where(positive, -tokens.logprobs, 0.0)
    return Terms(loss, {"positive_nll": loss.detach(), "positive_fraction": positive.to(loss.dtype)})
