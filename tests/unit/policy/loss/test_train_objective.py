"""Invalid algorithm settings are refused before training, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from starling.algo.algorithm import ALGORITHMS
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings, CorrectionSettings
from starling.policy.train.loss.objective import check_objective, objective_of

OWN = """
from starling.algo.algorithm import Algorithm
from starling.algo.loss.terms import LossTerms

summed = Algorithm(loss=lambda tokens: LossTerms(-tokens.logprobs.sum(), {}))
"""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_check_objective_accepts_every_algorithm(name: str) -> None:
    check_objective(AlgorithmSettings(name=name))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "grop"}, "there is no algorithm 'grop': give one of grpo"),
        ({"name": "gspo", "dual_clip": 3.0}, "gspo: there is no option 'dual_clip': gspo takes clip_low, clip_high"),
        (
            {"name": "reinforce_pp", "advantage_scale": "std"},
            "there is no option 'advantage_scale': ppo_clip takes clip_low",
        ),
        (
            {"name": "gdpo", "advantage_scale": "none"},
            "there is no option 'advantage_scale': ppo_clip .*, and decoupled_normalised takes epsilon",
        ),
        (
            {"options": {"scael": "std"}},
            "there is no option 'scael': ppo_clip .*, and group_normalised takes advantage_scale, epsilon",
        ),
        ({"name": "rloo", "options": {"scale": "std"}}, "there is no option 'scale'"),
        ({"dual_clip": 0.5}, "grpo: dual_clip is 0.5: it must be above 1"),
        ({"name": "reinforce_pp", "options": {"baseline": "grup"}}, "baseline is 'grup': give none or group"),
        ({"corrections": [{"kind": "truncate", "high": 2}]}, "no effect with old = 'rollout'.* set old = 'proximal'"),
        ({"name": "own.py:summed"}, r"the loss of 2 tokens has the shape \[\]; return one number for each token"),
    ],
)
def test_check_objective_refuses_invalid_settings(
    settings: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        check_objective(AlgorithmSettings.model_validate(settings))


def test_objective_of_resolves_corrections() -> None:
    masks = {"kind": "sequence_mask", "high": 0.5}
    assert len(objective_of(AlgorithmSettings.model_validate({"corrections": [masks]})).corrections) == 1
    both = {"old": "proximal", "corrections": [masks, {"kind": "mask", "low": 0.5, "high": 5}]}
    assert len(objective_of(AlgorithmSettings.model_validate(both)).corrections) == 2
    without = AlgorithmSettings(name="decoupled_ppo", old="rollout", corrections=())
    assert objective_of(without).corrections == ()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "mask", "low": 3, "high": 2}, "low is 3.0 and high 2.0: give 0 <= low <= high"),
        (
            {"kind": "truncate", "low": 0.5, "high": 2},
            "a correction of the kind truncate has no lower bound, leave it 0",
        ),
    ],
)
def test_correction_with_inconsistent_bounds_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CorrectionSettings.model_validate(settings)
