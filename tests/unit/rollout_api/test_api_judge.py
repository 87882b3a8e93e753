"""The reward service's scorer `judge` against the endpoint of a rollout."""

from __future__ import annotations

import pytest
from api_lone import DEADLINE_S, LoneEngine

from starling.reward.score.scorers.batch import Batch
from starling.reward.score.scorers.judge.client import JudgeError
from starling.reward.score.scorers.judge.scorer import Judge


def test_judge_asks_a_rollout(lone: LoneEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has random weights: among so many random characters is a digit."""
    monkeypatch.setenv("JUDGE_KEY", lone.api_key)
    options = {"rubric": "Answer with a digit.", "answer": "regex", "pattern": "([0-9])", "high": 9.0}
    sampling = {"temperature": 1.0, "max_tokens": 300, "parameters": {"seed": 1}, "time_limit_s": DEADLINE_S}
    judge = Judge(lone.base_url, lone.model, api_key_variable="JUDGE_KEY", **options, **sampling)  # type: ignore[arg-type]
    judge.setup()
    batch = Batch(("yes", "no"), ("", ""), ("?", "?"), ({}, {}), (0, 0), ("ok", "ok"), (None, None))
    (scores,) = judge.score(batch).values()
    assert len(scores) == 2
    assert all(score is not None and 0.0 <= score <= 1.0 for score in scores)
    monkeypatch.setenv("JUDGE_KEY", "another")
    refused = Judge(lone.base_url, lone.model, api_key_variable="JUDGE_KEY", **options)  # type: ignore[arg-type]
    refused.setup()
    with pytest.raises(JudgeError, match="it answered with status 401"):
        refused.score(batch)
