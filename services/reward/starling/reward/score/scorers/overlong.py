"""The scorer `overlong`: a penalty that grows linearly as a completion approaches its length limit.

DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), to be added to a scorer of the answer. A completion
that is cut off is not simply wrong: without a transition between "short enough" and "cut off", sound
reasoning is punished for its length alone, and the reward is noise.
"""

from __future__ import annotations

import math
from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import Scorer


def make_overlong(max_tokens: int, buffer: int, scale: float = 1.0) -> Scorer:
    """Make the scorer `overlong`: 0 up to ``max_tokens - buffer`` sampled tokens, then linear to ``-scale``.

    `max_tokens` is the length of the full penalty, usually `sampling.max_tokens`; `buffer` is the number of tokens
    before it over which the penalty grows. The stop token counts. Raises ConfigError when one of them is invalid.
    """
    if not _is_whole(max_tokens) or not _is_whole(buffer) or not 1 <= buffer <= max_tokens:
        raise ConfigError(
            f"Scorer 'overlong': max_tokens is {max_tokens!r} and buffer {buffer!r}: give whole numbers with "
            "1 <= buffer <= max_tokens."
        )
    if not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"Scorer 'overlong': scale must be a finite number above 0, not {scale!r}.")

    def overlong(
        completion: str, reference: str, prompt_text: str, metadata: dict[str, Any], *, num_tokens: int
    ) -> float:
        excess = num_tokens - (max_tokens - buffer)
        return -scale * min(max(excess / buffer, 0.0), 1.0)

    return overlong


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
