"""Reward function of `check_samples.py loop`; imports nothing."""

from __future__ import annotations

from typing import Any


def score(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return the share of the completion's letters that are in the reference.

    It differs within nearly every group of a model with random weights, so that every step trains.
    """
    return sum(letter in reference for letter in completion) / max(len(completion), 1)
