"""The scorer `environment`: the reward that the trajectory's environment returned."""

from __future__ import annotations

from typing import Any

from starling.reward.score.scorers.registry import Scorer


def make_environment() -> Scorer:
    """Make the scorer `environment`; it has no options."""
    return environment


def environment(
    completion: str, reference: str, prompt_text: str, metadata: dict[str, Any], *, reward: float | None
) -> float:
    """Return `reward`. Raises ValueError where no environment returned one."""
    if reward is None:
        raise ValueError(
            "no environment returned a reward: set rollout.environment.kind to one that does, or name another scorer"
        )
    return reward
