"""The scorer `repetition`: a penalty for completions that say the same again."""

from __future__ import annotations

from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers.options import check_positive
from starling.reward.score.scorers.registry import Scorer


def make_repetition(num_words: int = 3, scale: float = 1.0) -> Scorer:
    """Make the scorer `repetition`: ``-scale`` times the share of runs of words that have occurred before.

    With W words there are ``W - num_words + 1`` runs; the share is that of the runs which are equal to an earlier one
    (after Yeo et al. 2025, arXiv:2502.03373, for a whole completion). Capitals do not count. 0 for a completion with
    fewer words than a run.

    Args:
        num_words: words of a run.
        scale: the penalty of a completion that repeats one run without end.

    Raises:
        ConfigError: an option is not a number above 0.
    """
    if type(num_words) is not int or num_words < 1:
        raise ConfigError(f"Scorer 'repetition': num_words must be 1 or more, not {num_words!r}.")
    check_positive("repetition", scale=scale)

    def penalty(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        words = completion.lower().split()
        runs = list(zip(*(words[start:] for start in range(num_words)), strict=False))
        return -scale * (1.0 - len(set(runs)) / len(runs)) if runs else 0.0

    return penalty
