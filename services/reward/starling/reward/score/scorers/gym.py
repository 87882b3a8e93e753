"""The scorers `reasoning_gym:<task>`: each task of reasoning-gym scores answers by its own rule."""

from __future__ import annotations

from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import REASONING_GYM_PREFIX, Scorer, nearest


def make_gym(task: str, **settings: Any) -> Scorer:
    """Make the scorer of `task`; `settings` are those of the task that affect its scoring.

    Raises ConfigError when reasoning-gym is not installed, does not know the task, or refuses the settings.
    """
    name = REASONING_GYM_PREFIX + task
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"Scorer {name!r} needs the package reasoning-gym, which cannot be imported ({error}): "
            "`pip install reasoning-gym`."
        ) from None
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}: {nearest(task, DATASETS)}.")
    try:
        dataset = create_dataset(task, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"Scorer {name!r} refuses its options {settings!r}: {error}.") from None

    def score(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        return float(dataset.score_answer(completion.strip(), entry=entry(reference, prompt_text, metadata)))

    return score


def entry(reference: str, prompt_text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the task as the task made it: `metadata` itself, or a row around the row's metadata."""
    if {"question", "answer", "metadata"} <= metadata.keys():
        return metadata
    return {"question": prompt_text, "answer": reference, "metadata": metadata}
