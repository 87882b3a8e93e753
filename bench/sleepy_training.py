"""Simulated training step and constant reward for `async.py`.

[policy.algorithm]
name = "bench/sleepy_training.py:algorithm"
options = { train_s = 1.2 }
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starling.algo.algorithm import Algorithm


def sleep(groups: Sequence[Sequence[float]], *, train_s: float = 0.0) -> list[list[float]]:
    """Sleep `train_s` seconds per step; one completion has an advantage, so that the weights change."""
    time.sleep(train_s)
    advantages = [[0.0] * len(rewards) for rewards in groups]
    advantages[0][0] = 1.0
    return advantages


def score(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return a constant reward."""
    return 0.0


algorithm = Algorithm("starling.algo.loss.reinforce:reinforce", sleep)
