"""Resuming from another run's state, and refusals after a broken step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from states_on_disk import save
from structlog.testing import capture_logs

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.state import SavedState
from starling.policy.train.data.examples import SftExample
from starling.policy.train.errors import StepBrokenError
from starling.policy.train.learner import Learner
from starling.policy.train.sft import SftTrainer

Make = Callable[..., Any]
SHAPES = [(6, [4, 1]), (3, [2, 5])]
MUON = PolicySettings(sft=SftStepSettings(optimizer=OptimizerSettings(kind="muon")))
PLAIN = PolicySettings()


def supervise(learner: Learner, make_groups: Make) -> None:
    groups = make_groups(SHAPES, seed=1)
    learner.supervise([SftExample(group.prompt_ids, group.completion_ids) for group in groups], num_steps=1)


def reinforce(learner: Learner, make_groups: Make) -> dict[str, torch.Tensor]:
    learner.reinforce(make_groups(SHAPES, seed=2, version=1), step=2, num_steps=1)
    return {name: tensor.clone() for name, tensor in learner.tensors.items()}


def test_resume_skips_unused_optimizer(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    first = Learner(tiny, MUON)
    supervise(first, make_groups)
    saved = SavedState.of(find_state(str(save(first, tmp_path, 1))))
    expected = reinforce(first, make_groups)
    other = Learner(tiny, PLAIN)
    with capture_logs() as lines:
        assert other.resume(saved, next_kind="rl") == 1
    assert [(line["kind"], line["next_step"]) for line in lines] == [("sft", "rl")]
    assert other.trainer is None
    again = reinforce(other, make_groups)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_resume_mismatched_optimizer_is_refused(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    first = Learner(tiny, MUON)
    supervise(first, make_groups)
    saved = SavedState.of(find_state(str(save(first, tmp_path, 1))))
    for next_kind in ("sft", None):
        with pytest.raises(ConfigError, match="the saved state of the optimizer does not fit"):
            Learner(tiny, PLAIN).resume(saved, next_kind=next_kind)  # type: ignore[arg-type]
    again = Learner(tiny, MUON)
    again.resume(saved, next_kind="sft")
    assert isinstance(again.trainer, SftTrainer)
    assert again.trainer.optimizer.num_steps == 1


class Breaking(SftTrainer):
    """Makes one update, then fails."""

    def step(self, examples: Sequence[SftExample], settings: PolicySettings | None = None) -> dict[str, float]:
        super().step(examples, settings)
        raise StepBrokenError("the second loss failed")


def test_learner_after_broken_step_refuses_everything(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    learner = Learner(tiny, PLAIN)
    supervise(learner, make_groups)
    path = save(learner, tmp_path, 1)
    learner.trainer = Breaking(learner.model, PLAIN, total_steps=2)
    with pytest.raises(StepBrokenError, match=r"^the second loss failed$"):
        supervise(learner, make_groups)
    for asked in (
        learner.check_whole,
        learner.exported,
        lambda: learner.take_state(1),
        lambda: supervise(learner, make_groups),
        lambda: reinforce(learner, make_groups),
    ):
        with pytest.raises(
            StepBrokenError,
            match=r"not a version, because a step failed between two updates \(the second loss failed\): restart",
        ):
            asked()  # type: ignore[operator]
    assert Learner(tiny, PLAIN).resume(SavedState.of(find_state(str(path)))) == 1, "a new process resumes from there"


def test_learner_after_refused_step_continues(tiny: Make, make_groups: Make) -> None:
    learner = Learner(tiny, PLAIN)
    with pytest.raises(ConfigError, match="no examples"):
        learner.supervise([], num_steps=1)
    supervise(learner, make_groups)
    assert learner.take_state(1).state.version == 1
