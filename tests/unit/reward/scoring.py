"""Settings, tasks, scores and batches for the tests of scorers and their pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, Score, ScoreTask, group_task
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import Batch
from starling.reward.settings import RewardSettings

PATIENCE_S = 60.0
NO_PROMPT = PromptText("", "", {})


def settings_of(*scorers: dict[str, Any], **others: Any) -> RewardSettings:
    """Return the settings of scorers with one worker, unless `others` have more."""
    return RewardSettings.model_validate({"scorers": scorers, "num_workers": 1, **others})


def scorers_in(file: Path, *names: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the scorers of a file that have these names, which are their labels, too."""
    return [{"name": f"{file}:{name}", "label": name, **fields} for name in names]


def completions(*texts: str) -> list[CompletionText]:
    return [CompletionText(text=text, status=Status.OK, num_tokens=1) for text in texts]


def task(
    *texts: str, id: str = "score:0:0", prompt: PromptText = NO_PROMPT, scorers: tuple[int, ...] = (0,)
) -> ScoreTask:
    """Return the task of one group."""
    return group_task(id, enumerate(completions(*texts)), prompt, scorers)


def collect(pool: ScoringPool, num: int, patience_s: float = PATIENCE_S) -> list[Score]:
    """Return `num` scores by task, completion and scorer, each of which must come in `patience_s` after the last."""
    scores: list[Score] = []
    while len(scores) < num:
        new = pool.poll(patience_s)
        assert new, f"only {len(scores)} of {num} scores came, and none in {patience_s} s"
        scores += new
    return sorted(scores, key=lambda score: (score.task, score.completion, score.scorer))


def scored(pool: ScoringPool, one: ScoreTask, patience_s: float = PATIENCE_S) -> list[Score]:
    """Return the scores of a task, the pool's only one, by completion and scorer."""
    pool.submit(one)
    scores = collect(pool, len(one.samples) * len(one.scorers), patience_s)
    assert pool.gauges()["queue_depth"] == 0
    return scores


def batch_of(num: int, **fields: Any) -> Batch:
    """Return a batch of `num` samples; the fields that are not given are empty."""
    texts: dict[str, Any] = dict.fromkeys(("completions", "references", "prompts"), ("",) * num)
    others = {"metadata": ({},) * num, "num_tokens": (0,) * num, "statuses": ("ok",) * num, "rewards": (None,) * num}
    return Batch(**{**texts, **others, **fields})
