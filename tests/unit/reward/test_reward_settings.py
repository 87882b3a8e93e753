"""Invalid settings are rejected in one sentence."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from starling.common.setting_docs import setting_texts
from starling.reward.core.rewards import WeightedScorer
from starling.reward.settings import RewardSettings, ScorerSettings

WHOLE = """
num_workers = 3
num_slots = 5
timeout_s = 4

[[scorers]]
name = "gsm8k"

[[scorers]]
name = "format"
weight = 0.2
timeout_s = 1.5
label = "form"
options = { pattern = "<answer>.*</answer>" }
"""


def test_settings_in_toml() -> None:
    settings = RewardSettings.model_validate(tomllib.loads(WHOLE))
    assert [(s.label, s.weight) for s in settings.weighted_scorers()] == [("gsm8k", 1.0), ("form", 0.2)]
    assert settings.scorers[1].options == {"pattern": "<answer>.*</answer>"}
    assert (settings.num_workers, settings.num_slots, settings.timeout_s) == (3, 5, 4.0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "No scorer is set"),
        ({"scorers": []}, "No scorer is set"),
        ({"scorers": [{"name": "gsm8k", "weight": 0}]}, "Every scorer has weight 0"),
        ({"scorers": [{"name": "gsm8k", "weight": float("nan")}]}, r"weight\n.*finite number"),
        ({"scorers": [{"name": "gsm8k", "weight": float("inf")}]}, r"weight\n.*finite number"),
        ({"scorers": [{"name": "gsm8k", "timeout_s": 0}]}, r"timeout_s\n.*greater than 0"),
        ({"scorers": [{"name": "gsm8k"}, {"name": "gsm8k"}]}, "'gsm8k' in metrics: give one .* `label`"),
        ({"scorers": [{"name": "gsm8"}]}, "no scorer 'gsm8': did you mean 'gsm8k'.*`module:function`"),
        (
            {"scorers": [{"name": "zzzzz"}]},
            "known are brightness, choice, code, .*exact_match, .*judge, .*verifiers_rubric",
        ),
        ({"scorers": [{"name": "module:"}]}, "no scorer 'module:'"),
        ({"scorers": [{"name": ""}]}, "no scorer ''"),
        ({"scorers": [{"name": "gsm8k", "wieght": 1}]}, "wieght"),
        ({"scorers": [{"name": "gsm8k"}], "timeout_s": float("nan")}, r"timeout_s\n.*finite number"),
        ({"scorers": [{"name": "gsm8k"}], "timeout_s": -1}, r"timeout_s\n.*greater than 0"),
        ({"scorers": [{"name": "gsm8k"}], "start_timeout_s": float("inf")}, r"start_timeout_s\n.*finite number"),
        ({"scorers": [{"name": "gsm8k"}], "num_workers": 0}, "num_workers"),
        ({"scorers": [{"name": "gsm8k"}], "num_slots": 0}, "num_slots"),
        ({"scorers": [{"name": "gsm8k", "clip_min": 1, "clip_max": -1}]}, "'gsm8k': clip_min 1 is above clip_max -1"),
        ({"scorers": [{"name": "gsm8k"}], "clip_min": 0.5, "clip_max": 0}, "reward: clip_min 0.5 is above clip_max 0"),
        ({"scorers": [{"name": "gsm8k"}], "scale": 0}, r"scale\n.*greater than 0"),
        ({"scorers": [{"name": "gsm8k", "batch_size": 0}]}, "batch_size"),
        (
            {"scorers": [{"name": "gsm8k"}, {"name": "math", "label": "gsm8k/a"}]},
            "'gsm8k/a' could be a score of another",
        ),
        ({"scorers": [{"name": "gsm8k"}], "http": {"max_body_mb": 4096}}, "max_body_mb"),
        ({"scorers": [{"name": "gsm8k"}], "http": {"max_body_mb": 9, "max_memory_mb": 8}}, "raise max_memory_mb"),
        ({"scorers": [{"name": "gsm8k", "retries": -1}]}, "retries"),
        ({"scorers": [{"name": "gsm8k", "use": "evaluation"}]}, "Every scorer has weight 0 or use = 'evaluation'"),
        (
            {"scorers": [{"name": "math"}, {"name": "gsm8k", "use": "evaluation", "weight": 0}]},
            "'gsm8k' has use = 'evaluation', .* weight = 0 would do nothing: remove it",
        ),
        (
            {"scorers": [{"name": "math"}, {"name": "gsm8k", "use": "evaluation", "clip_max": 2}]},
            "'gsm8k' has use = 'evaluation', .* clip_max = 2 would do nothing: remove it",
        ),
        ({"scorers": [{"name": "gsm8k", "use": "both"}]}, "'training' or 'evaluation'"),
    ],
)
def test_invalid_reward_settings_are_rejected(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        RewardSettings.model_validate(values)


def test_evaluation_scorer_has_no_weight_in_the_core() -> None:
    settings = RewardSettings.model_validate(
        {"scorers": [{"name": "math", "weight": 2.0}, {"name": "gsm8k", "use": "evaluation", "tasks": ["sums"]}]}
    )
    assert settings.weighted_scorers() == (
        WeightedScorer("math", 2.0),
        WeightedScorer("gsm8k", 0.0, ("sums",), evaluates=True),
    )
    assert [one.title for one in settings.trained_scorers()] == ["math"]
    assert [one.title for one in settings.evaluation_scorers()] == ["gsm8k"]


def test_every_field_is_documented() -> None:
    for section in (RewardSettings, ScorerSettings):
        assert all(setting_texts(section).values())
