"""The reward of `loop.py`, one function for both sides; it imports nothing."""

from __future__ import annotations

from typing import Any


def score(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return half a point for the whole answer, and half for the share of it that is right from the first character on.

    The share has the longer of the two texts as its base, so that superfluous characters lower it.
    """
    right = 0
    for given, wanted in zip(completion, reference, strict=False):
        if given != wanted:
            break
        right += 1
    share = right / max(len(completion), len(reference), 1)
    return 0.5 * (completion == reference) + 0.5 * share
