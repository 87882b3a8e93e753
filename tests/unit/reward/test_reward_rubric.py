"""The scorer `verifiers_rubric`: rubrics of that library over groups of completions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from scoring import batch_of, scored, settings_of, task

from starling.common.errors import ConfigError
from starling.reward.core.samples import PromptText
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import Batch, ScorerForm
from starling.reward.score.scorers.registry import check_scorer, load_scorer
from starling.reward.score.scorers.rubric import RubricError, VerifiersRubric

FILE = Path(__file__).with_name("rubrics.py")


def batch(*completions: str, metadata: dict[str, Any] | None = None, prompt: str = "1 + 1?") -> Batch:
    num = len(completions)
    given = {"completions": completions, "references": ("2",) * num, "prompts": (prompt,) * num}
    return batch_of(num, metadata=(metadata or {},) * num, **given)


def made(name: str, **options: Any) -> VerifiersRubric:
    scorer = VerifiersRubric(f"{FILE}:{name}", **options)
    scorer.setup()
    return scorer


def test_group_is_scored_by_the_weighted_sum_of_its_functions() -> None:
    assert made("Short").score(batch("2", "22", "22", "3")) == {"score": [1.5, 0.0, 0.0, 0.5]}
    assert made("Short", args={"weight": 4.0}).score(batch("22", "2")) == {"score": [0.0, 5.0]}
    assert made("in_groups").score(batch("22", "2", "3")) == {"score": [0.0, 3.0, 2.0]}
    assert made("environment").score(batch("22", "2")) == {"score": [0.0, 1.0]}


def test_functions_may_be_scores_of_their_own() -> None:
    scorer = made("Short", functions=True)
    assert scorer.keys == ("score", "right", "shortest")
    assert scorer.score(batch("2", "33")) == {"score": [1.5, 0.0], "right": [1.0, 0.0], "shortest": [1.0, 0.0]}


def test_functions_get_the_conversation_and_the_metadata() -> None:
    row: dict[str, Any] = {"info": {"level": 3}, "task": "sums"}
    scorer = made("ready")
    assert scorer.score(batch("2", metadata=row)) == {"score": [131.0]}
    row["messages"] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
    assert scorer.score(batch("2", metadata=row, prompt="ignored")) == {"score": [131.0]}


def test_exception_of_a_function_is_no_reward_of_0(capfd: pytest.CaptureFixture[str]) -> None:
    scorer = made("brittle")
    assert scorer.score(batch("x", "2")) == {"score": [None, 1.0]}
    assert "the reward function 'fails_on_x' raised KeyError" in capfd.readouterr().err
    with pytest.raises(RubricError, match="'fails_on_x' raised KeyError"):
        scorer.score(batch("x"))
    assert scorer.score(batch("2")) == {"score": [1.0]}
    with pytest.raises(RubricError, match="'fails_always' raised RuntimeError: no group is good enough"):
        made("broken").score(batch("2", "3"))


def test_exception_of_a_function_without_weight_costs_no_reward(capfd: pytest.CaptureFixture[str]) -> None:
    assert made("observed").score(batch("x", "2")) == {"score": [0.0, 1.0]}
    assert "'fails_on_x' raised KeyError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rubric": "nothing"}, "rubric must be `module:Rubric`.*not 'nothing'"),
        ({"rubric": f"{FILE}:Missing"}, "Missing"),
        ({"rubric": f"{FILE}:none"}, "is a int, and no rubric of `verifiers`"),
        ({"rubric": f"{FILE}:impossible"}, "cannot be made: RuntimeError: no data here"),
        ({"rubric": f"{FILE}:Short", "args": {"height": 1}}, "cannot be made: TypeError"),
        ({"rubric": "verifiers:Rubric"}, "has no reward function"),
        ({"rubrics": "x"}, "'verifiers_rubric' has no option 'rubrics'"),
    ],
)
def test_rubric_that_cannot_be_used_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_scorer("verifiers_rubric", options)


def test_form_is_a_group() -> None:
    check_scorer("verifiers_rubric", {"rubric": "not_here:Rubric"})  # where the recipe is checked, it need not be
    loaded = load_scorer("verifiers_rubric", {"rubric": f"{FILE}:Short"})
    assert (loaded.form.scope, loaded.form.keys) == ("groupwise", ScorerForm().keys)


def test_worker_finds_a_rubric_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside of its working folder, without a declaration."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    for folder in (place, *place.parents[:4]):
        if folder.stat().st_uid == tmp_path.stat().st_uid and str(folder).count("/") > 1:
            folder.chmod(0o755)
    shutil.copy(FILE, place / "rubrics.py")
    (place / "rubrics.py").chmod(0o644)
    scorer = {"name": "verifiers_rubric", "options": {"rubric": f"{place}/rubrics.py:Short"}, "timeout_s": 120.0}
    with ScoringPool(settings_of(scorer, start_timeout_s=300.0)) as pool:
        scores = scored(pool, task("2", "33", "4", prompt=PromptText("1 + 1?", "2", {})), 300.0)
    assert [score.value for score in scores] == [1.5, 0.0, 0.5], scores
