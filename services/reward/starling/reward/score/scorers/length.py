"""The scorer `length`: a penalty for completions that are shorter or longer than wanted."""

from __future__ import annotations

from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers.options import check_positive
from starling.reward.score.scorers.registry import Scorer


def make_length(min_tokens: int = 0, max_tokens: int | None = None, scale: float = 1.0) -> Scorer:
    """Make the scorer `length`: 0 for ``min_tokens`` to ``max_tokens`` sampled tokens, negative outside.

    The penalty is ``-scale * d / bound`` for a completion that is `d` tokens below `min_tokens` or above `max_tokens`,
    which is the bound; at most `scale`. For a limit that cuts completions off there is `overlong`.

    Args:
        min_tokens: fewest wanted tokens.
        max_tokens: most wanted tokens; None for no limit.
        scale: the largest penalty.

    Raises:
        ConfigError: the bounds are no numbers of tokens, or there are none.
    """
    for name, value in (("min_tokens", min_tokens), ("max_tokens", max_tokens)):
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"Scorer 'length': {name} must be a number of tokens, not {value!r}.")
    if max_tokens is None and not min_tokens:
        raise ConfigError("Scorer 'length' needs min_tokens or max_tokens, else it is always 0.")
    if max_tokens is not None and (max_tokens < min_tokens or not max_tokens):
        raise ConfigError(f"Scorer 'length': max_tokens is {max_tokens}; give at least 1, and min_tokens {min_tokens}.")
    check_positive("length", scale=scale)

    def penalty(
        completion: str, reference: str, prompt_text: str, metadata: dict[str, Any], *, num_tokens: int
    ) -> float:
        if num_tokens < min_tokens:
            return -scale * (min_tokens - num_tokens) / min_tokens
        if max_tokens is not None and num_tokens > max_tokens:
            return -scale * min(1.0, (num_tokens - max_tokens) / max_tokens)
        return 0.0

    return penalty
