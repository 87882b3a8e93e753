"""The scorer `environment`: what the environment of the trajectory gave for it."""

from __future__ import annotations

from typing import Any

from starling.reward.score.scorers.registry import Scorer


def make_environment() -> Scorer:
    """Make the scorer `environment`; it has no options."""
    return environment


def environment(
    completion: str, reference: str, prompt_text: str, metadata: dict[str, Any], *, reward: float | None
) -> float:
    """Return `reward`. ValueError where no environment gave one."""
    if reward is None:
        raise ValueError(
            "no environment gave a reward: set rollout.environment.kind to one that judges, or name another scorer"
        )
    return reward
