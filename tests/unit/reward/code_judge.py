"""A pool of workers with the scorer `code`, for tests."""

from __future__ import annotations

from typing import Any

import pytest

from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, Score, group_task
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.settings import RewardSettings

PATIENCE_S = 240.0


class Judge:
    """A pool with the scorer `code` only."""

    def __init__(self, pool: ScoringPool) -> None:
        self.pool, self.number = pool, 0

    def score(self, *programs: str, reference: str = "", **metadata: Any) -> list[Score]:
        self.number += 1
        texts = (CompletionText(text=text, status=Status.OK, num_tokens=1) for text in programs)
        prompt = PromptText("", reference, metadata)
        self.pool.submit(group_task(f"score:{self.number}", enumerate(texts), prompt, (0,)))
        scores: list[Score] = []
        while len(scores) < len(programs):
            new = self.pool.poll(PATIENCE_S)
            assert new, "no score came"
            scores += new
        return sorted(scores, key=lambda score: score.completion)

    def values(self, *programs: str, reference: str = "", **metadata: Any) -> list[float | None]:
        return [score.value for score in self.score(*programs, reference=reference, **metadata)]


def pool_of(level: Mechanism, *, num_workers: int = 1, timeout_s: float = 20.0, **options: Any) -> ScoringPool:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    scorer = {"name": "code", "timeout_s": 200.0, "options": {"timeout_s": timeout_s, **options}}
    settings = {"scorers": [scorer], "num_workers": num_workers, "sandbox": level}
    return ScoringPool(RewardSettings.model_validate(settings))
