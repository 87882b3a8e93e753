"""From the losses of tokens to the loss of a step: the share of each completion's tokens.

The step's loss is the sum over all its tokens of loss times weight. The weights are computed once for the whole step,
before it is split into microbatches and over ranks, so the parts of all microbatches of all ranks simply add up:
dividing by a microbatch's own count would give a token more weight where there are fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from starling.algo.algorithm import Aggregate


def token_weights(
    lengths: Sequence[int], kind: Aggregate, *, num_tokens: int, num_sequences: int, constant: int = 0
) -> NDArray[np.float64]:
    """Return the weight of each trained token of each completion, [S].

    ``token_mean``: ``1 / num_tokens``, every token of a step the same (DAPO, arXiv:2503.14476, equation 12).
    ``sequence_mean_token_mean``: ``1 / (num_sequences length)``, every completion the same (GRPO, arXiv:2402.03300,
    equation 3): tokens of long completions count less, which favours long wrong answers.
    ``sequence_mean_token_sum``: ``1 / num_sequences``, the policy gradient of whole completions (RLOO).
    ``constant``: ``1 / (num_sequences constant)``, the same free of any length that depends on the samples (Dr. GRPO,
    arXiv:2503.20783, section 3.2).

    Args:
        lengths: trained tokens of each of S completions, which may be some of the step's only; a length may be 0, and
            its weight is then 0 where it would divide by the length.
        kind: one of the four.
        num_tokens: trained tokens of the WHOLE step, over all ranks and microbatches.
        num_sequences: completions of the whole step. The caller decides whether one without trained tokens
            counts.
        constant: assumed tokens of a completion, best the limit of its length; for ``constant`` only.

    Raises:
        ValueError: a length is negative, a divisor is less than 1, or there is no such kind.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    if counts.size and counts.min() < 0:
        raise ValueError(f"completion {int(counts.argmin())} has {int(counts.min())} tokens: it has 0 or more")
    match kind:
        case "token_mean":
            return np.full(counts.shape, 1.0 / _at_least_one(num_tokens, "num_tokens"))
        case "sequence_mean_token_mean":
            shares = np.divide(1.0, counts, out=np.zeros(counts.shape), where=counts > 0)
            return shares / _at_least_one(num_sequences, "num_sequences")
        case "sequence_mean_token_sum":
            return np.full(counts.shape, 1.0 / _at_least_one(num_sequences, "num_sequences"))
        case "constant":
            divisor = _at_least_one(num_sequences, "num_sequences") * _at_least_one(constant, "constant")
            return np.full(counts.shape, 1.0 / divisor)
        case _:
            raise ValueError(
                f"aggregate is {kind!r}: give token_mean, sequence_mean_token_mean, sequence_mean_token_sum or constant"
            )


def token_mean(losses: Tensor, num_tokens: int) -> Tensor:
    """Return this microbatch's part of the mean loss over all tokens of a step, a scalar.

    Every token of a step has the same weight, independent of its completion's length and its microbatch (token-level
    loss of DAPO, arXiv:2503.14476, equation 12). That needs the count of the whole step: dividing by the microbatch's
    own count and averaging would give a token more weight in a microbatch with fewer of them.
    The parts of all microbatches of all ranks add up to the step's loss, and their gradients to its gradient.

    Args:
        losses: of the tokens of one microbatch, any shape.
        num_tokens: trained tokens of the whole step.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a step trains at least 1 token")
    return losses.sum() / num_tokens


def _at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    return value
