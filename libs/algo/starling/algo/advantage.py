"""Stop 6 of the walk, credit: the rewards of a group become advantages.

Pure Python in double precision; no torch, no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

Scale = Literal["std", "none"]

EPSILON: Final = 1e-4
"""Added to the standard deviation; the value that TRL's `GRPOTrainer` uses, so that results are comparable."""


def group_relative(rewards: Sequence[float], *, scale: Scale = "std", epsilon: float = EPSILON) -> list[float]:
    """Return the advantage of each completion of one group over the group's mean reward.

    ``scale="std"`` is the outcome supervision of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2):
    ``(r_i - mean(r)) / (std(r) + epsilon)`` with the sample standard deviation (divisor n - 1), as TRL computes it.
    ``scale="none"`` leaves out the division (Dr. GRPO, arXiv:2503.20783): dividing favours prompts whose rewards
    hardly differ.

    A group of one, and a group of equal rewards, has advantages of exactly 0: there is nothing to compare with.

    Raises:
        ValueError: the group is empty, a reward is not finite, or `epsilon` is negative.
    """
    if not rewards:
        raise ValueError("a group without rewards has no advantages: give one reward per completion")
    if not epsilon >= 0.0:
        raise ValueError(f"epsilon is {epsilon}: it must be 0 or more")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of the group is {reward}: drop a completion whose scoring failed")
    if all(reward == rewards[0] for reward in rewards):
        # Said outright, because a mean in floating point may differ from its equal terms in the last bit.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + epsilon) for value in centred]
