"""A pool of workers with the scorer `code`, for tests."""

from __future__ import annotations

from typing import Any

import pytest
from scoring import scored, settings_of, task

from starling.common.sandbox.launch import Mechanism, problem_of
from starling.reward.core.samples import PromptText, Score
from starling.reward.score.pool.pool import ScoringPool

PATIENCE_S = 240.0


class Judge:
    """A pool with the scorer `code` only."""

    def __init__(self, pool: ScoringPool, level: Mechanism | None = None) -> None:
        self.pool, self.level, self.number = pool, level, 0

    def score(self, *programs: str, reference: str = "", **metadata: Any) -> list[Score]:
        self.number += 1
        prompt = PromptText("", reference, metadata)
        return scored(self.pool, task(*programs, id=f"score:{self.number}", prompt=prompt), PATIENCE_S)

    def values(self, *programs: str, reference: str = "", **metadata: Any) -> list[float | None]:
        return [score.value for score in self.score(*programs, reference=reference, **metadata)]


class Judges:
    """A judge for each level of the sandbox, started when it is first asked for.

    Args:
        options: of the scorer.
    """

    def __init__(self, **options: Any) -> None:
        self._options, self._judges = options, dict[Mechanism, Judge]()

    def of(self, level: Mechanism) -> Judge:
        """Return the judge of a level; skips the test where the machine does not offer it."""
        if level not in self._judges:
            self._judges[level] = Judge(pool_of(level, **self._options), level)
        return self._judges[level]

    def close(self) -> None:
        for judge in self._judges.values():
            judge.pool.close()


def pool_of(level: Mechanism, *, num_workers: int = 1, timeout_s: float = 20.0, **options: Any) -> ScoringPool:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    scorer = {"name": "code", "timeout_s": 200.0, "options": {"timeout_s": timeout_s, **options}}
    return ScoringPool(settings_of(scorer, num_workers=num_workers, sandbox=level))
