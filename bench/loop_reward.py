"""Reward function of `loop.py` for both sides; imports nothing."""

from __future__ import annotations

from typing import Any


def score(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return 0.5 for the whole answer, plus 0.5 times the share of its longest correct prefix.

    The share is relative to the longer of the two texts, so that superfluous characters reduce it.
    """
    right = 0
    for actual, expected in zip(completion, reference, strict=False):
        if actual != expected:
            break
        right += 1
    share = right / max(len(completion), len(reference), 1)
    return 0.5 * (completion == reference) + 0.5 * share
