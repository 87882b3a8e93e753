"""From the losses of tokens to the loss of a step."""

from __future__ import annotations

from torch import Tensor


def token_mean(losses: Tensor, num_tokens: int) -> Tensor:
    """Return this microbatch's part of the mean loss over all tokens of a step, a scalar.

    Every token of a step weighs the same, whatever its completion's length and whichever microbatch holds it (token
    level loss of DAPO, arXiv:2503.14476, equation 12). That needs the count of the whole step: dividing by the
    microbatch's own count and averaging would make a token weigh more in a microbatch with fewer of them.
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
